-- Give a trigger the outcome of the one that it was coalesced into, or joined.
--
-- Uses time, holders, waiting, states.
--
-- KEYS[1] lease       hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] pace        hash; this and the keys up to baton are of those who wait: see shared/waiting.lua
-- KEYS[3] line        sorted set: trigger -> ticket
-- KEYS[4] called      sorted set: trigger -> store time in ms until which a place is reserved for it
-- KEYS[5] parked      hash: trigger -> what is known of it, its message
-- KEYS[6] followers   sorted set: trigger -> group whose outcome it will get
-- KEYS[7] baton       list
-- KEYS[8] trigger     hash: record of the trigger
-- KEYS[9] leader      hash: record of the trigger whose outcome it gets
-- KEYS[10] execution  hash: run record of the leader's execution key
-- KEYS[11] due        sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of this delivery
-- ARGV[2] lock_key    text of the lock key
-- ARGV[3] member      the trigger, as `due` names it
-- ARGV[4] by          the leader, as `due` names it
-- ARGV[5] copy        which copy of the message this is
-- ARGV[6] generation  of the message
-- ARGV[7] grace_ms    how long another delivery is given to send what follows
-- ARGV[8] keep_ms     how long the outcome is kept
-- ARGV[9] message     the message, until Celery has sent what follows
--
-- Returns {"ended", outcome, settled, reason, content_type, content_encoding, body, ended_as, calls}  outcome is the trigger's,
--         "coalesced" or that of the leader; the rest tells how the leader ended. calls are the messages of those who are next
--      or {"gone"}  it is to ask anew: nobody knows the leader's outcome any more, or the leader has failed whom it has joined, and
--         it is a newcomer again; or another delivery has just got the outcome

local calls = {}
local ended_as, reason, content_type, content_encoding, body = unpack(
  redis.call('HMGET', leader, 'outcome', 'reason', 'content_type', 'content_encoding', 'body'))
if ended_as == 'succeeded' and not content_type then
  content_type, content_encoding, body = unpack(
    redis.call('HMGET', execution, 'content_type', 'content_encoding', 'body'))
end
local about = waiter(member)
local group = about and about.follows
local outcome, settled, ended_by, ended_ms, known, holder, until_ms, unsure = unpack(
  redis.call('HMGET', trigger, 'outcome', 'settled', 'by', 'ended_ms', 'generation', 'owner', 'until_ms', 'unsure'))
local found = state_of(known, holder, until_ms, unsure, outcome)
if outcome and not settled and ended_by ~= owner and now - (tonumber(ended_ms) or 0) < tonumber(grace_ms) then
  return {'gone'}
end
if not ended_as or (ended_as ~= 'succeeded' and ended_as ~= 'failed') or (ended_as == 'succeeded' and not content_type) or
   (ended_as == 'failed' and about and about.kind == 'join') then
  if outcome then
    must_become(found, 'waiting')
  end
  forget_waiter(member)
  redis.call('HDEL', trigger, 'outcome', 'led_by', 'settled', 'by')
  -- The reply has no room for those who are next: a sweeper calls them.
  look_at(now)
  return {'gone'}
end
if not outcome then
  outcome = about and about.kind == 'coalesce' and 'coalesced' or ended_as
  must_become(found, outcome)
  redis.call('HSET', trigger, 'outcome', outcome, 'led_by', by, 'generation', generation, 'copy', copy,
             'reason', cjson.encode({outcome == 'coalesced' and 'coalesced' or 'answered', string.match(by, '^[^\n]*')}))
end
redis.call('HSET', trigger, 'by', owner, 'ended_ms', text(now))
keep(trigger, math.max(tonumber(keep_ms), 3600000))
if not settled then
  redis.call('HSET', trigger, 'message', message)
  redis.call('ZADD', due, text(now + grace_ms), member)
end
forget_waiter(member)
answer_followers(calls, group or '', 2)
call_next(calls, 0)
return {'ended', outcome, settled or '', reason or '', content_type or '', content_encoding or '', body or '', ended_as, calls}
