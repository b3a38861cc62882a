-- Give a trigger an outcome that is none of its lease's: its run was killed or is about to be, has outstayed its time, or it
-- was revoked while it waited.
--
-- Uses time, holders, waiting, uncertain, states.
--
-- KEYS[1] lease       hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] pace        hash; this and the keys up to baton are of those who wait: see shared/waiting.lua
-- KEYS[3] line        sorted set: trigger -> ticket
-- KEYS[4] called      sorted set: trigger -> store time in ms until which a place is reserved for it
-- KEYS[5] parked      hash: trigger -> what is known of it, its message
-- KEYS[6] followers   sorted set: trigger -> group whose outcome it will get
-- KEYS[7] baton       list
-- KEYS[8] execution   hash: run record of the execution key
-- KEYS[9] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[10] due        sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of the delivery
-- ARGV[2] lock_key    text of the lock key
-- ARGV[3] task_id     id of the trigger
-- ARGV[4] outcome     "failed" or "revoked"
-- ARGV[5] reason      for people to read
-- ARGV[6] keep_ms     how long the outcome is kept
-- ARGV[7] release     "1" to release the lease, "0" while the process of the run may still live
-- ARGV[8] member      the trigger, as `due` names it
-- ARGV[9] patience_ms  how long Celery is given to send what follows; empty when it has done so, and the trigger is settled
-- ARGV[10] content_type      of the body
-- ARGV[11] content_encoding  of the body
-- ARGV[12] body       the error; empty for none
-- ARGV[13] execution_as  what an explicit execution key has of it: "keep", the failure; "unsure", that nobody knows what its run
--                     has done, and "hold", that it is held until somebody does, and where the task id is the key not replayed; else
--                     nothing
-- ARGV[14] keeps      "1" to keep the message with the record of a settled trigger, for a replay
--
-- Returns {"concluded", calls}  recorded; also when asked again with the same owner token, which may release and settle, and
--         when Celery has done what follows the same outcome, which settles it. calls are the messages of those who are next, to
--         be published now: see shared/waiting.lua
--      or {"refused", outcome}  the trigger has this outcome already, or is not known; or another delivery runs it, and
--         outcome is empty

local calls = {}
local separate = execution ~= trigger
local group = redis.call('HGET', trigger, 'group')

local function settle()
  redis.call('HSET', trigger, 'settled', '1')
  redis.call('HDEL', trigger, keeps == '1' and 'handouts' or 'message')
  redis.call('ZREM', due, member)
end

local function concluded()
  if redis.call('EXISTS', pace) == 1 then
    call_next(calls, 1)
  end
  return {'concluded', calls}
end

local done, by, generation = unpack(redis.call('HMGET', trigger, 'outcome', 'concluded_by', 'generation'))
local holder, until_ms, runs, unsure, execution_done = unpack(
  redis.call('HMGET', execution, 'owner', 'until_ms', 'task_id', 'unsure', 'outcome'))
local found = state_of(runs or (not separate and generation), holder, until_ms, unsure, execution_done)
local is_its = holder == owner or ((not holder or holder == '') and unsure and doubt_of(unsure).of == owner)
-- Not before: under another lock key somebody else would begin beside the process that still lives.
local ends_execution = separate and is_its and release == '1' and (not done or by == owner)
local leaves_doubt = execution_as == 'unsure' or execution_as == 'hold'
local is_kept = execution_as == 'keep' and outcome == 'failed'
if ends_execution then
  must_become(found, leaves_doubt and 'uncertain' or is_kept and outcome or 'new')
end
local is_concluded = by == owner or (done == outcome and patience_ms == '')
local refusal = done or (redis.call('EXISTS', trigger) == 0 and 'unknown')
if not refusal and holder and holder ~= '' and holder ~= owner and runs == task_id and tonumber(until_ms or 0) > now then
  refusal = ''
end
if not is_concluded and not refusal then
  must_become(separate and 'waiting' or found, outcome)
end

if release == '1' then
  leave_place(owner, 0)
end
if ends_execution then
  if leaves_doubt then
    begin_doubt(owner)
    redis.call('HDEL', execution, 'owner', 'until_ms', 'since_ms', 'fence')
    if execution_as == 'hold' then
      keep(execution, HELD_MS)
    end
  else
    if unsure then
      end_doubt()
    end
    if is_kept then
      redis.call('HSET', execution, 'owner', '', 'outcome', outcome, 'reason', reason, 'by', owner, 'ended_ms', text(now),
                 'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
      redis.call('PEXPIRE', execution, keep_ms)
    else
      redis.call('DEL', execution)
    end
  end
end
if is_concluded then
  if patience_ms == '' then
    settle()
  end
  return concluded()
end
if refusal then
  if refusal ~= '' and redis.call('EXISTS', parked) == 1 then
    look_at(now)
  end
  return {'refused', refusal}
end
if not separate and execution_as == 'hold' and holder and holder ~= '' then
  -- The trigger has its outcome, and whoever would replay it is told that nobody knows what its run has done.
  begin_doubt(holder)
end
-- Its run, should it still live, is refused; unless it is the run itself that tells, and releases its lease.
local by_run = (patience_ms == '' or release ~= '1') and '' or owner
-- Without patience nobody is about to send what follows, and it is not waited for.
local ended_ms = text(patience_ms == '0' and now - AGAIN_MS or now)
redis.call('HSET', trigger, 'owner', '', 'outcome', outcome, 'reason', reason, 'by', by_run, 'concluded_by', owner,
           'ended_ms', ended_ms, 'content_type', content_type, 'content_encoding', content_encoding, 'body', body)
local about, parked_message = waiter(member)
redis.call('HDEL', execution, 'awaits:' .. task_id)
if about then
  forget_waiter(member)
  redis.call('HSET', trigger, 'message', parked_message)
  redis.call('ZADD', due, text(now + AGAIN_MS), member)
end
if patience_ms == '' then
  settle()
elseif redis.call('HEXISTS', trigger, 'message') == 1 then
  redis.call('ZADD', due, text(now + patience_ms), member)
end
redis.call('PEXPIRE', trigger, text(math.max(tonumber(keep_ms), 3600000)))
lead_no_more(owner)
end_group(calls, about and about.group or group, member, outcome)
return concluded()
