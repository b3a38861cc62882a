-- Note what became of an undo, and return the next: of the steps that are done the last one first.
--
-- With the first of them the end of the execution is written down. From then on no attempt calls the body any more: one that
-- comes after a death goes on undoing, and ends the same.
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
-- ARGV[6] mark       of this call, by which it is known when it is asked again
-- ARGV[7] unsure_as  what is done about an undo that was begun and not recorded: "rerun" or "hold"
-- ARGV[8] name       of the step whose undo has been called; empty for none
-- ARGV[9] state      what became of that: "undone" or "undo failed"
-- ARGV[10] note      why it failed; empty when it did not
-- ARGV[11] outcome   how the execution ends
-- ARGV[12] reason    for people to read
-- ARGV[13] content_type      of the body
-- ARGV[14] content_encoding  of the body
-- ARGV[15] body      the error
--
-- Returns {"undo", name, undo, unsure, note, content_type, content_encoding, body}  to be called now, with that result of the
--         step; unsure is "1" when an earlier call was never recorded, the note says why there is no result
--      or {"uncertain", name}  of this one an earlier call was never recorded: it is left alone; ask again for the next
--      or {"undone"}  there is nothing more to undo; also when a step is held, and the execution with it
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now, or the run has ended; nothing is changed

local refused = overtaken()
if refused then
  return refused
end
local of_run, held = unpack(redis.call('HMGET', steps, 'run', 'held'))
if of_run ~= run or (held and held ~= 'resolved') then
  return {'undone'}
end
redis.call('HDEL', steps, 'held')

local top = tonumber(redis.call('HGET', steps, 'undoable') or nil) or 0
local next_name = redis.call('HGET', steps, 'undo:' .. top)

local function pop(step, ending)
  step.state = ending
  put_step(next_name, step)
  redis.call('HDEL', steps, 'undo:' .. top)
  top = top - 1
  redis.call('HSET', steps, 'undoable', top)
  next_name = redis.call('HGET', steps, 'undo:' .. top)
end

if name ~= '' and next_name == name then
  local step = step_of(name)
  if step and step.state == 'undoing' and step.mark ~= mark then
    step.note = note
    pop(step, state)
  end
end
local step = next_name and step_of(next_name)
if not step then
  return {'undone'}
end
if redis.call('HEXISTS', steps, 'outcome') == 0 then
  redis.call('HSET', steps, 'outcome', outcome, 'reason', reason, 'content_type', content_type,
             'content_encoding', content_encoding, 'body', body)
end
keep(steps, tonumber(keep_ms))
keep(execution, tonumber(keep_ms))
if step.state == 'undoing' and step.mark ~= mark then
  step.unsure = '1'
  if unsure_as == 'hold' then
    local left = next_name
    pop(step, 'undo uncertain')
    return {'uncertain', left}
  end
elseif step.state ~= 'undoing' then
  step.unsure = ''
end
step.state, step.mark = 'undoing', mark
put_step(next_name, step)
return {'undo', next_name, step.undo, step.unsure, step.note, step.content_type, step.content_encoding, step.body}
