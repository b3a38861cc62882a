-- What `enter` does with a trigger that has to wait: put its message by, give it a place. Needs `time`, `taking`, `holders`,
-- `waiting` and the keys and values of `enter`.

local ours = tonumber(generation)
local parks = on_held == 'queue' or on_held == 'coalesce' or on_held == 'replace' or on_held == 'join'
local calls = {}

local is_waited_for = redis.call('EXISTS', parked) == 1
-- What is known of this trigger, when it was parked before; and of it as it is now.
local before = is_waited_for and waiter(member)
local about = before
if about and first_ms == '' then
  first_ms = about.first
end

-- Somebody else has the trigger's message: the store keeps it no longer with its record.
local function leave_message()
  if redis.call('HDEL', trigger, 'message', 'handouts') > 0 then
    redis.call('ZREM', due, member)
  end
end

-- It waits no longer, and the reply has no room for those who are next: a sweeper calls them.
local function step_aside()
  if about then
    forget_waiter(member)
    if about.group then
      redis.call('HSET', trigger, 'group', about.group)
    end
    look_at(now)
  end
end

-- It waits no longer: who is behind it may be next; who follows it goes on to, when it has ended.
local function leave_line(ending, group)
  if about then
    forget_waiter(member)
    if about.group and not ending then
      redis.call('HSET', trigger, 'group', about.group)
    end
  end
  if is_waited_for then
    if ending then
      end_group(calls, about and about.group or group, member, ending)
    end
    call_next(calls, 0)
  end
end

local function is_over(since)
  return wait_ms ~= '' and since ~= '' and now - since >= tonumber(wait_ms)
end

-- Whether nobody who waits comes first for a place of those that are free.
local function is_next(free)
  if free <= 0 then
    return false
  end
  if not is_waited_for then
    return true
  end
  if about and redis.call('ZSCORE', followers, member) then
    return false
  end
  local ticket = tonumber(redis.call('ZSCORE', line, member) or nil)
  local reserved, called_ones = called_before(ticket or math.huge)
  if reserved >= free then
    return false
  end
  if ticket and redis.call('ZSCORE', called, member) then
    return true
  end
  local uncalled = (ticket and redis.call('ZRANK', line, member) or redis.call('ZCARD', line)) - called_ones
  if uncalled == 1 then
    -- Nor does one that is held back for others to come first of those who are not.
    local gathers, ripe = unpack(redis.call('HMGET', pace, 'gathers', 'ripe_ms'))
    local its = gathers and gathers ~= member and redis.call('ZSCORE', line, gathers)
    if its and tonumber(ripe or 0) > now and tonumber(its) < (ticket or math.huge) and not redis.call('ZSCORE', called, gathers) then
      return true
    end
  end
  return uncalled == 0
end

-- Put the trigger's message into the store's custody, with what makes it go on from there.
local function put_by(group, follows)
  remember('parked', lock_key, 'member', member)
  leave_message()
  about = {first = text(tonumber(first_ms) or now), copy = copy, by = owner, kind = before and before.kind or on_held,
           group = group or (about and about.group), follows = follows, digest = digest ~= '' and digest or nil,
           merged = (merged_with ~= '' or (before and before.merged)) and '1' or nil,
           at = before and before.at, oldest = before and before.oldest or (which == 'first' and '1' or nil)}
  if not about.at and about.kind ~= 'queue' then
    about.at = text(clock[1] * 1000000 + clock[2])
  end
  redis.call('PERSIST', pace)
  redis.call('HSET', pace, 'limit', limit)
  local deadline = wait_ms ~= '' and about.first + wait_ms or nil
  if expires_ms ~= '' then
    deadline = math.min(deadline or now + expires_ms, now + expires_ms)
  end
  about.until_ms = deadline and text(deadline)
  put_waiter(member, about, message)
  redis.call('ZADD', due, text(math.min(deadline or now + LOOK_MS, now + LOOK_MS)), member)
  is_waited_for = true
end

local function give_ticket(score)
  if not score then
    score = math.max((tonumber(redis.call('HGET', pace, 'ticket')) or 0) + 1, clock[1] * 1000000 + clock[2])
    redis.call('HSET', pace, 'ticket', text(score))
  end
  redis.call('ZADD', line, text(score), member)
end

local function ticket_of(other)
  return text(tonumber(redis.call('ZSCORE', line, other) or 0))
end

-- Return the group of those who get the outcome of a waiting trigger.
local function group_of(other)
  local its, its_message = waiter(other)
  if not its.group then
    its.group = text(-redis.call('ZSCORE', line, other))
    put_waiter(other, its, its_message)
  end
  return its.group
end

-- Return who is in the way where a place is free, as below: the next that is called.
local function next_called()
  local next_one = redis.call('ZRANGE', called, 0, 0, 'WITHSCORES')
  return {now, string.match(next_one[1] or '', '^[^\n]*'), '', tonumber(next_one[2] or nil) or now}
end

-- `who` is in the way: since when, its task id, its worker, when its lease ends.
local function parked_reply(how, who)
  call_next(calls, 0)
  local since, task, at, ends = unpack(who)
  return {'parked', how, cjson.encode({task, at}), math.max(now - since, 0), math.max(ends - now, 0),
          redis.call('ZRANK', line, member) or 0, ticket_of(member), calls}
end

local function follow(group, who)
  put_by(nil, group)
  redis.call('ZADD', followers, group, member)
  return parked_reply('group', who)
end

