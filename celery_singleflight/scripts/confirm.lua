-- Note that the broker has the message of a trigger: from now on that answers other publishers.
--
-- KEYS[1] announcement  hash: task_id, task and payload of a trigger that somebody is about to send; sent, once the broker has it
-- ARGV[1] task_id       id of the trigger
-- ARGV[2] task          name of its task
-- ARGV[3] payload       digest of its payload; empty when that is not compared
-- ARGV[4] keep_ms       for how long it answers
--
-- Returns {"confirmed"}  also when asked again
--      or {"other", by}  that trigger was sent first, because this publisher took long; it is left as it is

local announced, is_sent = unpack(redis.call('HMGET', announcement, 'task_id', 'sent'))
if is_sent and announced ~= task_id then
  return {'other', announced}
end
redis.call('HSET', announcement, 'task_id', task_id, 'task', task, 'payload', payload, 'sent', '1')
redis.call('PEXPIRE', announcement, keep_ms)
return {'confirmed'}
