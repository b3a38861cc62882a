-- Look which triggers need attention: their run has died, or nobody has sent what follows their outcome.
--
-- Of the sweepers that ask in one interval the first gets an answer, whoever it is; the next interval asks anew.
--
-- Uses time.
--
-- KEYS[*] places  the turn, a string; then sorted sets: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[*] facts   the interval in ms; how many to name of each set at most, the longest overdue first
--
-- Returns {"due", members}  a JSON list of a list for each set; nothing is changed, but that the sets live for another week
--      or {"wait", left_ms}  another sweeper has looked in this interval

local interval_ms, limit = facts[1], facts[2]
if not redis.call('SET', places[1], '1', 'NX', 'PX', interval_ms) then
  return {'wait', redis.call('PTTL', places[1])}
end
local found = {}
for n = 2, #places do
  -- A set that is none must not hide the others.
  local members = redis.pcall('ZRANGEBYSCORE', places[n], '-inf', text(now), 'LIMIT', 0, limit)
  redis.call('PEXPIRE', places[n], 604800000)
  found[n - 1] = not members.err and #members > 0 and cjson.encode(members) or '[]'
end
return {'due', '[' .. table.concat(found, ',') .. ']'}
