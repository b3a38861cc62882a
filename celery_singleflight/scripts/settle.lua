-- Note how far Celery has come with what follows an outcome: the result, the callbacks, the rest of the chain.
--
-- A further copy of a settled trigger's message needs no answer, and the store keeps the message no longer, unless the
-- trigger was dead-lettered: then somebody will want to see it.
--
-- Uses time.
--
-- KEYS[*] places  in turn the record of a trigger, and the sorted set in which the sweeper finds it
-- ARGV[*] facts   in turn the owner token of the delivery that ended the trigger, the trigger as the sorted set names it, and
--                 "" when Celery has done all, else in how many ms it may be taken for dead
--
-- Returns {"settled", count}  how many of them were ended by the given owner

local count = 0
for n = 1, #places / 2 do
  local trigger, due = places[2 * n - 1], places[2 * n]
  local owner, member, patience = facts[3 * n - 2], facts[3 * n - 1], facts[3 * n]
  local by, outcome = unpack(redis.call('HMGET', trigger, 'by', 'outcome'))
  if by == owner then
    count = count + 1
    if patience ~= '' then
      redis.call('HSET', trigger, 'ended_ms', text(now))
      redis.call('ZADD', due, 'XX', text(now + patience), member)
    else
      redis.call('HSET', trigger, 'settled', '1')
      redis.call('HDEL', trigger, outcome == 'dead-lettered' and 'handouts' or 'message')
      redis.call('ZREM', due, member)
    end
  end
end
return {'settled', count}
