-- Say how an execution ends, if an earlier attempt has begun to undo it.
--
-- KEYS[1] steps  hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] run    id of the run
--
-- Returns {"going", undoable}  it does not end yet; so many of its steps would have to be undone
--      or {"ending", outcome, reason, content_type, content_encoding, body}
--      or {"nothing"}  it has no steps and no cursors

local of_run, undoable, outcome, reason, content_type, content_encoding, body = unpack(
  redis.call('HMGET', steps, 'run', 'undoable', 'outcome', 'reason', 'content_type', 'content_encoding', 'body'))
if of_run ~= run then
  return {'nothing'}
end
if outcome then
  return {'ending', outcome, reason, content_type, content_encoding, body}
end
return {'going', tonumber(undoable or nil) or 0}
