-- Whether somebody has taken over from a run. Needs `time` and `holders`; the keys lease, fence, execution and trigger; the values
-- owner, token and limit.

local holder, done, by, attempts, until_ms, unsure, since_ms = unpack(
  redis.call('HMGET', execution, 'owner', 'outcome', 'by', 'attempt', 'until_ms', 'unsure', 'since_ms'))
-- How the trigger ended, which has a record of its own where the execution key is explicit.
local ended, ended_by = done, by
if execution ~= trigger then
  ended, ended_by = unpack(redis.call('HMGET', trigger, 'outcome', 'by'))
end
-- What the lease says of the run.
local mine = redis.call('HGET', lease, owner)

-- Return nothing when the run may write; else the reply that says who has taken over.
local function overtaken()
  if ended or done then
    return {'refused', ended_by or by or '', ended or done}
  end
  -- A record of an attempt that names nobody, or a trigger without its execution: somebody has been there since.
  local is_forgotten = execution ~= trigger and not attempts and redis.call('EXISTS', trigger) == 1
  if is_forgotten or (attempts and holder ~= owner) then
    return {'refused', holder or '', ''}
  end
  if mine then
    return nil
  end
  -- It expired and was cleared away, or the store forgot: then nobody may have come in since.
  local is_taken
  if tonumber(limit) == 1 then
    is_taken = (tonumber(redis.call('GET', fence)) or 0) > tonumber(token)
  else
    is_taken = holders_now() >= tonumber(limit)
  end
  return is_taken and {'refused', '', ''} or nil
end
