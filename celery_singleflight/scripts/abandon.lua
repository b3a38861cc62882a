-- End a run without an outcome, and release the lease: its trigger will run again, or was never to be remembered.
--
-- KEYS[1] lease       hash: owner token -> lines of expiry in ms, since in ms, fencing token, worker, task id
-- KEYS[2] execution   hash: run record of the execution key
-- KEYS[3] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[4] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of the holder
-- ARGV[2] generation  older copies of the trigger's message stop counting; empty when they still count
-- ARGV[3] forget      "1" to delete the records, for a run that no message stands behind
-- ARGV[4] hold_ms     for how long the lock key stays taken, from the acquisition; empty when an outer holder goes on
-- ARGV[5] member      the trigger, as `due` names it
-- ARGV[6] again_ms    in what time the stored message is published unless the trigger has entered again; empty when its
--                     message is the broker's from now on
-- ARGV[7] died        "1" when the run died with its process
--
-- Returns {"abandoned"}  nothing is held by this owner any more

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local line = hold_ms ~= '' and redis.call('HGET', lease, owner)
if line then
  local _, since, rest = string.match(line, '^(%d+)\n(%d+)(\n.*)$')
  local ends = tonumber(since) + tonumber(hold_ms)
  redis.call('HDEL', lease, owner)
  if ends > now then
    -- The place stays taken, by a name that nobody can renew.
    redis.call('HSET', lease, owner .. ' ended', string.format('%.0f\n%s%s', ends, since, rest))
    redis.call('PEXPIRE', lease, string.format('%.0f', math.max(redis.call('PTTL', lease), ends - now + 60000)))
  end
end
local holder, outcome, runs_generation = unpack(redis.call('HMGET', execution, 'owner', 'outcome', 'run_generation'))
local left_by, newest_generation, concluded = unpack(redis.call('HMGET', trigger, 'left_by', 'generation', 'outcome'))
if execution ~= trigger and holder == owner and concluded and not outcome then
  -- The main process has given the trigger its outcome while this run lived: nothing is under way any more.
  redis.call('DEL', execution)
end
outcome = outcome or concluded
-- The process gives back, then the worker's main process finds that it has died. The death of a run that had sent its retry is
-- none of the retry's.
if died == '1' and not outcome and (holder == owner or left_by == owner) and runs_generation == newest_generation then
  redis.call('HINCRBY', trigger, 'died', 1)
  redis.call('HDEL', trigger, 'left_by')
end
if holder == owner and not outcome then
  if forget == '1' then
    redis.call('DEL', execution)
    redis.call('ZREM', due, member)
  else
    redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
    if died ~= '1' then
      redis.call('HSET', trigger, 'left_by', owner)
    end
    if again_ms == '' then
      redis.call('HDEL', trigger, 'message')
      redis.call('ZREM', due, member)
    elseif redis.call('HEXISTS', trigger, 'message') == 1 then
      redis.call('ZADD', due, string.format('%.0f', now + again_ms), member)
    end
  end
end
if forget == '1' then
  if execution ~= trigger then
    redis.call('DEL', trigger)
  end
elseif generation ~= '' and redis.call('EXISTS', trigger) == 1 then
  local newest = tonumber(newest_generation)
  if not newest or tonumber(generation) > newest then
    redis.call('HSET', trigger, 'generation', generation)
    redis.call('HDEL', trigger, 'copy', 'died', 'left_by')
  end
end
return 'abandoned'
