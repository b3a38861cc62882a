-- Those who wait for a lock key. Needs `time` and `holders`, and the keys
--   pace       hash: hold_ms, the recent hold time; limit, how many may hold; ticket, the last one given; lingers and
--              lingers_until, who waits in its slot or is called to; no_slot_until,
--              since no slot was free for it; gathers, the waiting trigger that others are coalesced into, since_ms and
--              ripe_ms of its delay; replaces, the waiting trigger that has asked the holder to stop, whose fencing token is
--              stop, and stop_by its task id; join:<digest>, who waits with that payload; ended:<group>, whose outcome is that
--              of the group
--   line       sorted set: trigger -> ticket
--   called     sorted set: trigger -> store time in ms until which a place is reserved for it; its message is under way
--   parked     hash: trigger -> a line of JSON, its message. The JSON has first, store time in ms of the first contention; copy,
--              of the message; by, the owner token of the delivery that brought it; until_ms, when it has waited too long; kind,
--              its policy; at, when it came, in us, if it may get the outcome of another; oldest, that under coalesce the first
--              arguments count; digest, of its payload, or its task where others coalesce under the lock key too; merged, when
--              the message has arguments of others too; group, of those who get its outcome; follows, the group whose outcome it gets; leader, who that was, once it is there; again, that it was
--              called twice; replaced, the task id of who has taken its place
--   followers  sorted set: trigger -> group whose outcome it will get
--   baton      list: there for whoever lingers, when a place is free
--   due        sorted set: when the sweeper looks at a trigger, or as "\n<lock key>" at this lock key
-- and the value `lock_key`.
--
-- Whoever waits is in `due`: when it has waited too long, when it should have come, or in half a day, so that its record does not
-- go before it.

local RESERVED_MS, AGAIN_MS, SHORT_MS, LOOK_MS, MOST_ABSENT = 2000, 5000, 100, 43200000, 1000
local attention = '\n' .. lock_key

local function waiter(member)
  local stored = redis.call('HGET', parked, member)
  if not stored then
    return nil
  end
  local head, message = string.match(stored, '^([^\n]*)\n(.*)$')
  return cjson.decode(head), message
end

local function put_waiter(member, about, message)
  redis.call('HSET', parked, member, cjson.encode(about) .. '\n' .. message)
end

-- Nobody waits any more by this name: it has entered, or ended. A place that was reserved for it is free.
local function forget_waiter(member)
  local about = waiter(member)
  local lingers, gathers, replaces = unpack(redis.call('HMGET', pace, 'lingers', 'gathers', 'replaces'))
  if member == lingers then
    redis.call('HDEL', pace, 'lingers', 'lingers_until')
  end
  if member == gathers then
    redis.call('HDEL', pace, 'gathers', 'since_ms', 'ripe_ms')
  end
  if member == replaces then
    redis.call('HDEL', pace, 'replaces')
  end
  if about and about.digest and redis.call('HGET', pace, 'join:' .. about.digest) == member then
    redis.call('HDEL', pace, 'join:' .. about.digest)
  end
  redis.call('ZREM', line, member)
  redis.call('ZREM', called, member)
  redis.call('ZREM', followers, member)
  redis.call('HDEL', parked, member)
end

