-- Record what became of a step: it is done, with its result; or it failed, and may be tried again.
--
-- Uses time, holders, overtaken, steps.
--
-- KEYS[1] lease      hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] fence      string: the last fencing token
-- KEYS[3] execution  hash: run record of the execution key
-- KEYS[4] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[5] steps      hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] owner      owner token of the holder
-- ARGV[2] token      its fencing token
-- ARGV[3] limit      how many may hold the lock key
-- ARGV[4] run        id of the run
-- ARGV[5] keep_ms    how long what is done is kept at least
-- ARGV[6] name       of the step
-- ARGV[7] mark       of the call that began it
-- ARGV[8] state      "done" or "failed"
-- ARGV[9] worker     who has done it, for people to read
-- ARGV[10] digest    of the payload; empty when there is none
-- ARGV[11] undo      how to undo it; empty for not at all
-- ARGV[12] note      why there is no result; empty when there is
-- ARGV[13] content_type      of the body; empty when the result could not be stored
-- ARGV[14] content_encoding  of the body
-- ARGV[15] body      the result
--
-- Returns {"recorded"}  also when asked again
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now, or the run has ended; nothing is changed

local refused = overtaken()
if refused then
  return refused
end
open_steps()
local step = step_of(name)
if not step or step.mark ~= mark then
  -- The store forgot that it was begun.
  step = {state = 'begun', mark = mark, times = 1, since = now, worker = worker, unsure = '', digest = digest, undo = undo}
end
step.note, step.content_type, step.content_encoding, step.body = note, content_type, content_encoding, body
if state == 'done' then
  put_done(name, step)
else
  step.state, step.unsure = 'failed', ''
  put_step(name, step)
end
return 'recorded'
