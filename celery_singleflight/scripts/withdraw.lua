-- Take back the announcement of a trigger that could not be sent.
--
-- KEYS[1] announcement  hash: task_id, task and payload of a trigger that somebody is about to send; sent, once the broker has it
-- ARGV[1] task_id       id of the trigger
--
-- Returns {"withdrawn"}  it is announced no more
--      or {"other"}  it was not, any more or at all

if redis.call('HGET', announcement, 'task_id') ~= task_id then
  return {'other'}
end
redis.call('DEL', announcement)
return {'withdrawn'}
