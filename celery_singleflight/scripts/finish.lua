-- End a run with its outcome: store it, release the lease.
--
-- KEYS[1] lease             sorted set: owner token -> expiry in ms
-- KEYS[2] holders           hash: owner token -> JSON list of since in ms, fencing token, task id, worker
-- KEYS[3] fence             string: the last fencing token
-- KEYS[4] pace              hash: hold_ms, the recent hold time; next_ms, the next free turn
-- KEYS[5] execution         hash: run record of the execution key
-- KEYS[6] trigger           hash: record of the trigger; the same key as execution unless the execution key is explicit
-- ARGV[1] owner             owner token of the holder
-- ARGV[2] token             its fencing token
-- ARGV[3] limit             how many may hold the lock key
-- ARGV[4] outcome           "succeeded" or "failed"
-- ARGV[5] reason            for people to read
-- ARGV[6] content_type      of the body; empty when the value could not be stored
-- ARGV[7] content_encoding  of the body
-- ARGV[8] body              the result or the error
-- ARGV[9] keep_ms           how long the outcome is kept
-- ARGV[10] release          "1" to release the lease, "0" when an outer holder of the same context goes on
--
-- Returns {"finished"}  recorded, also when asked again with the same owner token
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now; nothing is changed

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

local separate = execution ~= trigger
local ended = redis.call('HMGET', trigger, 'outcome', 'by')
if ended[1] then
  if ended[2] == owner then
    return {'finished'}
  end
  return {'refused', ended[2] or '', ended[1]}
end
local run = redis.call('HMGET', execution, 'owner', 'outcome', 'by', 'since_ms', 'attempt')
-- A record of an attempt that names nobody, or a trigger without its execution: somebody has been there since.
local forgotten = separate and not run[5] and redis.call('EXISTS', trigger) == 1
if run[2] or forgotten or (run[5] and run[1] ~= owner) then
  return {'refused', run[1] or run[3] or '', run[2] or ''}
end
if not redis.call('ZSCORE', lease, owner) then
  -- Expired and cleared away, or the store forgot: then nobody may have come in since.
  local taken
  if tonumber(limit) == 1 then
    taken = (tonumber(redis.call('GET', fence)) or 0) > tonumber(token)
  else
    taken = redis.call('ZCOUNT', lease, '(' .. string.format('%.0f', now), '+inf') >= tonumber(limit)
  end
  if taken then
    return {'refused', '', ''}
  end
end

if release == '1' then
  redis.call('ZREM', lease, owner)
  redis.call('HDEL', holders, owner)
  if redis.call('EXISTS', pace) == 1 then
    local old = tonumber(redis.call('HGET', pace, 'hold_ms'))
    local hold = math.max(now - (tonumber(run[4]) or now), 1)
    redis.call('HSET', pace, 'hold_ms', string.format('%.0f', old and old * 0.7 + hold * 0.3 or hold))
  end
end

if separate then
  if outcome == 'succeeded' then
    redis.call('HSET', trigger, 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', string.format('%.0f', now))
  else
    -- A failure is the trigger's own: another trigger with the same execution key may run it again.
    redis.call('DEL', execution)
    execution = trigger
  end
  redis.call('PEXPIRE', trigger, keep_ms)
end
redis.call('HDEL', execution, 'owner', 'until_ms')
redis.call('HSET', execution, 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', string.format('%.0f', now),
           'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
redis.call('PEXPIRE', execution, keep_ms)
return {'finished'}
