-- End a run with its outcome: store it, release the lease, call those who are next.
--
-- Uses time, holders, overtaken, states.
--
-- KEYS[1] lease             hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] fence             string: the last fencing token
-- KEYS[3] pace              hash; this and the keys up to baton are of those who wait: see shared/waiting.lua
-- KEYS[4] line              sorted set: trigger -> ticket
-- KEYS[5] called            sorted set: trigger -> store time in ms until which a place is reserved for it
-- KEYS[6] parked            hash: trigger -> what is known of it, its message
-- KEYS[7] followers         sorted set: trigger -> group whose outcome it will get
-- KEYS[8] baton             list
-- KEYS[9] execution         hash: run record of the execution key
-- KEYS[10] trigger          hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[11] due              sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner             owner token of the holder
-- ARGV[2] lock_key          text of the lock key
-- ARGV[3] member            the trigger, as `due` names it
-- ARGV[4] token             its fencing token
-- ARGV[5] limit             how many may hold the lock key
-- ARGV[6] outcome           "succeeded", "failed" or "replaced"
-- ARGV[7] reason            for people to read
-- ARGV[8] content_type      of the body; empty when the value could not be stored
-- ARGV[9] content_encoding  of the body
-- ARGV[10] body             the result or the error
-- ARGV[11] keep_ms          how long the outcome is kept
-- ARGV[12] hold_ms          for how long the lock key stays taken, from the acquisition; empty when an outer holder goes on
-- ARGV[13] remember_ms      how long the trigger itself is remembered at least
-- ARGV[14] failure          what a failure is to later triggers of an explicit execution key: "keep", it answers them; "steps", they
--                           go on behind the steps that are done; else empty, and they begin anew
--
-- Returns {"finished", calls}  recorded, also when asked again with the same owner token; calls are the messages of those who
--         are next, to be published now: see shared/waiting.lua
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now; nothing is changed

-- For so long what is done is kept at least; see `open_steps`.
local STEPS_MS = 86400000
local separate = execution ~= trigger
if ended and ended_by == owner then
  return 'finished\n'
end
local refused = overtaken()
if refused then
  return refused
end
local answers = outcome == 'succeeded' or (outcome == 'failed' and failure == 'keep')
local goes_on = separate and outcome == 'failed' and failure == 'steps'
must_become(state_of(attempts, holder, until_ms, unsure), (answers or not separate) and outcome or goes_on and 'waiting' or 'new')

if unsure then
  -- Uses uncertain.
  if end_doubt() > 0 then
    keep_ms = text(math.max(keep_ms, WAITING_MS))
  end
end
local ended_ms = text(now)
if separate then
  if answers then
    redis.call('HSET', trigger, 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', ended_ms)
    if outcome == 'failed' or tonumber(keep_ms) < 60000 then
      -- A failure is the trigger's own too. And the execution may be forgotten before Celery has sent what follows.
      redis.call('HSET', trigger, 'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
    end
  else
    -- A failure is the trigger's own: another trigger with the same execution key may run it.
    if goes_on then
      redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
      keep(execution, math.max(tonumber(keep_ms), STEPS_MS))
    else
      redis.call('DEL', execution)
    end
    execution = trigger
  end
end
-- The trigger itself is remembered for longer: its message may be delivered again.
local lives = text(math.max(tonumber(keep_ms), tonumber(remember_ms)))
redis.call('HSET', execution, 'owner', '', 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', ended_ms,
           'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
redis.call('PEXPIRE', trigger, lives)
if execution ~= trigger then
  redis.call('PEXPIRE', execution, keep_ms)
end

if hold_ms ~= '' then
  leave_place(owner, hold_ms, mine)
end
if redis.call('EXISTS', pace) == 0 then
  return 'finished\n'
end

-- Somebody waits, or has waited lately.
-- Uses waiting.

if hold_ms ~= '' then
  local old = tonumber(redis.call('HGET', pace, 'hold_ms') or nil)
  local hold = math.max(now - (tonumber(since_ms or nil) or now), 1)
  -- One that took very long says little of the next; but the place stays taken for so long each time.
  hold = math.max(old and math.min(hold, old * 4) or hold, tonumber(hold_ms))
  hold = old and old * 0.7 + hold * 0.3 or hold
  redis.call('HSET', pace, 'hold_ms', string.format(hold < 100 and '%.1f' or '%.0f', hold))
  if redis.call('HGET', pace, 'stop') == token then
    redis.call('HDEL', pace, 'stop', 'stop_by')
  end
end
local calls = {}
-- What an outer holder goes on with is its own.
local group = hold_ms ~= '' and mine and facts(mine).group or redis.call('HGET', trigger, 'group')
end_group(calls, group, member, outcome)
local about, parked_message = waiter(member)
if about then
  -- A copy was parked when this run was taken for dead: it waits no longer, and what follows is still to be sent.
  forget_waiter(member)
  redis.call('HSET', trigger, 'message', parked_message)
  redis.call('ZADD', due, text(now + AGAIN_MS), member)
  end_group(calls, about.group, member, outcome)
end
call_next(calls, 1)
if #calls > 0 then
  return {'finished', calls}
end
return 'finished\n'
