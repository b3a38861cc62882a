-- Note how far Celery has come with what follows an outcome: the result, the callbacks, the rest of the chain.
--
-- A further copy of a settled trigger's message needs no answer, and the store keeps the message no longer, unless it is to be
-- kept for a replay, or the trigger was dead-lettered: then somebody will want to see it. A sweeper never hands it out.
--
-- Uses time.
--
-- KEYS[*] places  in turn the record of a trigger, and the sorted set in which the sweeper finds it
-- ARGV[*] facts   in turn the owner token of the delivery that ended the trigger, the trigger as the sorted set names it, "" when
--                 Celery has done all, else in how many ms it may be taken for dead, and whether the message is kept when all is
--                 done: "failed", "always" or "never"
--
-- Returns {"settled", count}  how many of them were ended by the given owner

local count = 0
for n = 1, #places / 2 do
  local trigger, due = places[2 * n - 1], places[2 * n]
  local owner, member, patience, keeps = unpack(facts, 4 * n - 3, 4 * n)
  local by, outcome = unpack(redis.call('HMGET', trigger, 'by', 'outcome'))
  if by == owner then
    count = count + 1
    if patience ~= '' then
      redis.call('HSET', trigger, 'ended_ms', text(now))
      redis.call('ZADD', due, 'XX', text(now + patience), member)
    else
      redis.call('HSET', trigger, 'settled', '1')
      local is_success = outcome == 'succeeded' or outcome == 'coalesced'
      local is_kept = keeps == 'always' or outcome == 'dead-lettered' or (keeps == 'failed' and not is_success)
      redis.call('HDEL', trigger, is_kept and 'handouts' or 'message')
      redis.call('ZREM', due, member)
    end
  end
end
return {'settled', count}
