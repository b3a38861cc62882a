-- End a run without an outcome, and release the lease: its trigger will run again, or was never to be remembered.
--
-- KEYS[1] lease       hash: owner token -> lines of expiry in ms, since in ms, fencing token, worker, task id
-- KEYS[2] execution   hash: run record of the execution key
-- KEYS[3] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- ARGV[1] owner       owner token of the holder
-- ARGV[2] generation  older copies of the trigger's message stop counting; empty when they still count
-- ARGV[3] forget      "1" to delete the records, for a run that no message stands behind
-- ARGV[4] release     "1" to release the lease, "0" when an outer holder of the same context goes on
--
-- Returns {"abandoned"}  nothing is held by this owner any more

if release == '1' then
  redis.call('HDEL', lease, owner)
end
local holder, outcome = unpack(redis.call('HMGET', execution, 'owner', 'outcome'))
if holder == owner and not outcome then
  if forget == '1' then
    redis.call('DEL', execution)
  else
    redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence', 'worker')
  end
end
if forget == '1' then
  if execution ~= trigger then
    redis.call('DEL', trigger)
  end
elseif generation ~= '' and redis.call('EXISTS', trigger) == 1 then
  local newest = tonumber(redis.call('HGET', trigger, 'generation'))
  if not newest or tonumber(generation) > newest then
    redis.call('HSET', trigger, 'generation', generation)
    redis.call('HDEL', trigger, 'copy')
  end
end
return 'abandoned'
