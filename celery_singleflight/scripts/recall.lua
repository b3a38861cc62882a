-- Look after a parked trigger: hand out its message if it may wait no longer, or was called and has not come. What is known of it
-- lives on while it waits.
--
-- Uses time, holders, waiting.
--
-- KEYS[1] lease       hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] pace        hash; this and the keys up to baton are of those who wait: see shared/waiting.lua
-- KEYS[3] line        sorted set: trigger -> ticket
-- KEYS[4] called      sorted set: trigger -> store time in ms until which a place is reserved for it
-- KEYS[5] parked      hash: trigger -> what is known of it, its message
-- KEYS[6] followers   sorted set: trigger -> group whose outcome it will get
-- KEYS[7] baton       list
-- KEYS[8] trigger     hash: record of the trigger
-- KEYS[9] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] lock_key    text of the lock key
-- ARGV[2] member      the trigger, as `due` names it
-- ARGV[3] pause_ms    in what time it is handed out again, the first time; then twice as long each time, up to an hour
--
-- Returns {"message", message, copy, first_ms}  to be published as a copy made from this one
--      or {"later"}  it waits, and nothing is to be done
--      or {"gone"}  it does not wait any more

local about, message = waiter(member)
if not about then
  -- It may have entered, or ended, since `rescue` found it parked: then its record has the message, and it stays due.
  if redis.call('HEXISTS', trigger, 'message') == 0 then
    redis.call('ZREM', due, member)
  end
  redis.call('HDEL', trigger, 'parked')
  return {'gone'}
end
keep(trigger, 2 * LOOK_MS)
local follows = redis.call('ZSCORE', followers, member)
local must_come = about.leader or about.replaced or redis.call('ZSCORE', called, member)
local until_ms = tonumber(about.until_ms) or now + LOOK_MS
if not must_come and until_ms > now then
  redis.call('ZADD', due, text(math.min(until_ms, now + LOOK_MS)), member)
  if follows and is_left_alone(about.follows) then
    local heir, its, its_message = heir_of(about.follows)
    lead(heir, its, its_message, about.follows)
    look_at(now)
  end
  return {'later'}
end
local times = redis.call('HINCRBY', trigger, 'handouts', 1)
redis.call('ZADD', due, text(now + math.min(pause_ms * 2 ^ (times - 1), 3600000)), member)
return {'message', message, about.copy, about.first}
