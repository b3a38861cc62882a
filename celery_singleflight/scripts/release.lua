-- Release the lease of a holder on an operator's word, by its fencing token; its trigger comes up for rescue at once.
--
-- Nothing of the holder counts afterwards: it finds no lease to renew, its record names it no more, and its fencing token is
-- not the newest. What its run has done nobody knows, as of one that has died.
--
-- Uses time, holders, uncertain, states.
--
-- KEYS[1] lease      hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] fence      string: the last fencing token
-- KEYS[3] execution  hash: run record of the execution key
-- KEYS[4] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[5] parked     hash: who waits for the lock key
-- KEYS[6] due        sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] token      fencing token of the holder
-- ARGV[2] task_id    id of the holder's trigger, whose records these are
-- ARGV[3] member     the trigger, as `due` names it
-- ARGV[4] force      "1" to release a holder whose lease is live
-- ARGV[5] lock_key   text of the lock key
--
-- Returns {"released", message}  also when asked again; message is "stored" when the trigger is to be published again, else ""
--      or {"live", worker, age_ms, remaining_ms}  the lease has not expired, and nothing is changed
--      or {"other"}  nobody holds the lock key with this token for this trigger

local function released()
  local message, outcome = unpack(redis.call('HMGET', trigger, 'message', 'outcome'))
  return {'released', message and not outcome and 'stored' or ''}
end

local owner, ends, since, worker
local all = redis.call('HGETALL', lease)
for n = 2, #all, 2 do
  local holder = facts(all[n])
  if holder.fence == token and holder.task == task_id then
    owner, ends, since, worker = all[n - 1], holder.ends, holder.since, holder.worker
  end
end
if not owner then
  if redis.call('HGET', trigger, 'released') == token then
    return released()
  end
  return {'other'}
end
if ends > now and force ~= '1' then
  return {'live', worker, math.max(now - since, 0), ends - now}
end

local holder, outcome, until_ms, unsure = unpack(redis.call('HMGET', execution, 'owner', 'outcome', 'until_ms', 'unsure'))
local is_its = holder == owner and not outcome
if is_its then
  must_become(state_of(true, holder, until_ms, unsure), 'uncertain')
end

redis.call('HDEL', lease, owner)
-- Else a late finish of this holder could still pass, as long as nobody has come in since.
local last = tonumber(redis.call('GET', fence)) or 0
redis.call('SET', fence, text(math.max(last + 1, clock[1] * 1000000 + clock[2])), 'PX', 86400000)

if is_its then
  begin_doubt(owner)
  redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence', 'worker')
  if ends > now then
    -- Should its process be found dead later, that counts then.
    redis.call('HSET', trigger, 'left_by', owner)
  else
    -- As `enter` would count a run that has not ended.
    redis.call('HINCRBY', trigger, 'died', 1)
  end
  redis.call('HDEL', trigger, 'handouts')
  if redis.call('HEXISTS', trigger, 'message') == 1 then
    redis.call('ZADD', due, text(now), member)
  end
end
if redis.call('EXISTS', parked) == 1 then
  -- A sweeper calls who is next.
  redis.call('ZADD', due, text(now), '\n' .. lock_key)
end
redis.call('HSET', trigger, 'released', token)
if redis.call('PTTL', trigger) < 0 then
  redis.call('PEXPIRE', trigger, 3600000)
end
return released()
