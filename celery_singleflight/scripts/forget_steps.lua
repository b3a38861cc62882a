-- Forget what an execution has done.
--
-- KEYS[1] steps  hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] run    id of the run whose steps they are; empty for whosever
--
-- Returns {"forgotten"}  they are gone
--      or {"other"}  they are those of another run, or there are none

local of_run = redis.call('HGET', steps, 'run')
if not of_run or (run ~= '' and of_run ~= run) then
  return {'other'}
end
redis.call('DEL', steps)
return {'forgotten'}
