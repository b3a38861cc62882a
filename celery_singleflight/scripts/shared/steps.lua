-- What an execution has done so far. Needs `time` and the key steps; `open_steps` also the key execution and the values run and
-- keep_ms of the run that asks, `hold_payload` that key.
--
-- The hash `steps` holds
--   run           id of the run that it belongs to; what an earlier execution under the same key has left does not count
--   held          "step:" and the name of a step of which somebody is to say what became of it; then "resolved". Or "payload",
--                 when a trigger has come with other arguments. While it is held, what was done counts for whoever comes next
--   step:<name>   a step, as in step_of
--   undoable      how many of the steps that are done are still to be undone if the execution fails
--   undo:<n>      the name of the n-th of them
--   cursor:<name> lines of the digest of the payload, content type, content encoding, value
--   outcome, reason, content_type, content_encoding, body   how the execution ends, from its first undo on

-- Let the hash be that of this run, and it and the run record live for as long as a later attempt may come. Returns what is held.
local function open_steps()
  local of_run, held = unpack(redis.call('HMGET', steps, 'run', 'held'))
  if of_run ~= run then
    if of_run and not held then
      redis.call('DEL', steps)
    elseif held == 'resolved' or held == 'payload' then
      redis.call('HDEL', steps, 'held')
      held = nil
    end
    redis.call('HSET', steps, 'run', run)
  end
  keep(steps, tonumber(keep_ms))
  keep(execution, tonumber(keep_ms))
  return held
end

-- Other arguments have come than those that something was done with: whoever has these may still come, and is the one who is let in.
local function hold_payload(done_with)
  redis.call('HSET', steps, 'held', 'payload')
  redis.call('HSET', execution, 'payload', done_with)
end

-- Return a step by its name: its state ("begun", "done", "failed", "undoing", "undone", "undo failed", "undo uncertain"), the
-- mark of the call that began it, how often it was begun, since when in ms, by which worker, whether an earlier begin of it was
-- never recorded, the digest of the payload, how to undo it, a note, and its result, whose content type is empty when it could
-- not be stored.
local function step_of(name)
  local line = redis.call('HGET', steps, 'step:' .. name)
  if not line then
    return nil
  end
  local state, mark, times, since, worker, unsure, digest, undo, note, content_type, content_encoding, body = string.match(
    line, '^([^\n]*)\n([^\n]*)\n(%d+)\n(%d+)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
  return {state = state, mark = mark, times = tonumber(times), since = tonumber(since), worker = worker, unsure = unsure,
          digest = digest, undo = undo, note = note, content_type = content_type, content_encoding = content_encoding, body = body}
end

local function put_step(name, step)
  redis.call('HSET', steps, 'step:' .. name, table.concat(
    {step.state, step.mark, text(step.times), text(step.since), step.worker, step.unsure, step.digest, step.undo, step.note,
     step.content_type, step.content_encoding, step.body}, '\n'))
end

-- Note that a step is done, and is to be undone before those that were done earlier.
local function put_done(name, step)
  local was_done = step.state == 'done'
  step.state = 'done'
  put_step(name, step)
  if step.undo ~= '' and not was_done then
    redis.call('HSET', steps, 'undo:' .. redis.call('HINCRBY', steps, 'undoable', 1), name)
  end
end
