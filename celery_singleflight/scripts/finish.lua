-- End a run with its outcome: store it, release the lease.
--
-- KEYS[1] lease             hash: owner token -> lines of expiry in ms, since in ms, fencing token, worker, task id
-- KEYS[2] fence             string: the last fencing token
-- KEYS[3] pace              hash: hold_ms, the recent hold time; next_ms, the next free turn
-- KEYS[4] execution         hash: run record of the execution key
-- KEYS[5] trigger           hash: record of the trigger; the same key as execution unless the execution key is explicit
-- ARGV[1] owner             owner token of the holder
-- ARGV[2] token             its fencing token
-- ARGV[3] limit             how many may hold the lock key
-- ARGV[4] outcome           "succeeded" or "failed"
-- ARGV[5] reason            for people to read
-- ARGV[6] content_type      of the body; empty when the value could not be stored
-- ARGV[7] content_encoding  of the body
-- ARGV[8] body              the result or the error
-- ARGV[9] keep_ms           how long the outcome is kept
-- ARGV[10] hold_ms          for how long the lock key stays taken, from the acquisition; empty when an outer holder goes on
-- ARGV[11] remember_ms      how long the trigger itself is remembered at least
--
-- Returns {"finished"}  recorded, also when asked again with the same owner token
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now; nothing is changed

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local separate = execution ~= trigger

local holder, done, by, since_ms, attempts = unpack(
  redis.call('HMGET', execution, 'owner', 'outcome', 'by', 'since_ms', 'attempt'))
holder = holder ~= '' and holder
local ended, ended_by = done, by
if separate then
  ended, ended_by = unpack(redis.call('HMGET', trigger, 'outcome', 'by'))
end
if ended then
  if ended_by == owner then
    return 'finished'
  end
  return {'refused', ended_by or '', ended}
end
-- A record of an attempt that names nobody, or a trigger without its execution: somebody has been there since.
local is_forgotten = separate and not attempts and redis.call('EXISTS', trigger) == 1
if done or is_forgotten or (attempts and holder ~= owner) then
  return {'refused', holder or by or '', done or ''}
end

local function is_taken()
  if tonumber(limit) == 1 then
    return (tonumber(redis.call('GET', fence)) or 0) > tonumber(token)
  end
  local live = 0
  for _, line in ipairs(redis.call('HVALS', lease)) do
    if tonumber(string.match(line, '^%d+')) > now then
      live = live + 1
    end
  end
  return live >= tonumber(limit)
end

local line = redis.call('HGET', lease, owner)
-- Else it expired and was cleared away, or the store forgot: then nobody may have come in since.
if not line and is_taken() then
  return {'refused', '', ''}
end

local released = hold_ms ~= ''
if released and line then
  local _, since, rest = string.match(line, '^(%d+)\n(%d+)(\n.*)$')
  local ends = tonumber(since) + tonumber(hold_ms)
  redis.call('HDEL', lease, owner)
  if ends > now then
    -- The place stays taken, by a name that nobody can renew.
    redis.call('HSET', lease, owner .. ' ended', string.format('%.0f\n%s%s', ends, since, rest))
    redis.call('PEXPIRE', lease, string.format('%.0f', math.max(redis.call('PTTL', lease), ends - now + 60000)))
  end
end
if released and redis.call('EXISTS', pace) == 1 then
  local old = tonumber(redis.call('HGET', pace, 'hold_ms'))
  local hold = math.max(now - (tonumber(since_ms) or now), 1)
  redis.call('HSET', pace, 'hold_ms', string.format('%.0f', old and old * 0.7 + hold * 0.3 or hold))
end

local ended_ms = string.format('%.0f', now)
if separate then
  if outcome == 'succeeded' then
    redis.call('HSET', trigger, 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', ended_ms)
    if tonumber(keep_ms) < 60000 then
      -- The execution may be forgotten before Celery has sent what follows.
      redis.call('HSET', trigger, 'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
    end
  else
    -- A failure is the trigger's own: another trigger with the same execution key may run it again.
    redis.call('DEL', execution)
    execution = trigger
  end
end
-- The trigger itself is remembered for longer: its message may be delivered again.
local lives = string.format('%.0f', math.max(tonumber(keep_ms), tonumber(remember_ms)))
redis.call('HSET', execution, 'owner', '', 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', ended_ms,
           'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
redis.call('PEXPIRE', trigger, lives)
if execution ~= trigger then
  redis.call('PEXPIRE', execution, keep_ms)
end
return 'finished'
