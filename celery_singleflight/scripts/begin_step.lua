-- Begin a step, or say what has become of it: it is marked before its function is called, so that a death in between shows.
--
-- Uses time, holders, overtaken, steps.
--
-- KEYS[1] lease      hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] fence      string: the last fencing token
-- KEYS[3] execution  hash: run record of the execution key
-- KEYS[4] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[5] steps      hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] owner      owner token of the holder
-- ARGV[2] token      its fencing token
-- ARGV[3] limit      how many may hold the lock key
-- ARGV[4] run        id of the run
-- ARGV[5] keep_ms    how long what is done is kept at least
-- ARGV[6] name       of the step
-- ARGV[7] mark       of this call, by which it is known when it is asked again
-- ARGV[8] worker     who begins it, for people to read
-- ARGV[9] digest     of the payload; empty when there is none
-- ARGV[10] undo      how to undo it; empty for not at all
-- ARGV[11] unsure_as  what is done about a step that was begun and not recorded: "rerun" or "hold"
--
-- Returns {"begun", times, unsure}  its function is to be called, for the times-th time; unsure is "1" when an earlier call of it
--         was never recorded
--      or {"done", note, content_type, content_encoding, body}  it is done, and this is its result; the note says why there is none
--      or {"uncertain", times, worker, age_ms}  it was begun so long ago and not recorded, and is held
--      or {"changed"}  it was done or begun with another payload
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now, or the run has ended; nothing is changed

local refused = overtaken()
if refused then
  return refused
end
local held = open_steps()
local step = step_of(name)
if step and step.state == 'begun' and step.mark == mark then
  return {'begun', step.times, step.unsure}
end
local is_begun = step and step.state == 'begun'
if step and step.state ~= 'failed' and step.digest ~= digest and step.digest ~= '' and digest ~= '' then
  if execution ~= trigger then
    hold_payload(step.digest)
  end
  return {'changed'}
end
if held == 'payload' then
  redis.call('HDEL', steps, 'held')
end
if is_begun and unsure_as == 'hold' then
  redis.call('HSET', steps, 'held', 'step:' .. name)
  return {'uncertain', step.times, step.worker, math.max(now - step.since, 0)}
end
if step and not is_begun and step.state ~= 'failed' then
  return {'done', step.note, step.content_type, step.content_encoding, step.body}
end
local times, unsure = (step and step.times or 0) + 1, is_begun and '1' or ''
put_step(name, {state = 'begun', mark = mark, times = times, since = now, worker = worker, unsure = unsure, digest = digest,
                undo = undo, note = '', content_type = '', content_encoding = '', body = ''})
return {'begun', times, unsure}