-- Wait in line, or in the slot where that is worth it: only one does, and never somebody with others before it. `is_free` is
-- whether a place is, which is another's; `has_died`, whether a run of it has, and its turn has come before.
local function park(who, is_unripe, is_free, has_died)
  local is_called = before and redis.call('ZSCORE', called, member)
  put_by()
  if not redis.call('ZSCORE', line, member) then
    local first = (on_held == 'replace' or has_died) and redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2]
    give_ticket(first and first - 1)
  end
  local hold, other = tonumber(redis.call('HGET', pace, 'hold_ms')), lingerer()
  local may_linger = hold and hold <= SHORT_MS and not is_unripe and (is_called or redis.call('ZRANK', line, member) == 0)
  if is_free and other == member then
    -- It may have taken the baton of who was called before it, for whom that place is, and who is still to come.
    pass_baton()
  end
  if linger_ms ~= '' and may_linger and (not other or other == member) then
    local ms = math.min(tonumber(linger_ms), longest_linger(hold))
    if not other then
      redis.call('DEL', baton)
    end
    redis.call('HSET', pace, 'lingers', member, 'lingers_until', text(now + ms))
    redis.call('ZADD', called, text(now + ms + RESERVED_MS), member)
    -- Should its process die meanwhile, its message is handed out.
    redis.call('ZADD', due, 'LT', text(now + ms + AGAIN_MS), member)
    call_next(calls, 0)
    return {'linger', ms, ticket_of(member), calls}
  end
  if is_called and may_linger and linger_ms == '' then
    -- It was called in time, and there was no slot to wait in.
    redis.call('HSET', pace, 'no_slot_until', text(now + 200))
  end
  redis.call('ZREM', called, member)
  if other == member then
    redis.call('HDEL', pace, 'lingers', 'lingers_until')
  end
  return parked_reply(before and before.copy == copy and before.by ~= owner and 'again' or 'line', who)
end

-- Whoever gathers is held back for others to come.
local function hold_back()
  if delay_ms ~= '' then
    local since = tonumber(redis.call('HGET', pace, 'since_ms') or nil) or now
    redis.call('HSET', pace, 'since_ms', text(since), 'ripe_ms', text(math.min(now + delay_ms, since + within_ms)))
  end
end

-- Take the place of the waiting trigger into which others are coalesced, or follow it, or be the one. Returns a reply, if that
-- is all for now.
local function gather()
  local current = redis.call('HGET', pace, 'gathers')
  current = current and redis.call('ZSCORE', line, current) and current
  local foreign = current and (waiter(current).digest or '') ~= digest
  if foreign then
    current = nil
  end
  if merged_with ~= '' and not current then
    -- It runs by itself, and so must this one.
    return {'merge', '', '', ''}
  end
  if foreign then
    -- Another task gathers its own. This one must run by itself, in line.
    on_held = 'queue'
    return
  end
  if current then
    local its, its_message = waiter(current)
    if which == 'first' then
      hold_back()
      return follow(group_of(current), {now, string.match(current, '^[^\n]*'), '', now})
    elseif which == 'merged' and not (merged_with == current and merged_copy == its.copy) then
      return {'merge', current, its.copy, its_message}
    end
    local ticket, reserved, group = redis.call('ZSCORE', line, current), redis.call('ZSCORE', called, current), group_of(current)
    redis.call('ZREM', line, current)
    redis.call('ZREM', called, current)
    redis.call('ZADD', followers, group, current)
    its.group, its.follows = nil, group
    put_waiter(current, its, its_message)
    if redis.call('HGET', pace, 'lingers') == current then
      redis.call('HDEL', pace, 'lingers', 'lingers_until')
    end
    put_by(group)
    give_ticket(ticket)
    if reserved then
      redis.call('ZADD', called, reserved, member)
    end
    redis.call('HSET', pace, 'gathers', member)
  elseif delay_ms ~= '' then
    put_by()
    give_ticket()
    redis.call('HSET', pace, 'gathers', member, 'since_ms', text(now))
  end
  hold_back()
end

-- Ask the holder to stop. Who has asked before and waits is told that its place is taken.
local function ask_to_stop(stop)
  local older = redis.call('HGET', pace, 'replaces')
  if older and older ~= member then
    local its, its_message = waiter(older)
    if its then
      its.replaced = task_id
      put_waiter(older, its, its_message)
      redis.call('ZREM', line, older)
      redis.call('ZREM', called, older)
      hand_out(calls, older, its, its_message)
    end
  end
  redis.call('HSET', pace, 'replaces', member)
  if stop then
    redis.call('HSET', pace, 'stop', stop.fence, 'stop_by', task_id)
  end
end

-- Wait as the policy says for `first`, one of the holders, or for who is called, when a place is free; the rest is as in `park`.
local function wait_for(who, first, all, is_unripe, has_died)
  if before and redis.call('ZSCORE', followers, member) then
    return parked_reply(before.by == owner and 'group' or 'again', who)
  end
  if on_held == 'join' and digest ~= '' then
    for _, other in ipairs(all) do
      if other.digest == digest then
        return follow(other.group, {other.since, other.task, other.worker, other.ends})
      end
    end
    local twin = redis.call('HGET', pace, 'join:' .. digest)
    if twin and redis.call('ZSCORE', line, twin) then
      return follow(group_of(twin), {now, string.match(twin, '^[^\n]*'), '', now})
    end
    redis.call('HSET', pace, 'join:' .. digest, member)
  elseif on_held == 'coalesce' and not about then
    redis.call('HSET', pace, 'gathers', member)
  elseif on_held == 'replace' then
    ask_to_stop(first)
  end
  return park(who, is_unripe, not first, has_died)
end
