-- Take the lease of a lock key for one run of one trigger, or say why the run must not start now.
--
-- One decision over everything that belongs together: does this copy of the message still count, has the trigger or its
-- execution ended already, is its execution under way somewhere, is a place free?
--
-- KEYS[1] lease       hash: owner token -> lines of expiry in ms, since in ms, fencing token, worker, task id
-- KEYS[2] fence       string: the last fencing token
-- KEYS[3] pace        hash: hold_ms, the recent hold time; next_ms, the next free turn. Only there while somebody waits
-- KEYS[4] execution   hash: run record of the execution key
-- KEYS[5] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[6] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of this delivery
-- ARGV[2] task_id     id of the trigger
-- ARGV[3] worker      who asks, for people to read
-- ARGV[4] lock_key    text of the lock key, for people to read
-- ARGV[5] run         id for the run record if the execution has none yet
-- ARGV[6] copy        which copy of the message this is; empty for the first
-- ARGV[7] previous    the copy this one was made from; "-" for the first
-- ARGV[8] generation  grows with each retry and replacement of the trigger by its own code
-- ARGV[9] limit       how many may hold the lock key
-- ARGV[10] ttl_ms     how long the lease lasts
-- ARGV[11] keep_ms    how long records are kept
-- ARGV[12] on_held    what contention means: "wait", "skip" or "reject" end or delay the trigger, "ask" only tells
-- ARGV[13] wait_ms    how long the trigger may wait in all; empty for no bound
-- ARGV[14] first_ms   store time at which the trigger first met contention; empty when it has not
-- ARGV[15] grace_ms   how long another delivery that has just ended the trigger is given to send what follows
-- ARGV[16] message    the message, to be published again if this delivery dies; empty when the store is not to keep it
-- ARGV[17] member     the trigger, as `due` names it
-- ARGV[18] deaths     how many of its runs may die before the trigger is dead-lettered; empty for no bound
-- ARGV[19] task       name of the task that an explicit execution key belongs to; empty when the task id is the key
--
-- Returns {"acquired", fence, run, attempt}  it is ours, also when asked again with the same owner token
--      or {"held", what, holder, age_ms, remaining_ms, hold_ms, turn_ms, now_ms, first_ms}  what is "lock"; "execution",
--         the same under another lock key; "own", another delivery runs this trigger or has just ended it; "predecessor",
--         the run that has sent this retry is about to end
--      or {"ended", outcome, settled, reason, content_type, content_encoding, body}  the trigger is over: this is how
--      or {"surplus", why}  another copy of the trigger's message is the one that counts
--      or {"reused", by_task}  the explicit execution key belongs to that other task

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local separate = execution ~= trigger
local ours = tonumber(generation)

local function text(number)
  return string.format('%.0f', number)
end

local function acquired(...)
  return table.concat({'acquired', ...}, '\n')
end

-- A key lives at least this long from now; what another holder needs longer is not cut.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, text(ms))
  end
end

local holder, until_ms, since_ms, token, run_id, attempts, runs, on, runs_generation, done, newest, counts, settled, by,
  ended_ms, died, by_task, has_run = unpack(
  redis.call('HMGET', execution, 'owner', 'until_ms', 'since_ms', 'fence', 'run', 'attempt', 'task_id', 'worker',
             'run_generation', 'outcome', 'generation', 'copy', 'settled', 'by', 'ended_ms', 'died', 'task', 'run'))
local outcome = done
if separate then
  newest, counts, outcome, settled, by, ended_ms, died, has_run = unpack(
    redis.call('HMGET', trigger, 'generation', 'copy', 'outcome', 'settled', 'by', 'ended_ms', 'died', 'has_run'))
end
local is_running = holder and holder ~= '' and tonumber(until_ms) > now

if is_running and holder == owner then
  -- Asked again, because the reply was lost.
  return acquired(token, run_id, tonumber(attempts))
end

if task ~= '' and by_task and by_task ~= task then
  return {'reused', by_task}
end
newest = tonumber(newest)
if newest and ours < newest then
  return {'surplus', 'generation'}
end
if newest == ours and counts and copy ~= counts and previous ~= counts then
  return {'surplus', 'copy'}
end
if newest and ours > newest then
  -- A retry or a replacement begins a new count of deaths.
  redis.call('HDEL', trigger, 'died', 'left_by')
  died = false
end

