-- What `enter` answers to a trigger that does not run now: it has ended before, ends here, or somebody is in the way. Needs what
-- `enter` has found out by then.

-- The trigger has its outcome, and the message is kept until Celery has sent what follows.
local function answers()
  if is_kept then
    redis.call('HSET', trigger, 'message', message)
    redis.call('ZADD', due, text(now + tonumber(grace_ms)), member)
  end
end

-- The trigger, or its execution, has its outcome: answer with that. `is_own` is whether the outcome is the trigger's own.
local function ended_before(is_own)
  local age = now - (tonumber(ended_ms) or 0)
  if outcome and not settled and by ~= owner and age < tonumber(grace_ms) then
    redis.call('HSET', trigger, 'generation', generation, 'copy', copy)
    return {'held', 'own', cjson.encode({task_id, ''}), age, grace_ms - age, 0, 0, text(now), text(tonumber(first_ms) or now),
            0, 0, ticket}
  end
  if led_by then
    return {'led', led_by}
  end
  local ending = is_own and outcome or done
  local reason = outcome and redis.call('HGET', trigger, 'reason') or cjson.encode({'answered', runs})
  if not outcome then
    must_become(its_own, done)
    remember('outcome', done, 'reason', reason, 'by', owner, 'ended_ms', text(now))
    if done ~= 'succeeded' then
      local error = redis.call('HMGET', execution, 'content_type', 'content_encoding', 'body')
      redis.call('HSET', trigger, 'content_type', error[1], 'content_encoding', error[2], 'body', error[3])
    end
  elseif by ~= owner then
    redis.call('HSET', trigger, 'by', owner, 'ended_ms', text(now))
  end
  -- Whoever said what its run had done has not told those who get its outcome.
  local is_news = not outcome or (by == '' and redis.call('HEXISTS', trigger, 'concluded_by') == 0)
  if not settled then
    answers()
  end
  if is_news or about then
    leave_line(ending, is_news and group)
  end
  local source = ending == 'succeeded' and done and execution or trigger
  local value = redis.call('HMGET', source, 'content_type', 'content_encoding', 'body')
  if source == execution and separate and value[1] == '' then
    reason = redis.call('HGET', execution, 'reason')  -- why there is none
  end
  return {'ended', ending, settled or '', reason or '', value[1] or '', value[2] or '', value[3] or '', calls}
end

-- Give the trigger an outcome, without a run.
local function end_here(ending, reason, ...)
  must_become(its_own, state_of_outcome(ending))
  remember('outcome', ending, 'reason', reason, 'by', owner, 'ended_ms', text(now), ...)
  redis.call('HDEL', trigger, 'settled')
  answers()
  leave_line(ending, group)
  return {'ended', ending, '', reason, '', '', '', calls}
end

-- Its execution key stands for something else, and the trigger fails with that; `what` that is, and whose. Nobody waits for it any
-- more, and those who would get the outcome of its run get that of another. A direct call has no record of its own; one that was
-- answered from an execution which is forgotten since keeps the outcome that it was told.
local function turn_away(what)
  if separate then
    step_aside()
    leave_message()
    local group = redis.call('HGET', trigger, 'group')
    redis.call('HDEL', trigger, 'parked', 'member', 'awaiting', 'awaits_at', 'waits_since', 'group')
    redis.call('HDEL', execution, 'awaits:' .. task_id)
    if is_waited_for then
      end_group(calls, group, member, '')
      look_at(now)
    end
    if on_held ~= 'ask' and not outcome then
      must_become(its_own, 'failed')
      remember('outcome', 'failed', 'reason', cjson.encode({what, by_task}), 'by', owner, 'ended_ms', text(now))
      redis.call('HDEL', trigger, 'settled')
      answers()
    end
  end
  return {'reused', by_task, what}
end

-- So many of its runs have died that it does not run any more.
local function dead_letter(doubt, died)
  must_become(its_own, 'dead-lettered')
  if separate and runs == task_id and unsure_as ~= 'hold' then
    must_become(found, 'new')
    if doubt then
      end_doubt()
    end
    redis.call('DEL', execution)
  elseif separate and doubt then
    must_become(found, 'uncertain')
    redis.call('HSET', execution, 'unsure', line_of(doubt))
    keep(execution, HELD_MS)
  end
  return end_here('dead-lettered', cjson.encode({'died', task_id, on or '', died, 0}), 'died', died, 'owner', '')
end

-- Somebody is in the way: `what` it holds, since when, its task id, its worker, when its lease ends.
local function held(what, since, task, at, ends)
  local age, remaining = math.max(now - since, 0), math.max(ends - now, 0)
  local first = tonumber(first_ms) or now
  local is_others = what == 'lock' or what == 'execution'
  if is_others and on_held ~= 'ask' then
    local ending
    if on_held == 'skip' then
      ending = 'skipped'
    elseif on_held == 'reject' then
      ending = 'rejected'
    elseif is_over(first) then
      ending = 'timed out waiting'
    end
    if ending then
      leave_place_in_line()
      return end_here(ending, cjson.encode({what, task, at, age, remaining}))
    end
  end
  if on_held ~= 'ask' then
    remember()
    if is_others then
      leave_message()
    end
  end
  local its, linger = {turn = 0, place = 0, tries = 0, ticket = ticket}, nil
  if on_held ~= 'ask' and is_others then
    its, linger = take_place(what, since, age, remaining, (tonumber(died or nil) or 0) > 0)
    if linger then
      return {'linger', linger, '0', calls}
    end
  end
  return {'held', what, cjson.encode({task, at}), age, remaining, math.floor(its.hold or 0), math.floor(its.turn), text(now),
          text(first), its.place, its.tries, its.ticket}
end
