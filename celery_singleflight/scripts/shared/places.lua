-- The places of those who wait with the broker. Needs `time`, `waiting`, `parking` and the keys and values of `enter`.
--
-- Who meets contention gets a number, once; it comes back with it in its ticket. In `pace` are
--   epoch     when the numbers began; a ticket of another epoch means nothing, and a new number is given
--   issued    the last number given
--   head      about which number has entered last: place = number - head. It goes on with each that enters, and somewhat further
--             where that one was far behind it: who never comes back, and leaves a gap, holds up nobody for long. Those whom it
--             has passed are in front
--   front_ms  until when turns are given to those in front; they look one after the other
--   next_ms   when about the line as it is will be through; for people to read
-- A ticket is epoch:number:tries:last_ms:last_head, of when it looked last.

-- How many are in front. What a turn costs beside the hold time; how long a turn may be where no hold time is known yet.
local IN_FRONT, COST_MS, UNKNOWN_MS, FIRST_MS, LATE_MS, FOLLOWS = 2, 1.5, 20, 100, 50, 0.05

local function read_ticket()
  local epoch, number, tries, last_ms, last_head = string.match(ticket, '^(%d+):(%d+):(%d+):(%d+):([%d.]+)$')
  return epoch, tonumber(number or 0), tonumber(tries or 0), tonumber(last_ms or 0), last_head
end

local function linger_no_more()
  if redis.call('HGET', pace, 'lingers') == member then
    redis.call('HDEL', pace, 'lingers', 'lingers_until')
  end
end

-- The trigger waits no longer: it has entered, or ended.
local function leave_place_in_line()
  if ticket == '' then
    return
  end
  linger_no_more()
  local epoch, issued, head = unpack(redis.call('HMGET', pace, 'epoch', 'issued', 'head'))
  local its_epoch, number = read_ticket()
  if not epoch or epoch ~= its_epoch or number == 0 then
    return
  end
  head, issued = tonumber(head), tonumber(issued)
  head = math.min(head + 1 + math.max(FOLLOWS * (number - head - 1), 0), issued)
  if number == issued then
    -- Nobody is behind it, and hardly anybody before it.
    head = issued
  end
  redis.call('HSET', pace, 'head', string.format('%.2f', head))
end

-- Return in how many ms, for how many tries and in which place the trigger waits for `what`, its new ticket, and the recent
-- hold time; and for how many ms its slot may wait instead, if it may. One of which a run has died had its turn, and is in front.
local function take_place(what, since, age, remaining, has_died)
  local hold, epoch, issued, head, front = unpack(
    redis.call('HMGET', pace, 'hold_ms', 'epoch', 'issued', 'head', 'front_ms'))
  hold, issued, head = tonumber(hold or nil), tonumber(issued or 0), tonumber(head or 0)
  epoch = epoch or text(clock[1] * 1000000 + clock[2])
  local its_epoch, number, tries, last_ms, last_head = read_ticket()
  if its_epoch ~= epoch then
    number, tries, last_head = 0, 0, nil
  end
  local is_back = number > 0
  if what == 'lock' and not is_back then
    number = has_died and math.max(math.floor(head), 1) or issued + 1
  end
  issued = math.max(issued, number)

  local places = tonumber(limit)
  local place = what == 'lock' and math.max(number - head, 0) or 0
  local each = hold and hold / places + COST_MS or UNKNOWN_MS
  local over = age - (hold or 0)
  -- The same is in the way as when it looked last, for longer than was to be expected, and nobody of the line has entered since.
  local is_stuck = since <= last_ms and over > (hold or 0) / 4 and last_head == string.format('%.2f', head)
  tries = is_stuck and tries + 1 or 0
  local left
  if over < 0 then
    left = -over
  elseif place <= IN_FRONT then
    left = math.max(over, (hold or 0) / 4, hold and 1 or FIRST_MS)
  else
    left = math.max(age, hold and 1 or FIRST_MS)
  end
  left = math.min(left, remaining + 10)
  if places > 1 then
    left = math.min(left, each)
  end

  local lingers = lingerer()
  if lingers == member then
    linger_no_more()
    lingers = nil
  end
  local is_short = hold and hold <= SHORT_MS and over <= hold
  if linger_ms ~= '' and what == 'lock' and is_back and is_short and place <= IN_FRONT + 2 and not lingers and not is_waited_for then
    local ms = math.min(tonumber(linger_ms), math.floor(hold * 4) + 50)
    redis.call('DEL', baton)
    redis.call('HSET', pace, 'lingers', member, 'lingers_until', text(now + ms), 'limit', limit)
    return nil, ms
  end

  local turn
  if place <= IN_FRONT then
    -- How long a run that has outstayed the hold time goes on is a guess, by which nobody else is to be kept waiting.
    local others = math.max(issued - head - 1, issued - number, 0)
    -- Where others wait, one of them is likely to be there at the very moment.
    local free = now + math.min(left, each) + (others > 0 and math.min(each / 2, LATE_MS) or COST_MS)
    local at = math.min(math.max(free, tonumber(front or 0)), free + others * each)
    front, turn = at + each, at - now + math.max(left - each, 0)
  else
    turn = left + (place - IN_FRONT + 0.5) * each
  end
  redis.call('HSET', pace, 'epoch', epoch, 'issued', text(issued), 'head', string.format('%.2f', head), 'front_ms', text(front or 0),
             'next_ms', text(now + left + math.max(issued - head, 0) * each))
  if not is_waited_for then
    keep(pace, 600000)
  end
  local its = table.concat({epoch, text(number), tries, text(now), string.format('%.2f', head)}, ':')
  return {hold = hold, turn = turn, place = math.max(math.ceil(place), what == 'lock' and 1 or 0), tries = tries, ticket = its}
end
