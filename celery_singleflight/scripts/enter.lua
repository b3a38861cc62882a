-- Take the lease of a lock key for one run of one trigger, or say why the run must not start now.
--
-- One decision over everything that belongs together: does this copy of the message still count, has the trigger or its
-- execution ended already, is its execution under way somewhere, is a place free?
--
-- KEYS[1] lease       sorted set: owner token -> expiry in ms
-- KEYS[2] holders     hash: owner token -> JSON list of since in ms, fencing token, task id, worker
-- KEYS[3] fence       string: the last fencing token
-- KEYS[4] pace        hash: hold_ms, the recent hold time; next_ms, the next free turn. Only there while somebody waits
-- KEYS[5] execution   hash: run record of the execution key
-- KEYS[6] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
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
--
-- Returns {"acquired", fence, run, attempt}  it is ours, also when asked again with the same owner token
--      or {"held", what, holder, age_ms, remaining_ms, hold_ms, turn_ms, now_ms, first_ms}  what is "lock"; "execution",
--         the same under another lock key; "own", another delivery runs this trigger or has just ended it; "predecessor",
--         the run that has sent this retry is about to end
--      or {"ended", outcome, settled, reason, content_type, content_encoding, body}  the trigger is over: this is how
--      or {"surplus", why}  another copy of the trigger's message is the one that counts

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local separate = execution ~= trigger
local mine = tonumber(generation)

local function text(number)
  return string.format('%.0f', number)
end

-- A key lives at least this long from now; what another holder needs longer is not cut.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, text(ms))
  end
end

local known = redis.call('HMGET', trigger, 'generation', 'copy', 'outcome', 'settled', 'reason',
                         'content_type', 'content_encoding', 'body', 'by', 'ended_ms')
local run_of = redis.call('HMGET', execution, 'owner', 'until_ms', 'since_ms', 'fence', 'run', 'attempt', 'task_id',
                          'worker', 'outcome', 'content_type', 'content_encoding', 'body', 'run_generation')
local holder, until_ms, done = run_of[1], tonumber(run_of[2]), run_of[9]
if holder == owner and until_ms > now then
  -- Asked again, because the reply was lost.
  return {'acquired', run_of[4], run_of[5], tonumber(run_of[6])}
end

local newest = tonumber(known[1])
if newest and mine < newest then
  return {'surplus', 'generation'}
end
if newest == mine and known[2] and copy ~= known[2] and previous ~= known[2] then
  return {'surplus', 'copy'}
end

local function remember(...)
  redis.call('HSET', trigger, 'generation', generation, 'copy', copy, ...)
  keep(trigger, math.max(tonumber(keep_ms), 3600000))
end

local over = known[3] and (done or not (separate and known[3] == 'succeeded'))
if over and not known[4] and known[9] ~= owner then
  local age = now - (tonumber(known[10]) or 0)
  if age < tonumber(grace_ms) then
    redis.call('HSET', trigger, 'generation', generation, 'copy', copy)
    return {'held', 'own', cjson.encode({task_id, ''}), age, grace_ms - age, 0, 0, text(now), text(tonumber(first_ms) or now)}
  end
end
if known[3] and not (separate and known[3] == 'succeeded') then
  if known[9] ~= owner then
    redis.call('HSET', trigger, 'by', owner, 'ended_ms', text(now))
  end
  return {'ended', known[3], known[4] or '', known[5] or '', known[6] or '', known[7] or '', known[8] or ''}
end
if done then
  local reason = known[5] or cjson.encode({'answered', run_of[7]})
  if tonumber(keep_ms) > 0 then
    remember('outcome', done, 'reason', reason, 'by', owner, 'ended_ms', text(now))
  end
  return {'ended', done, known[4] or '', reason, run_of[10] or '', run_of[11] or '', run_of[12] or ''}
end