-- A message that the store keeps is kept for a day at least.
local lives = math.max(tonumber(keep_ms), message ~= '' and 86400000 or 3600000)

local function remember(...)
  redis.call('HSET', trigger, 'generation', generation, 'copy', copy, ...)
  keep(trigger, lives)
end

-- The trigger has its outcome, and the message is kept until Celery has sent what follows.
local function answers()
  if message ~= '' then
    redis.call('HSET', trigger, 'message', message)
    redis.call('ZADD', due, text(now + tonumber(grace_ms)), member)
  end
end

-- The broker has the trigger's message: the store keeps it no longer.
local function leave_to_broker()
  if redis.call('HDEL', trigger, 'message', 'handouts') > 0 then
    redis.call('ZREM', due, member)
  end
end

-- A success that was passed on, and every other outcome, is the trigger's own. One that is still to be passed on needs its
-- value, and ends with the record that has it.
local has_value = not separate or done == 'succeeded'
local is_own = outcome and (outcome ~= 'succeeded' or settled or has_value or
                            redis.call('HEXISTS', trigger, 'content_type') == 1)
if is_own or done then
  local age = now - (tonumber(ended_ms) or 0)
  if outcome and not settled and by ~= owner and age < tonumber(grace_ms) then
    redis.call('HSET', trigger, 'generation', generation, 'copy', copy)
    return {'held', 'own', cjson.encode({task_id, ''}), age, grace_ms - age, 0, 0, text(now), text(tonumber(first_ms) or now)}
  end
  local ending = is_own and outcome or done
  local reason = outcome and redis.call('HGET', trigger, 'reason') or cjson.encode({'answered', runs})
  if not outcome then
    remember('outcome', done, 'reason', reason, 'by', owner, 'ended_ms', text(now))
  elseif by ~= owner then
    redis.call('HSET', trigger, 'by', owner, 'ended_ms', text(now))
  end
  if not settled then
    answers()
  end
  local source = ending == 'succeeded' and done and execution or trigger
  local value = redis.call('HMGET', source, 'content_type', 'content_encoding', 'body')
  if source == execution and separate and value[1] == '' then
    reason = redis.call('HGET', execution, 'reason')  -- why there is none
  end
  return {'ended', ending, settled or '', reason or '', value[1] or '', value[2] or '', value[3] or ''}
end

-- A trigger that has run before, and was cut off or retries, is no newcomer: whatever the policy, it waits.
if on_held ~= 'ask' and (has_run or ours > 0) then
  on_held = 'wait'
end

local function held(what, since, task, at, ends)
  local age, remaining = math.max(now - since, 0), math.max(ends - now, 0)
  local first = tonumber(first_ms) or now
  local is_newcomer = what == 'lock' or what == 'execution'
  if is_newcomer and on_held ~= 'ask' then
    local ending
    if on_held == 'skip' then
      ending = 'skipped'
    elseif on_held == 'reject' then
      ending = 'rejected'
    elseif wait_ms ~= '' and now - first >= tonumber(wait_ms) then
      ending = 'timed out waiting'
    end
    if ending then
      local reason = cjson.encode({what, task, at, age, remaining})
      remember('outcome', ending, 'reason', reason, 'by', owner, 'ended_ms', text(now))
      redis.call('HDEL', trigger, 'settled')
      answers()
      return {'ended', ending, '', reason, '', '', ''}
    end
  end
  if on_held ~= 'ask' then
    remember()
    if is_newcomer then
      leave_to_broker()
    end
  end
  local hold, turn = tonumber(redis.call('HGET', pace, 'hold_ms')), now
  if on_held == 'wait' and is_newcomer then
    -- Each one that waits gets a turn of its own, one hold time after the turn before.
    local guess = hold or math.max(age, 100)
    local free = now + math.max(guess - age, 0)
    turn = math.max(free, tonumber(redis.call('HGET', pace, 'next_ms')) or 0)
    redis.call('HSET', pace, 'next_ms', text(turn + math.max(guess / tonumber(limit), 1)))
    keep(pace, 600000)
  end
  return {'held', what, cjson.encode({task, at}), age, remaining, math.floor(hold or 0), math.floor(turn - now), text(now),
          text(first)}
end

if is_running then
  local what = 'execution'
  if runs == task_id then
    what = ours > (tonumber(runs_generation) or ours) and 'predecessor' or 'own'
  end
  return held(what, tonumber(since_ms), runs, on, tonumber(until_ms))
