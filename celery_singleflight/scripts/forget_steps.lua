-- Forget what an execution has done.
--
-- KEYS[1] execution  hash: run record of the execution key
-- KEYS[2] steps      hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] run        id of the run whose steps they are; empty for whosever, when a person says so
--
-- Returns {"forgotten"}  they are gone
--      or {"other"}  they are those of another run, or there are none

local of_run = redis.call('HGET', steps, 'run')
local holder, outcome, unsure = unpack(redis.call('HMGET', execution, 'owner', 'outcome', 'unsure'))
if run == '' and not outcome and not unsure and (not holder or holder == '') then
  -- A failure leaves the payload with what was done. Other arguments have nothing to go on with any more.
  redis.call('HDEL', execution, 'payload')
end
if not of_run or (run ~= '' and of_run ~= run) then
  return {'other'}
end
redis.call('DEL', steps)
return {'forgotten'}
