-- What `enter` does with a trigger of an execution of which nobody knows what its last run has done. Needs `time`, `taking`,
-- `waiting`, `parking`, `places`, `states`, `uncertain`, `answering` and the keys and values of `enter`.

-- When to try next to find out, if at all, counted from `since`.
local function next_try(doubt, since)
  local n = 0
  for ms in string.gmatch(delays, '%d+') do
    n = n + 1
    if n == doubt.tries + 1 then
      return since + ms
    end
  end
end

-- What a run that enters is told of an earlier one that died.
local function told(doubt)
  local what = '1'
  if doubt.by == owner then
    local task, worker = unpack(cjson.decode(doubt.who))
    what = cjson.encode({task, worker, math.max(now - doubt.since, 0), doubt.tries})
  end
  return what
end

-- Let the trigger wait until somebody knows; or end, where it does not wait, or has waited for too long. `counts` is the copy of
-- the trigger's message that counted.
local function wait_for_word(doubt, counts)
  if not is_running then
    must_become(found, 'uncertain')
  end
  local age, who = math.max(now - doubt.since, 0), doubt.who
  local keeper = doubt.asks and string.match(doubt.asks, '^[^\n]*') or ''
  local is_asked = redis.call('HEXISTS', execution, 'awaits:' .. keeper) == 1
  if doubt.next and message ~= '' and not is_asked then
    doubt.asks = member
  end
  redis.call('HSET', execution, 'unsure', line_of(doubt))
  keep(execution, HELD_MS)
  if on_held == 'ask' then
    return {'uncertain', 'told', who, age, calls}
  end
  local since, is_there = unpack(redis.call('HMGET', trigger, 'waits_since', 'awaiting'))
  local first = tonumber(first_ms) or tonumber(since or nil) or now
  leave_place_in_line()
  if on_held == 'skip' or on_held == 'reject' or is_over(text(first)) then
    redis.call('HDEL', execution, 'awaits:' .. task_id)
    local task, worker = unpack(cjson.decode(who))
    return end_here('uncertain', cjson.encode({'uncertain', task, worker, age, 0}))
  end
  if message == '' then
    remember()
    local pause = doubt.next and math.max(doubt.next - now, 0) or LOOK_AGAIN_MS
    return {'held', 'uncertain', who, age, 0, 0, pause, text(now), text(first), 0, 0, ''}
  end
  local deadline = wait_ms ~= '' and first + wait_ms or now + HELD_MS
  if expires_ms ~= '' then
    deadline = math.min(deadline, now + expires_ms)
  end
  remember('awaiting', text(deadline), 'awaits_at', lock_key, 'member', member, 'waits_since', text(first), 'message', message)
  redis.call('HDEL', trigger, 'parked', 'handouts')
  redis.call('HSET', execution, 'awaits:' .. task_id, member)
  keep(trigger, HELD_MS)
  local look = doubt.next and doubt.next + (doubt.asks == member and 0 or AFTER_MS) or now + LOOK_AGAIN_MS
  redis.call('ZADD', due, text(math.min(look, deadline, now + LOOK_AGAIN_MS)), member)
  leave_line()
  return {'uncertain', is_there and counts == copy and 'again' or 'held', who, age, calls}
end