end

local function facts(line)
  local ends, since, fenced, at, task = string.match(line, '^(%d+)\n(%d+)\n(%d+)\n([^\n]*)\n(.*)$')
  return {ends = tonumber(ends), since = tonumber(since), fence = fenced, worker = at, task = task}
end

-- A run of this trigger that has not ended died with its process.
died = tonumber(died) or 0
if holder and holder ~= '' and runs == task_id and tonumber(runs_generation) == ours then
  died = died + 1
end
if deaths ~= '' and died >= tonumber(deaths) then
  if separate and runs == task_id then
    redis.call('DEL', execution)
  end
  local reason = cjson.encode({'died', task_id, on or '', died, 0})
  remember('outcome', 'dead-lettered', 'reason', reason, 'by', owner, 'ended_ms', text(now), 'died', died, 'owner', '')
  redis.call('HDEL', trigger, 'settled')
  answers()
  return {'ended', 'dead-lettered', '', reason, '', '', ''}
end

local holders = redis.call('HLEN', lease)
local mine = holders > 0 and redis.call('HGET', lease, owner)
mine = mine and facts(mine)
if mine and mine.ends > now then
  -- The owner holds the key for another execution: it is re-entered.
  token = mine.fence
else
  if holders >= tonumber(limit) then
    local live, first = 0, nil
    local all = redis.call('HGETALL', lease)
    for n = 2, #all, 2 do
      all[n] = facts(all[n])
      if all[n].ends > now then
        live = live + 1
        first = (not first or all[n].ends < first.ends) and all[n] or first
      end
    end
    if live >= tonumber(limit) then
      local is_ours = first.task == task_id and on_held ~= 'ask'
      local what = is_ours and (newest and ours > newest and 'predecessor' or 'own') or 'lock'
      return held(what, first.since, first.task, first.worker, first.ends)
    end
    for n = 2, #all, 2 do
      if all[n].ends <= now then
        redis.call('HDEL', lease, all[n - 1])
      end
    end
  end
  mine = {since = now, ends = now + tonumber(ttl_ms)}
  token = clock[1] * 1000000 + clock[2]
  local last = tonumber(redis.call('SET', fence, text(token), 'PX', 86400000, 'GET')) or 0
  if last >= token then
    token = last + 1
    redis.call('SET', fence, text(token), 'PX', 86400000)
  end
  token = text(token)
  redis.call('HSET', lease, owner, table.concat({text(mine.ends), text(now), token, worker, task_id}, '\n'))
  if holders > 0 then
    keep(lease, tonumber(ttl_ms) + 60000)
  else
    redis.call('PEXPIRE', lease, text(ttl_ms + 60000))
  end
end

if outcome then
  -- The execution it was answered from is kept no longer.
  redis.call('HDEL', trigger, 'outcome', 'settled', 'reason', 'by', 'ended_ms')
end
run_id = run_id or run
attempts = (tonumber(attempts) or 0) + 1
local record = {'owner', owner, 'until_ms', text(mine.ends), 'since_ms', text(mine.since), 'fence', token, 'run', run_id,
                'attempt', attempts, 'task_id', task_id, 'worker', worker, 'lock_key', lock_key, 'run_generation', generation}
if task ~= '' then
  record[#record + 1] = 'task'
  record[#record + 1] = task
end
if separate then
  if message ~= '' then
    remember('has_run', '1', 'message', message)
  else
    remember('has_run', '1')
  end
else
  record[#record + 1] = 'generation'
  record[#record + 1] = generation
  record[#record + 1] = 'copy'
  record[#record + 1] = copy
  if message ~= '' then
    record[#record + 1] = 'message'
    record[#record + 1] = message
  end
end
redis.call('HSET', execution, unpack(record))
if newest then
  redis.call('HDEL', trigger, 'handouts', 'left_by', 'died')
end
if died > 0 then
  redis.call('HSET', trigger, 'died', died)
end
if message ~= '' then
  redis.call('ZADD', due, text(mine.ends), member)
end
lives = tonumber(ttl_ms) + (separate and tonumber(keep_ms) or lives) + 60000
if attempts > 1 or newest then
  keep(execution, lives)
else
  redis.call('PEXPIRE', execution, text(lives))
end
return acquired(token, run_id, attempts)
