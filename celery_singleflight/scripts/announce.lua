-- Say which trigger works for an execution key already, or note that a publisher is about to send one.
--
-- Uses time.
--
-- KEYS[1] execution     hash: run record of the execution key
-- KEYS[2] announcement  hash: task_id, task and payload of a trigger that somebody is about to send; sent, once the broker has it
-- KEYS[3] trigger       hash: record of the trigger `seen`, else of the publisher's own
-- ARGV[1] task_id       id of the trigger that the publisher would send
-- ARGV[2] task          name of its task
-- ARGV[3] payload       digest of its payload; empty when that is not compared
-- ARGV[4] seen          the announced trigger whose record is given; empty for none
-- ARGV[5] reserve_ms    for how long others wait for this publisher; 0 when its trigger is not to be announced
--
-- Returns {"answered", task_id, how}  that trigger has, or will have, the result; how is "completed", "running" or "announced"
--      or {"announced", task_id}  so is that one; ask again with its record
--      or {"busy", left_ms}  another publisher is about to send one
--      or {"reserved"}  nobody is; others wait for this publisher now, also when it asks again
--      or {"unknown"}  the publisher is to send its own, and not to announce it
--      or {"reused", by_task}  the execution key belongs to that other task
--      or {"mismatched", by_task}  it was used with another payload

-- Return the reply to whoever uses the key of somebody else, nothing for the rightful.
local function refused(by_task, by_payload)
  if by_task and by_task ~= task then
    return {'reused', by_task}
  end
  if by_payload and by_payload ~= '' and payload ~= '' and by_payload ~= payload then
    return {'mismatched', by_task or ''}
  end
end

local holder, until_ms, done, runs, on, by_task, by_payload = unpack(
  redis.call('HMGET', execution, 'owner', 'until_ms', 'outcome', 'task_id', 'worker', 'task', 'payload'))
local refusal = refused(by_task, by_payload)
if refusal then
  return refusal
end
local is_running = holder and holder ~= '' and tonumber(until_ms) > now
if done or is_running then
  -- A direct or eager call has no message, and Celery no result of it. Only workers have an @ in their names.
  if not string.find(on or '', '@', 1, true) then
    return {'unknown'}
  end
  return {'answered', runs, done and 'completed' or 'running'}
end

local announced, its_task, its_payload, is_sent = unpack(
  redis.call('HMGET', announcement, 'task_id', 'task', 'payload', 'sent'))
if announced == task_id then
  return {'reserved'}
end
if announced and is_sent then
  if announced ~= seen then
    return {'announced', announced}
  end
  -- One that has an outcome, and the execution none, was skipped, revoked, or has failed: it stands in nobody's way.
  if redis.call('HEXISTS', trigger, 'outcome') == 0 then
    return refused(its_task, its_payload) or {'answered', announced, 'announced'}
  end
end
if tonumber(reserve_ms) == 0 then
  return {'unknown'}
end
if announced and not is_sent then
  return {'busy', redis.call('PTTL', announcement)}
end
redis.call('DEL', announcement)
redis.call('HSET', announcement, 'task_id', task_id, 'task', task, 'payload', payload)
redis.call('PEXPIRE', announcement, reserve_ms)
return {'reserved'}
