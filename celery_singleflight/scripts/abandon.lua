-- End a run without an outcome, and release the lease: its trigger will run again, or was never to be remembered.
--
-- Uses time, holders, waiting, uncertain, states.
--
-- KEYS[1] lease       hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] pace        hash; this and the keys up to baton are of those who wait: see shared/waiting.lua
-- KEYS[3] line        sorted set: trigger -> ticket
-- KEYS[4] called      sorted set: trigger -> store time in ms until which a place is reserved for it
-- KEYS[5] parked      hash: trigger -> what is known of it, its message
-- KEYS[6] followers   sorted set: trigger -> group whose outcome it will get
-- KEYS[7] baton       list
-- KEYS[8] execution   hash: run record of the execution key
-- KEYS[9] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[10] due        sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of the holder
-- ARGV[2] lock_key    text of the lock key
-- ARGV[3] generation  older copies of the trigger's message stop counting; empty when they still count
-- ARGV[4] forget      "1" to delete the records, for a run that no message stands behind
-- ARGV[5] hold_ms     for how long the lock key stays taken, from the acquisition; empty when an outer holder goes on
-- ARGV[6] member      the trigger, as `due` names it
-- ARGV[7] again_ms    in what time the stored message is published unless the trigger has entered again; empty when its
--                     message is the broker's from now on
-- ARGV[8] died        "1" when the run died with its process
-- ARGV[9] cut_off     "1" when its body was cut off, and nobody knows what it has done
--
-- Returns {"abandoned", calls}  nothing is held by this owner any more; calls are the messages of those who are next,
--         to be published now: see shared/waiting.lua

-- So many generations are between two replacements.
local RETRIES = 1048576

local holder, outcome, runs_generation, unsure, until_ms, run = unpack(
  redis.call('HMGET', execution, 'owner', 'outcome', 'run_generation', 'unsure', 'until_ms', 'run'))
local left_by, newest_generation, concluded = unpack(redis.call('HMGET', trigger, 'left_by', 'generation', 'outcome'))
local is_its = holder == owner and not outcome
-- Unless another trigger has begun since.
local was_left = left_by == owner and runs_generation == newest_generation and (not holder or holder == '')
local is_unsure = (died == '1' or cut_off == '1') and not outcome and (is_its or was_left)
local is_forgotten = is_its and (forget == '1' or (execution ~= trigger and concluded and not is_unsure))
-- It was taken for dead, and says how it goes on.
local is_certain = is_its and not is_unsure and unsure and (forget == '1' or doubt_of(unsure).of == owner)
if is_its or is_unsure then
  local becomes = is_forgotten and 'new' or (is_unsure or (unsure and not is_certain)) and 'uncertain' or 'waiting'
  must_become(state_of(run or (execution == trigger and newest_generation), holder, until_ms, unsure, outcome), becomes)
end

if hold_ms ~= '' then
  leave_place(owner, hold_ms)
end
if is_unsure then
  begin_doubt(owner)
elseif is_certain then
  end_doubt()
end
if execution ~= trigger and is_its and concluded then
  -- The main process has given the trigger its outcome while this run lived: nothing is under way any more.
  if is_unsure then
    redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
  else
    redis.call('DEL', execution)
  end
end
outcome = outcome or concluded
-- The process gives back, then the worker's main process finds that it has died. The death of a run that had sent its retry is
-- none of the retry's.
if died == '1' and not outcome and (is_its or was_left) and runs_generation == newest_generation then
  redis.call('HINCRBY', trigger, 'died', 1)
  redis.call('HDEL', trigger, 'left_by')
end
if holder == owner and not outcome then
  if forget == '1' then
    redis.call('DEL', execution)
    redis.call('ZREM', due, member)
  else
    redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
    if died ~= '1' and newest_generation then  -- else the trigger is forgotten, and stays so
      redis.call('HSET', trigger, 'left_by', owner)
    end
    if again_ms == '' then
      -- Without a message here its copy may be parked already, and stays due.
      if redis.call('HDEL', trigger, 'message') > 0 then
        redis.call('ZREM', due, member)
      end
    elseif redis.call('HEXISTS', trigger, 'message') == 1 then
      redis.call('ZADD', due, text(now + again_ms), member)
    end
  end
end
-- A retry comes again by itself. What replaces a run may be anything, and what is rejected may be gone.
local goes_elsewhere = holder == owner and not outcome and again_ms == '' and forget ~= '1' and
                       (generation == '' or generation % RETRIES == 0)
local group = goes_elsewhere and redis.call('HGET', trigger, 'group')
if group then
  redis.call('HDEL', trigger, 'group')
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

local calls = {}
if redis.call('EXISTS', pace) == 1 then
  local about = again_ms == '' and waiter(member)
  if about and about.by == owner then
    -- It was parked, and the one that asked has not been told so: it does what it does with the message.
    forget_waiter(member)
    redis.call('HDEL', trigger, 'parked', 'member')
    end_group(calls, about.group, member, '')
  end
  if goes_elsewhere then
    end_group(calls, group, member, '')
  end
  call_next(calls, 1)
end
if #calls > 0 then
  return {'abandoned', calls}
end
return 'abandoned\n'
