-- Look which triggers of a lock name need attention: their lease has ended, or nobody has sent what follows their outcome.
--
-- KEYS[1] due     sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] limit   how many to name at most, the longest overdue first
--
-- Returns {"due", members}  as a JSON list; nothing is changed, but that the set lives for another week

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local members = redis.call('ZRANGEBYSCORE', due, '-inf', string.format('%.0f', now), 'LIMIT', 0, limit)
redis.call('PEXPIRE', due, 604800000)
return {'due', #members > 0 and cjson.encode(members) or '[]'}
