-- Look after those who wait for a lock key, in case whoever had to call them died, or nobody had to: call the next, and hand out
-- those whose outcome is there.
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
-- KEYS[8] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] lock_key    text of the lock key
--
-- Returns {"attended", calls}  calls are the messages of those who are next, to be published now: see shared/waiting.lua

local calls = {}
-- Before anything can go wrong: a lock key that cannot be read must not come first for ever.
redis.call('ZADD', due, 'XX', text(now + 10000), attention)
-- Whoever has not come and is due no more has come by another lock key: its task makes that in another way now.
for _, member in ipairs(redis.call('ZRANGEBYSCORE', called, '-inf', text(now))) do
  if not redis.call('ZSCORE', due, member) then
    local about = waiter(member)
    forget_waiter(member)
    end_group(calls, about and about.group, member, '')
  end
end
call_next(calls, 0)
local all = redis.call('HGETALL', pace)
for n = 1, #all, 2 do
  local group = string.match(all[n], '^ended:(.*)$')
  if group then
    answer_followers(calls, group, 20)
  end
end
return {'attended', calls}
