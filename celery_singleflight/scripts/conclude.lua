-- Give a trigger an outcome that is none of its lease's: its run was killed or is about to be, or has outstayed its time.
--
-- KEYS[1] lease       hash: owner token -> lines of expiry in ms, since in ms, fencing token, worker, task id
-- KEYS[2] execution   hash: run record of the execution key
-- KEYS[3] trigger     hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[4] due         sorted set: trigger -> store time in ms at which the sweeper looks at it
-- ARGV[1] owner       owner token of the delivery
-- ARGV[2] task_id     id of the trigger
-- ARGV[3] outcome     "failed" or "revoked"
-- ARGV[4] reason      for people to read
-- ARGV[5] keep_ms     how long the outcome is kept
-- ARGV[6] release     "1" to release the lease, "0" while the process of the run may still live
-- ARGV[7] member      the trigger, as `due` names it
-- ARGV[8] patience_ms  how long Celery is given to send what follows; empty when it has done so, and the trigger is settled
-- ARGV[9] content_type      of the body
-- ARGV[10] content_encoding  of the body
-- ARGV[11] body       the error; empty for none
--
-- Returns {"concluded"}  recorded; also when asked again with the same owner token, which may release and settle
--      or {"refused", outcome}  the trigger has this outcome already, or is not known; or another delivery runs it, and
--         outcome is empty

if release == '1' then
  redis.call('HDEL', lease, owner)
end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local separate = execution ~= trigger

local function settle()
  redis.call('HSET', trigger, 'settled', '1')
  redis.call('HDEL', trigger, 'message')
  redis.call('ZREM', due, member)
end

local done, by = unpack(redis.call('HMGET', trigger, 'outcome', 'concluded_by'))
local holder, until_ms, runs = unpack(redis.call('HMGET', execution, 'owner', 'until_ms', 'task_id'))
if separate and holder == owner and release == '1' and (not done or by == owner) then
  -- Not before: under another lock key somebody else would begin beside the process that still lives.
  redis.call('DEL', execution)
end
if by == owner then
  if patience_ms == '' then
    settle()
  end
  return {'concluded'}
end
if done or redis.call('EXISTS', trigger) == 0 then
  return {'refused', done or 'unknown'}
end
if holder and holder ~= '' and holder ~= owner and runs == task_id and tonumber(until_ms) > now then
  return {'refused', ''}
end
-- Its run, should it still live, is refused; unless it is the run itself that tells, and releases its lease.
local by_run = (patience_ms == '' or release ~= '1') and '' or owner
redis.call('HSET', trigger, 'owner', '', 'outcome', outcome, 'reason', reason, 'by', by_run, 'concluded_by', owner,
           'ended_ms', string.format('%.0f', now), 'content_type', content_type, 'content_encoding', content_encoding,
           'body', body)
if patience_ms == '' then
  settle()
elseif redis.call('HEXISTS', trigger, 'message') == 1 then
  redis.call('ZADD', due, string.format('%.0f', now + patience_ms), member)
end
redis.call('PEXPIRE', trigger, string.format('%.0f', math.max(tonumber(keep_ms), 3600000)))
return {'concluded'}
