-- Tell which triggers wait in the store's custody, and for which lock keys.
--
-- KEYS[*] places  records of triggers
-- ARGV[*] none    nothing
--
-- Returns {"found", parked}  a list: for each of them the lock key and the trigger, as `due` names it, or twice an empty text

local parked = {}
for n, trigger in ipairs(places) do
  local lock_key, member, outcome, awaits_at = unpack(
    redis.call('HMGET', trigger, 'parked', 'member', 'outcome', 'awaits_at'))
  lock_key = lock_key or awaits_at
  parked[2 * n - 1] = not outcome and lock_key or ''
  parked[2 * n] = not outcome and member or ''
end
return {'found', parked}
