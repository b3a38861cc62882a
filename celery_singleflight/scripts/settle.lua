-- Note that Celery has done what follows a run: its result is stored, its callbacks and the rest of its chain are sent.
--
-- A further copy of a settled trigger's message needs no answer.
--
-- KEYS[*] triggers  records of triggers
-- ARGV[*] owners    owner token of the delivery that ended each of them
--
-- Returns {"settled", count}  how many were ended by the given owner

local count = 0
for n, trigger in ipairs(triggers) do
  if redis.call('HGET', trigger, 'by') == owners[n] then
    redis.call('HSET', trigger, 'settled', '1')
    count = count + 1
  end
end
return {'settled', count}
