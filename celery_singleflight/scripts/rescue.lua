-- Hand out the message of a trigger whose run has died, or whose outcome nobody has passed on; put off the next look at it.
--
-- Whatever becomes of the caller, the trigger comes up again: sooner or later, with a pause that doubles. The copy that is
-- published takes its place by the rule of `enter`: the first of several that arrives counts, the others are surplus.
--
-- Uses time, uncertain.
--
-- KEYS[1] trigger      hash: record of the trigger
-- KEYS[2] execution    hash: run record of the execution key; the same key as trigger unless the execution key is explicit
-- KEYS[3] due          sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] member       the trigger, as `due` names it
-- ARGV[2] task_id      id of the trigger
-- ARGV[3] patience_ms  how long after its outcome a trigger that is not settled is left alone
-- ARGV[4] pause_ms     in what time the message is handed out again, the first time; then twice as long each time, up to an hour
--
-- Returns {"later"}  it runs, or has just ended
--      or {"gone"}  there is nothing to rescue
--      or {"parked", lock_key}  it waits for that lock key, and `recall` has its message
--      or {"message", message, copy, outcome, times, first_ms}  to be published as a copy made from this one; outcome is empty for a
--         run that died, times counts how often the message has been handed out since it entered; first_ms is since when it waits,
--         empty when it does not

local function look_again(at)
  redis.call('ZADD', due, text(at), member)
end

-- Before anything can go wrong: a record that cannot be read must not come first for ever.
redis.call('ZADD', due, 'XX', text(now + pause_ms), member)
local message, copy, outcome, settled, ended_ms, parked, awaiting, waits_since = unpack(
  redis.call('HMGET', trigger, 'message', 'copy', 'outcome', 'settled', 'ended_ms', 'parked', 'awaiting', 'waits_since'))
if parked and not message and not outcome then
  return {'parked', parked}
end
if not message or settled then
  redis.call('ZREM', due, member)
  return {'gone'}
end
if outcome then
  local ripe = tonumber(ended_ms) + patience_ms
  if ripe > now then
    look_again(ripe)
    return {'later'}
  end
else
  local holder, until_ms, runs = unpack(redis.call('HMGET', execution, 'owner', 'until_ms', 'task_id'))
  if holder and holder ~= '' and runs == task_id and tonumber(until_ms) > now then
    look_again(tonumber(until_ms))
    return {'later'}
  end
end
if awaiting and not outcome then
  -- It waits until somebody knows what a run has done that died.
  local unsure, holder, until_ms = unpack(redis.call('HMGET', execution, 'unsure', 'owner', 'until_ms'))
  local doubt = unsure and doubt_of(unsure)
  local at = doubt and math.min(now + LOOK_AGAIN_MS, tonumber(awaiting))
  if doubt and holder and holder ~= '' and tonumber(until_ms or nil) > now then
    at = math.min(at, tonumber(until_ms))
  elseif doubt and doubt.next then
    at = math.min(at, doubt.next + (doubt.asks == member and 0 or AFTER_MS))
  end
  if at and at > now then
    keep(trigger, HELD_MS)
    keep(execution, HELD_MS)
    look_again(at)
    return {'later'}
  end
end
local times = redis.call('HINCRBY', trigger, 'handouts', 1)
look_again(now + math.min(pause_ms * 2 ^ (times - 1), 3600000))
return {'message', message, copy or '', outcome or '', times, awaiting and not outcome and waits_since or ''}