-- Add to `calls` the message of a waiting trigger, to be published by whoever has called the script: a list of the trigger, its
-- copy, since when it waits, the message, and for how many ms it may linger before it asks when it is called ahead of its turn.
local function hand_out(calls, member, about, message, linger_ms)
  redis.call('ZADD', due, 'LT', text(now + AGAIN_MS), member)
  calls[#calls + 1] = {member, about.copy, about.first, message, linger_ms or 0}
end

local function look_at(ms)
  redis.call('ZADD', due, text(ms), attention)
end

local function lingerer()
  local member, until_ms = unpack(redis.call('HMGET', pace, 'lingers', 'lingers_until'))
  return member and tonumber(until_ms) > now and member
end

-- For how many ms a slot may wait, where runs are so short.
local function longest_linger(hold)
  return math.floor(hold * 4) + 50
end

-- Return those who were called and have not come in time, in order. Whoever had to publish their message may have died, so they
-- are called again, once, before anybody behind them.
local function late_ones()
  local late, ticket = redis.call('ZRANGEBYSCORE', called, '-inf', text(now)), {}
  for _, member in ipairs(late) do
    ticket[member] = tonumber(redis.call('ZSCORE', line, member) or nil) or 0
  end
  table.sort(late, function(one, other) return ticket[one] < ticket[other] end)
  return late
end

-- Of those who are called and have a ticket below this one: for how many a place is kept, and how many they are.
local function called_before(ticket)
  local kept, count = 0, 0
  local all = redis.call('ZRANGE', called, 0, -1, 'WITHSCORES')
  for n = 1, #all, 2 do
    if (tonumber(redis.call('ZSCORE', line, all[n]) or nil) or ticket) < ticket then
      local its = tonumber(all[n + 1]) <= now and waiter(all[n])
      count = count + 1
      kept = kept + ((its and its.again or its == nil) and 0 or 1)
    end
  end
  return kept, count
end

local function pass_baton()
  if redis.call('LLEN', baton) == 0 then
    redis.call('RPUSH', baton, '1')
    redis.call('PEXPIRE', baton, '2000')
  end
end

-- Call those who are next: as many as there are places, and so many more where runs are short, to be there in time.
local function call_next(calls, ahead)
  local hold, limit, gathers, ripe, no_slot = unpack(
    redis.call('HMGET', pace, 'hold_ms', 'limit', 'gathers', 'ripe_ms', 'no_slot_until'))
  limit = tonumber(limit or nil) or 1
  local live, first = holders_now()
  local lingers = lingerer()
  -- Who waits with the broker may linger too, and has no ticket.
  local its_ticket = lingers and tonumber(redis.call('ZSCORE', line, lingers) or nil)
  if lingers and live < limit and (not its_ticket or called_before(its_ticket) < limit - live) then
    pass_baton()
  end
  local waiting = redis.call('ZCARD', line)
  if waiting == 0 then
    if redis.call('EXISTS', parked) == 0 then
      redis.call('ZREM', due, attention)
      redis.call('PEXPIRE', pace, '600000')
    end
    return
  end
  if (tonumber(hold or nil) or SHORT_MS + 1) > SHORT_MS or (tonumber(no_slot or nil) or 0) > now then
    ahead = 0
  end
  local valid, all = redis.call('ZCOUNT', called, '(' .. text(now), '+inf'), redis.call('ZCARD', called)
  local free = math.max(limit - live, 0)
  local want = math.min(free + ahead - valid, 20)
  local next_look = nil
  local function call(member, about, message)
    redis.call('ZADD', called, text(now + RESERVED_MS), member)
    want, valid = want - 1, valid + 1
    if valid > free then
      redis.call('HSET', pace, 'lingers', member, 'lingers_until', text(now + RESERVED_MS))
      hand_out(calls, member, about, message, longest_linger(hold))
    elseif member ~= lingers then
      hand_out(calls, member, about, message)
    end
  end
  if want > 0 and all > valid then
    for _, member in ipairs(late_ones()) do
      local about, message = waiter(member)
      if want > 0 and about and not about.again and not (member == gathers and (tonumber(ripe or nil) or 0) > now) then
        about.again = true
        put_waiter(member, about, message)
        call(member, about, message)
      end
    end
  end
  -- Those who were called twice and have not come are passed, and take up no room but that of looking past them.
  want = math.min(want, MOST_ABSENT + limit - all)
  if want > 0 and all < waiting then
    for _, member in ipairs(redis.call('ZRANGE', line, 0, all + want)) do
      if want > 0 and not redis.call('ZSCORE', called, member) then
        if member == gathers and (tonumber(ripe or nil) or 0) > now then
          next_look = tonumber(ripe)
        else
          local about, message = waiter(member)
          if about then
            call(member, about, message)
          else
            forget_waiter(member)
          end
        end
      end
    end
  end
  local at = now + RESERVED_MS
  if valid == 0 and live >= limit then
    at = first.ends + 10
  end
  look_at(math.min(at, next_look or at))
end

-- Hand out some of those who get the outcome of a group that has ended.
local function answer_followers(calls, group, most)
  local leader = redis.call('HGET', pace, 'ended:' .. group)
  if not leader then
    return
  end
  local some = redis.call('ZRANGEBYSCORE', followers, group, group, 'LIMIT', 0, most + 1)
  for n = 1, math.min(#some, most) do
    local about, message = waiter(some[n])
    redis.call('ZREM', followers, some[n])
    if about then
      about.leader, about.follows = leader, group
      put_waiter(some[n], about, message)
      hand_out(calls, some[n], about, message)
    end
  end
  if #some <= most then
    redis.call('HDEL', pace, 'ended:' .. group)
  else
    look_at(now + RESERVED_MS)
  end
end

-- Whether those of a group wait for nobody: who led it is neither among the holders nor in line.
local function is_left_alone(group)
  if redis.call('ZCARD', line) > 0 or redis.call('HEXISTS', pace, 'ended:' .. group) == 1 then
    return false
  end
  local _, _, all = holders_now()
  for _, holder in ipairs(all) do
    if holder.group == group then
      return false
    end
  end
  return true
end

-- One of those who wait for the outcome of a group becomes the next to run, for the others too.
local function lead(member, about, message, group)
  redis.call('ZREM', followers, member)
  about.group, about.follows = group, nil
  put_waiter(member, about, message)
  local head = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', line, text((tonumber(head or nil) or clock[1] * 1000000 + clock[2]) - 1), member)
  if about.kind == 'coalesce' then
    redis.call('HSETNX', pace, 'gathers', member)
  end
end

-- Return who of a group is to run when its leader does not, what is known of it, and its message: of those that are coalesced the
-- one whose arguments count, which may be merged from those of the others; else who came first.
local function heir_of(group)
  local heir, its, its_message, its_rank
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', followers, group, group)) do
    local about, message = waiter(member)
    if about then
      local at = tonumber(about.at or nil) or 0
      local rank = about.kind == 'coalesce' and not about.oldest and at or -at
      if not heir or rank > its_rank then
        heir, its, its_message, its_rank = member, about, message, rank
      end
    else
      redis.call('ZREM', followers, member)
    end
  end
  return heir, its, its_message
end

-- The one that leads a group has its outcome: its followers get the same, or one of them becomes the next to run.
local function end_group(calls, group, leader, outcome)
  if not group or group == '' then
    return
  end
  local first = redis.call('ZRANGEBYSCORE', followers, group, group, 'LIMIT', 0, 1)[1]
  if not first then
    return
  end
  local about = waiter(first)
  if outcome == 'succeeded' or (outcome == 'failed' and about and about.kind == 'coalesce') then
    redis.call('HSET', pace, 'ended:' .. group, leader)
    answer_followers(calls, group, 8)
    return
  end
  local heir, its, message = heir_of(group)
  if heir then
    lead(heir, its, message, group)
  end
end
