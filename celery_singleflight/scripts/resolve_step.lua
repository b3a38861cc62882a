-- Say what became of a step that was begun and never recorded, or give a step that is done the result that could not be stored.
--
-- A trigger whose failure came of it may be sent again, under the same id, or be replayed, and goes on where it was.
--
-- Uses time, steps, states.
--
-- KEYS[1] execution  hash: run record of the execution key
-- KEYS[2] steps      hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] name       of the step
-- ARGV[2] state      "done" or "failed": it happened, or it did not and is to be done
-- ARGV[3] content_type      of the body
-- ARGV[4] content_encoding  of the body
-- ARGV[5] body       the result, of a step that is done
--
-- Returns {"resolved"}
--      or {"running", worker}  that worker is at it
--      or {"certain", state}  it is no uncertain step; the state is empty when there is none of that name

local step = step_of(name)
if not step then
  return {'certain', ''}
end
local lacks_result = step.state == 'done' and step.content_type == ''
if step.state ~= 'begun' and not (lacks_result and state == 'done') then
  return {'certain', step.state}
end
local holder, until_ms, outcome = unpack(redis.call('HMGET', execution, 'owner', 'until_ms', 'outcome'))
local is_live = holder and holder ~= '' and (tonumber(until_ms or nil) or 0) > now
if step.state == 'begun' and is_live and string.sub(step.mark, 1, #holder) == holder then
  return {'running', step.worker}
end
local is_held = redis.call('HGET', steps, 'held') == 'step:' .. name
if is_held and outcome == 'failed' then
  must_become(state_of(true, holder, until_ms, false, outcome), 'waiting')
end
step.note, step.content_type, step.content_encoding, step.body = '', content_type, content_encoding, body
if state == 'done' then
  put_done(name, step)
else
  step.state, step.unsure = 'failed', ''
  put_step(name, step)
end
if is_held then
  redis.call('HSET', steps, 'held', 'resolved')
  if outcome == 'failed' then
    -- What is settled is not looked at any more, and its message waits for a replay.
    if redis.call('HEXISTS', execution, 'settled') == 0 then
      redis.call('HDEL', execution, 'message')
    end
    redis.call('HDEL', execution, 'outcome', 'settled', 'reason', 'by', 'concluded_by', 'ended_ms', 'content_type',
               'content_encoding', 'body', 'generation', 'copy', 'died', 'left_by', 'handouts')
  end
end
return {'resolved'}
