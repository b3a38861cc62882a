-- Clear the outcome of a trigger, so that its message may be published and it runs again under the same id, keys and rules.
--
-- The message to be published is the one that was kept, marked as a replay and of a newer generation: older copies that a broker
-- may still have count no more. Whatever becomes of the caller, a sweeper publishes it.
--
-- Uses time, uncertain, states.
--
-- KEYS[1] execution   hash: run record of the execution key
-- KEYS[2] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[3] steps       hash: what the execution has done so far; see shared/steps.lua
-- KEYS[4] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] replay      mark of this call
-- ARGV[2] member      the trigger, as `due` names it
-- ARGV[3] force       "1" to replay one that has succeeded, or of which it is unsure what it has done
-- ARGV[4] reason      why it is forced
-- ARGV[5] unsure_as   "hold" when a run that died leaves its execution to be resolved, else "rerun"
-- ARGV[6] seen        what `recorded` has told of the outcome; empty to ask for that
-- ARGV[7] message     the message to be published
-- ARGV[8] generation  of that message
-- ARGV[9] again_ms    in what time it is published unless the trigger has entered
--
-- Returns {"replayed"}  the message is to be published, as one of no earlier copy; also when asked again with the same mark
--      or {"recorded", seen, outcome, message, generation}  it may be replayed, and this is known of it; nothing is changed. The
--         outcome is empty where a step was resolved since
--      or {"running", task_id, worker}  that trigger runs the execution
--      or {"waiting", message}  it has no outcome yet: it waits, or comes by itself. Empty where the store has no message
--      or {"ending", outcome}  Celery has not sent all that follows
--      or {"succeeded", outcome}  there is nothing to mend
--      or {"uncertain", step}  nobody knows what it has done; the step is empty where it is the body
--      or {"bare", outcome}  its message was not kept
--      or {"unknown"}  the store knows nothing of it

local outcome, settled, ended_ms, newest, mark, kept, forced, parked = unpack(
  redis.call('HMGET', trigger, 'outcome', 'settled', 'ended_ms', 'generation', 'replayed', 'message', 'forced', 'parked'))
if mark == replay then
  return {'replayed'}
end
local holder, until_ms, runs, worker, done, unsure = unpack(
  redis.call('HMGET', execution, 'owner', 'until_ms', 'task_id', 'worker', 'outcome', 'unsure'))
if holder and holder ~= '' and tonumber(until_ms or nil) > now then
  return {'running', runs or '', worker or ''}
end
if redis.call('EXISTS', trigger) == 0 then
  return {'unknown'}
end
-- A resolved step has taken the outcome back, and nobody looks at the trigger.
local is_resolved = not outcome and kept and not parked and not redis.call('ZSCORE', due, member)
if not outcome and not is_resolved then
  return {'waiting', kept or ''}
end
if outcome and not settled then
  return {'ending', outcome}
end
-- A run whose lease has expired has died, whether anybody has noticed or not.
local has_died = not done and holder and holder ~= ''
local is_held = (unsure or has_died) and unsure_as == 'hold'
local of_run, held, undone = unpack(redis.call('HMGET', steps, 'run', 'held', 'outcome'))
if force ~= '1' then
  if outcome == 'succeeded' or outcome == 'coalesced' then
    return {'succeeded', outcome}
  end
  -- An execution that another trigger has completed answers this one.
  local is_answered = execution ~= trigger and done == 'succeeded'
  local step = held and string.match(held, '^step:(.*)$')
  if not is_answered and (step or is_held) then
    return {'uncertain', step or ''}
  end
end
if not kept then
  return {'bare', outcome}
end
local knows = table.concat({ended_ms or '', outcome or '', mark or ''}, ':')
if seen ~= knows then
  return {'recorded', knows, outcome or '', kept, newest or ''}
end

local separate = execution ~= trigger
-- A failure that is kept answers nobody any more.
local takes_back = separate and done and (force == '1' or done ~= 'succeeded')
local was_undone = undone and of_run == redis.call('HGET', execution, 'run')
-- What was done is complete, or was undone: it begins anew.
local ends_execution = takes_back and (done == 'succeeded' or was_undone or not of_run)
must_become(state_of(true, not separate and holder, until_ms, false, outcome),
            not separate and unsure and unsure_as ~= 'hold' and 'uncertain' or 'waiting')
if takes_back or (separate and is_held) then
  must_become(state_of(true, holder, until_ms, unsure, done), ends_execution and 'new' or 'waiting')
end

redis.call('HDEL', trigger, 'outcome', 'settled', 'reason', 'by', 'concluded_by', 'ended_ms', 'led_by', 'content_type',
           'content_encoding', 'body', 'copy', 'died', 'left_by', 'handouts', 'released', 'group', 'parked', 'member',
           'awaiting', 'awaits_at', 'waits_since')
redis.call('HSET', trigger, 'message', message, 'generation', generation, 'replayed', replay)
if force == '1' then
  local all = forced and cjson.decode(forced) or {}
  all[#all + 1] = {now, reason}
  redis.call('HSET', trigger, 'forced', cjson.encode(all))
end
if is_held then
  -- Whoever forces it says that it is to run, and those who wait for a word ask again.
  end_doubt()
end
if ends_execution then
  redis.call('DEL', execution)
elseif takes_back then
  redis.call('HDEL', execution, 'owner', 'outcome', 'reason', 'by', 'ended_ms', 'content_type', 'content_encoding', 'body')
elseif is_held or not separate then
  redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
end
if not separate and (outcome == 'succeeded' or was_undone) then
  redis.call('HDEL', execution, 'run', 'attempt')
end
redis.call('ZADD', due, text(now + again_ms), member)
keep(trigger, 86400000)
return {'replayed'}
