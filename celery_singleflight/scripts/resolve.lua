-- Say what a run has done that died after its body began; those who wait for that ask again.
--
-- Uses time, uncertain, states.
--
-- KEYS[1] execution   hash: run record of the execution key
-- KEYS[2] trigger     hash: record of the trigger whose run it was; the same key as execution unless the execution key is explicit
-- KEYS[3] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of the run that finds out, and goes on to the body; empty for a person
-- ARGV[2] task_id     id of that trigger
-- ARGV[3] outcome     "succeeded", "failed", or "rerun" when it is to run again
-- ARGV[4] reason      for people to read
-- ARGV[5] content_type      of the body
-- ARGV[6] content_encoding  of the body
-- ARGV[7] body        the result or the error; empty for "rerun"
-- ARGV[8] keep_ms     how long the outcome is kept
-- ARGV[9] failure     "keep" when a failure answers for later triggers of an explicit execution key; else empty
--
-- Returns {"resolved", waiting}  recorded; so many triggers ask again
--      or {"running", worker}  that worker is at it
--      or {"ended", outcome}  it has this outcome already
--      or {"certain"}  no run of it has died: it has been given back, and goes on by itself
--      or {"other", task_id}  the run was of that other trigger: ask again with it
--      or {"unknown"}  there is no such execution

local holder, until_ms, runs, worker, unsure, done = unpack(
  redis.call('HMGET', execution, 'owner', 'until_ms', 'task_id', 'worker', 'unsure', 'outcome'))
local separate = execution ~= trigger
local is_held = holder and holder ~= ''
-- Of one that has ended it may still be said that its run has done nothing: then it can be replayed.
local is_over = done and done ~= 'uncertain'
if is_over and not (unsure and outcome == 'rerun') then
  return {'ended', done}
end
if not runs then
  return {'unknown'}
end
if runs ~= task_id and not (is_held and holder == owner and outcome == 'failed') then
  return {'other', runs}
end
if is_held and holder ~= owner and tonumber(until_ms or 0) > now then
  return {'running', worker or ''}
end
if not unsure and not is_held and not done then
  return {'certain'}
end

local becomes = outcome
if outcome == 'rerun' then
  becomes = owner == '' and not is_over and 'waiting' or nil
elseif outcome == 'failed' and separate and failure ~= 'keep' then
  becomes = 'new'
end
-- Else that other one has found it out, and goes on.
if becomes and (becomes ~= 'new' or runs == task_id) then
  must_become(state_of(runs, holder, until_ms, unsure, done), becomes)
end

-- Nobody is about to send what follows, and it is not waited for.
local ended = {'outcome', outcome, 'reason', reason, 'by', '', 'ended_ms', text(now - AFTER_MS), 'content_type', content_type,
               'content_encoding', content_encoding, 'body', body}
-- The trigger must not run again when the execution is forgotten, before its message comes; that is kept for a day at least.
local function end_trigger()
  if redis.call('EXISTS', trigger) == 1 and redis.call('HEXISTS', trigger, 'outcome') == 0 then
    redis.call('HSET', trigger, unpack(ended))
    keep(trigger, math.max(keep_ms, 86400000))
  end
end

local waiting = end_doubt()
if outcome == 'rerun' then
  if owner == '' then
    redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
  end
  redis.call('HDEL', trigger, 'died', 'left_by')
  if done and not is_over then
    redis.call('HDEL', execution, 'outcome', 'settled', 'reason', 'by', 'ended_ms', 'generation', 'copy')
  end
elseif becomes == 'new' then
  -- A failure is the trigger's own: another trigger with the same execution key may run it.
  end_trigger()
  if runs == task_id then
    redis.call('DEL', execution)  -- else that other one has found it out, and goes on
  end
else
  redis.call('HSET', execution, 'owner', '', unpack(ended))
  if separate then
    end_trigger()
    if redis.call('HGET', trigger, 'outcome') ~= outcome then
      -- Celery has another result of that trigger, or none: at publish nobody is given its handle.
      redis.call('HSET', execution, 'worker', '')
    end
    redis.call('PEXPIRE', execution, text(waiting > 0 and math.max(keep_ms, WAITING_MS) or keep_ms))
  else
    redis.call('PEXPIRE', execution, text(math.max(keep_ms, 86400000)))
  end
end
return {'resolved', waiting}