local function held(what, since, task, at, ends)
  local age, remaining = math.max(now - since, 0), math.max(ends - now, 0)
  local first = tonumber(first_ms) or now
  local holder_text = cjson.encode({task, at})
  local newcomer = what == 'lock' or what == 'execution'
  if newcomer and on_held ~= 'ask' then
    local outcome
    if on_held == 'skip' then
      outcome = 'skipped'
    elseif on_held == 'reject' then
      outcome = 'rejected'
    elseif wait_ms ~= '' and now - first >= tonumber(wait_ms) then
      outcome = 'timed out waiting'
    end
    if outcome then
      local reason = cjson.encode({what, task, at, age, remaining})
      remember('outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', text(now))
      redis.call('HDEL', trigger, 'settled')
      return {'ended', outcome, '', reason, '', '', ''}
    end
  end
  local hold, turn = tonumber(redis.call('HGET', pace, 'hold_ms')), now
  if on_held ~= 'ask' then
    remember()
  end
  if on_held == 'wait' and newcomer then
    -- Each one that waits gets a turn of its own, one hold time after the turn before.
    local guess = hold or math.max(age, 100)
    local free = now + math.max(guess - age, 0)
    turn = math.max(free, tonumber(redis.call('HGET', pace, 'next_ms')) or 0)
    redis.call('HSET', pace, 'next_ms', text(turn + math.max(guess / tonumber(limit), 1)))
    keep(pace, 600000)
  end
  return {'held', what, holder_text, age, remaining, math.floor(hold or 0), math.floor(turn - now), text(now), text(first)}
end

local attempt, token, since = tonumber(run_of[6]) or 0, nil, now
local ends = now + tonumber(ttl_ms)
if holder and until_ms > now then
  local what = 'execution'
  if run_of[7] == task_id then
    what = mine > (tonumber(run_of[13]) or mine) and 'predecessor' or 'own'
  end
  return held(what, tonumber(run_of[3]), run_of[7], run_of[8], until_ms)
end

local score = tonumber(redis.call('ZSCORE', lease, owner))
if score and score > now then
  -- The owner holds the key for another execution: it is re-entered.
  local held_since = cjson.decode(redis.call('HGET', holders, owner) or cjson.encode({text(now), redis.call('GET', fence) or '0'}))
  since, token, ends = tonumber(held_since[1]), held_since[2], score
else
  if redis.call('ZCOUNT', lease, '(' .. text(now), '+inf') >= tonumber(limit) then
    local first = redis.call('ZRANGEBYSCORE', lease, '(' .. text(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    local who = cjson.decode(redis.call('HGET', holders, first[1]) or '["0","0","",""]')
    return held('lock', tonumber(who[1]), who[3], who[4], tonumber(first[2]))
  end
  for _, dead in ipairs(redis.call('ZRANGEBYSCORE', lease, '-inf', text(now))) do
    redis.call('ZREM', lease, dead)
    redis.call('HDEL', holders, dead)
  end
  local last = tonumber(redis.call('GET', fence)) or 0
  token = text(math.max(last + 1, clock[1] * 1000000 + clock[2]))
  redis.call('SET', fence, token, 'PX', 86400000)
  redis.call('ZADD', lease, text(ends), owner)
  redis.call('HSET', holders, owner, cjson.encode({text(now), token, task_id, worker}))
  keep(lease, tonumber(ttl_ms) + 60000)
  keep(holders, tonumber(ttl_ms) + 60000)
end

if known[3] then
  -- The execution it was answered from is kept no longer.
  redis.call('HDEL', trigger, 'outcome', 'settled', 'reason', 'by', 'ended_ms')
end
local run_id = run_of[5] or run
redis.call('HSET', execution, 'owner', owner, 'until_ms', text(ends), 'since_ms', text(since), 'fence', token,
           'run', run_id, 'attempt', attempt + 1, 'task_id', task_id, 'worker', worker, 'lock_key', lock_key,
           'run_generation', generation)
keep(execution, tonumber(ttl_ms) + tonumber(keep_ms) + 60000)
remember()
return {'acquired', token, run_id, attempt + 1}
