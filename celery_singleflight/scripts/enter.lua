-- Take the lease of a lock key for one run of one trigger, or say why the run must not start now.
--
-- One decision over everything that belongs together: does this copy of the message still count, has the trigger or its
-- execution ended already, is its execution under way somewhere, is a place free, and who is next?
--
-- Uses time, taking.
--
-- KEYS[1] lease       hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] fence       string: the last fencing token
-- KEYS[3] pace        hash; this and the keys up to baton are of those who wait: see shared/waiting.lua
-- KEYS[4] line        sorted set: trigger -> ticket
-- KEYS[5] called      sorted set: trigger -> store time in ms until which a place is reserved for it
-- KEYS[6] parked      hash: trigger -> what is known of it, its message
-- KEYS[7] followers   sorted set: trigger -> group whose outcome it will get
-- KEYS[8] baton       list
-- KEYS[9] execution   hash: run record of the execution key
-- KEYS[10] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[11] due        sorted set: trigger -> store time in ms at which the sweeper looks at it
-- KEYS[12] steps      hash: what the execution has done so far; see shared/steps.lua
-- ARGV[1] owner       owner token of this delivery
-- ARGV[2] task_id     id of the trigger
-- ARGV[3] worker      who asks, for people to read
-- ARGV[4] lock_key    text of the lock key
-- ARGV[5] run         id for the run record if the execution has none yet; another one in each process that has this delivery
-- ARGV[6] copy        which copy of the message this is; empty for the first
-- ARGV[7] previous    the copy this one was made from; "-" for the first
-- ARGV[8] generation  grows with each retry and replacement of the trigger by its own code
-- ARGV[9] limit       how many may hold the lock key
-- ARGV[10] ttl_ms     how long the lease lasts
-- ARGV[11] keep_ms    how long records are kept
-- ARGV[12] on_held    what contention means: "skip" or "reject" end the trigger; "wait" sends it back to the broker; "queue",
--                     "coalesce", "replace" and "join" park it, as policies of these names; "ask" only tells
-- ARGV[13] wait_ms    how long the trigger may wait in all; empty for no bound
-- ARGV[14] first_ms   store time at which the trigger first met contention; empty when it has not
-- ARGV[15] grace_ms   how long another delivery that has just ended the trigger is given to send what follows
-- ARGV[16] message    the message, to be published again if this delivery dies or when a parked trigger is called; empty when
--                     the store is not to have it
-- ARGV[17] member     the trigger, as `due` names it
-- ARGV[18] deaths     how many of its runs may die before the trigger is dead-lettered; empty for no bound
-- ARGV[19] task       name of the task that an explicit execution key belongs to; empty when the task id is the key
-- ARGV[20] waits      how it waits: lines of "1" if the store keeps the message while it runs; for how many ms the slot may
--                     linger; the digest of the payload; in how many ms the message expires; of coalesce which arguments
--                     count, "newest", "first" or "merged"; how long it is held back for others, in ms; how long in all; the
--                     trigger and the copy of it that the message was merged with. Empty for what does not apply
-- ARGV[21] ticket     its place in the line of those who wait with the broker; empty when it has none
-- ARGV[22] terms      of its execution: lines of the digest of the payload, where the execution key is explicit; "hold" if a run
--                     that died leaves it uncertain; after how many ms somebody tries to find out, one number for each try, with
--                     commas; where the trigger comes from; its scheduled time; "1" when the broker delivers it again. Empty
--                     where none of it applies
--
-- Returns {"acquired", fence, run, attempt, unsure, calls}  it is ours, also when asked again with the same owner token. unsure is
--         "1" when an earlier run of the execution died after its body began; JSON of its trigger, its worker, how long ago in ms
--         and how often it was tried, when this one is to find out what that has done
--      or {"held", what, holder, age_ms, remaining_ms, hold_ms, turn_ms, now_ms, first_ms, place, tries, ticket}  what is
--         "lock"; "execution", the same under another lock key; "own", another delivery runs this trigger or has just ended it;
--         "predecessor", the run that has sent this retry is about to end; "uncertain", as below. turn_ms is when about it will be its turn; tries,
--         how often it has looked in vain since anybody has entered
--      or {"parked", how, holder, age_ms, remaining_ms, place, ticket, calls}  the store has its message, and it will be called;
--         how is "line" or "group"; "again" when it had been parked before
--      or {"linger", ms, ticket, calls}  it is parked or in front of those with the broker, and may wait so long for the baton
--         before it asks again
--      or {"led", by}  it gets the outcome of that trigger, as `due` names it
--      or {"merge", by, copy, message}  this one waits, and its arguments are to be merged into the message; by is empty when the
--         one it was merged with waits no longer, and its own arguments are to be all
--      or {"ended", outcome, settled, reason, content_type, content_encoding, body, calls}  the trigger is over: this is how
--      or {"died"}  another process has had this delivery, as whose run it is held, and has died: it is to be abandoned for that
--         one, and then asked for again
--      or {"surplus", why}  another copy of the trigger's message is the one that counts
--      or {"reused", by_task, what}  the explicit execution key belongs to that task, and the trigger has failed; what is "task" when
--         that is another one, "payload" when it had another payload
--      or {"uncertain", how, holder, age_ms, calls}  a run of the execution died, and nobody knows what it has done. how is "held",
--         the store has the trigger's message until somebody knows; "again" when it had it before; "told", it has not
-- where calls are the messages of those who are next, to be published now: see shared/waiting.lua.

if on_held ~= 'coalesce' and ticket == '' and unsure_as == '' and
   redis.call('EXISTS', execution, trigger, lease, parked) == 0 then
  -- Nothing is known of it, and it meets nobody.
  local ends = now + ttl_ms
  local token, group = take_lease(ends, nil, true)
  begin_run(now, ends, token, run, 1, group, true)
  return acquired(token, run, 1, '')
end

-- Uses holders, waiting, parking, places, states.

local holder, until_ms, since_ms, token, run_id, attempts, runs, on, runs_generation, done, newest, counts, settled, by,
  ended_ms, died, by_task, has_run, group, unsure = unpack(
  redis.call('HMGET', execution, 'owner', 'until_ms', 'since_ms', 'fence', 'run', 'attempt', 'task_id', 'worker',
             'run_generation', 'outcome', 'generation', 'copy', 'settled', 'by', 'ended_ms', 'died', 'task', 'run', 'group',
             'unsure'))
local outcome, led_by = done, nil
if separate then
  newest, counts, outcome, settled, by, ended_ms, died, has_run, group = unpack(
    redis.call('HMGET', trigger, 'generation', 'copy', 'outcome', 'settled', 'by', 'ended_ms', 'died', 'has_run', 'group'))
end
-- The states of the record of the execution, and of the trigger's own.
local found = state_of(run_id or (not separate and newest), holder, until_ms, unsure, done)
local its_own = separate and state_of(newest, nil, nil, nil, outcome) or found
must_be_state(found)
must_be_state(its_own)
local is_running = found == 'running'

-- Uses uncertain, answering, awaiting.

if is_running and holder == owner then
  if on_held ~= 'ask' and run ~= (attempts == '1' and run_id or redis.call('HGET', execution, 'run_as')) then
    return {'died'}
  end
  -- Asked again, because the reply was lost.
  return acquired(token, run_id, attempts, unsure and told(doubt_of(unsure)) or '')
end

newest = tonumber(newest)
if newest and ours < newest then
  return {'surplus', 'generation'}
end
if newest == ours and counts and copy ~= counts and previous ~= counts then
  return {'surplus', 'copy'}
end
if newest and ours > newest then
  -- A retry or a replacement begins a new count of deaths.
  redis.call('HDEL', trigger, 'died', 'left_by')
  died = false
end

-- A success that was passed on, and every other outcome, is the trigger's own. One that is still to be passed on needs its
-- value, and ends with the record that has it.
local has_value = not separate or done == 'succeeded'
if outcome and not settled then
  led_by = redis.call('HGET', trigger, 'led_by')
end
local is_own = outcome and (outcome ~= 'succeeded' or settled or has_value or led_by or
                            redis.call('HEXISTS', trigger, 'content_type') == 1)
if task ~= '' and by_task and not (separate and is_own) then
  -- A retry may change the arguments of its own trigger.
  local its_payload = payload ~= '' and runs ~= task_id and redis.call('HGET', execution, 'payload')
  if by_task ~= task or (its_payload and its_payload ~= payload) then
    return turn_away(by_task ~= task and 'task' or 'payload')
  end
end

if is_own or done then
  return ended_before(is_own)
elseif outcome then
  -- The execution it was answered from is kept no longer: it asks anew.
  must_become(its_own, 'waiting')
  its_own = 'waiting'
end

if about then
  if about.leader then
    return {'led', about.leader}
  end
  if about.replaced then
    return end_here('replaced', cjson.encode({'replaced', about.replaced}))
  end
  if about.merged and about.copy == copy and about.by ~= owner then
    -- Delivered again, it has only its own arguments; the message that is called has those of the others too.
    return parked_reply('again', {now, '', '', now})
  end
end

-- A trigger that has run before, and was cut off or retries, is no newcomer: whatever the policy, it waits.
if parks and message == '' then
  parks, on_held = false, 'wait'
end
local is_newcomer = not has_run and ours == 0 and not about
if (on_held == 'skip' or on_held == 'reject') and unsure and runs == task_id and ours == 0 then
  -- Nor has one run that has only tried to find out what another has done.
  local its = doubt_of(unsure)
  is_newcomer = is_newcomer or (its.tries > 0 and cjson.decode(its.who)[1] ~= task_id)
end
if on_held ~= 'ask' and not is_newcomer then
  on_held = parks and 'queue' or 'wait'
end

-- A run of the execution that has not ended died with its process; one that has sent its retry has said how it goes on.
local doubt = unsure and doubt_of(unsure)
local has_died = holder and holder ~= '' and not is_running and not (doubt and doubt.of == holder) and
                 not (runs == task_id and (tonumber(runs_generation) or ours) < ours)
if has_died then
  doubt = new_doubt(doubt, holder, runs, on)
elseif doubt and doubt.of ~= '' and runs == task_id and (tonumber(runs_generation) or ours) < ours then
  end_doubt()
  doubt = nil
end

if is_running and doubt and doubt.by == holder and unsure_as == 'hold' and runs ~= task_id then
  return wait_for_word(doubt, counts)
end

if is_running then
  local what = 'execution'
  if runs == task_id then
    what = ours > (tonumber(runs_generation) or ours) and 'predecessor' or 'own'
  end
  step_aside()
  return held(what, tonumber(since_ms), runs, on, tonumber(until_ms))
end

died = tonumber(died) or 0
if has_died and runs == task_id and tonumber(runs_generation) == ours then
  died = died + 1
  if unsure_as == 'hold' then
    redis.call('HSET', trigger, 'died', died)
  end
end
if died > 0 and deaths ~= '' and died >= tonumber(deaths) then
  return dead_letter(doubt, died)
end

-- What works in steps says by them what must not be done again.
local finds_out = false
if doubt and unsure_as == 'hold' and redis.call('HGET', steps, 'run') ~= run_id then
  doubt.next = doubt.next or next_try(doubt, doubt.looked)
  finds_out = on_held ~= 'ask' and doubt.next and doubt.next <= now
  if not finds_out then
    return wait_for_word(doubt, counts)
  end
  doubt.tries, doubt.by, doubt.asks = doubt.tries + 1, owner, nil
  doubt.next = next_try(doubt, now)
end

must_become(found, 'running')
if on_held == 'coalesce' and is_newcomer then
  local reply = gather()
  if reply then
    return reply
  end
end

local holders = redis.call('HLEN', lease)
local mine = holders > 0 and redis.call('HGET', lease, owner)
mine = mine and facts(mine)
if mine and mine.ends > now then
  -- The owner holds the key for another execution: it is re-entered.
  token = mine.fence
else
  local live, first, all, expired = holders, nil, {}, {}
  if holders > 0 then
    live, first, all, expired = holders_now()
  end
  local ripe = about and redis.call('HGET', pace, 'gathers') == member and tonumber(redis.call('HGET', pace, 'ripe_ms') or nil)
  if (ripe and ripe > now) or not is_next(tonumber(limit) - live) then
    local is_full = live >= tonumber(limit)
    if first and first.task == task_id and on_held ~= 'ask' and is_full then
      step_aside()
      return held(newest and ours > newest and 'predecessor' or 'own', first.since, first.task, first.worker, first.ends)
    end
    local who = is_full and {first.since, first.task, first.worker, first.ends} or next_called()
    if not parks or is_over(first_ms) then
      return held('lock', unpack(who))
    end
    return wait_for(who, is_full and first, all, ripe and ripe > now, died > 0)
  end
  if #expired > 0 then
    redis.call('HDEL', lease, unpack(expired))
  end
  mine = {since = now, ends = now + tonumber(ttl_ms)}
  leave_place_in_line()
  token, group = take_lease(mine.ends, about and about.group or group, holders == 0)
  local replaces = is_waited_for and redis.call('HGET', pace, 'replaces')
  if replaces and replaces ~= member and redis.call('ZSCORE', line, replaces) then
    -- It was called before that one came, which waits for it to stop.
    redis.call('HSET', pace, 'stop', token, 'stop_by', string.match(replaces, '^[^\n]*'))
  end
end

if outcome then
  redis.call('HDEL', trigger, 'outcome', 'settled', 'reason', 'by', 'ended_ms', 'led_by')
end
run_id = run_id or run
attempts = (tonumber(attempts) or 0) + 1
begin_run(mine.since, mine.ends, token, run_id, attempts, group or '', attempts == 1 and not newest)
if unsure_as == 'hold' then
  keep(execution, HELD_MS)
end
if attempts > 1 then
  redis.call('HSET', execution, 'run_as', run)
end
if doubt then
  doubt.of = ''
  redis.call('HSET', execution, 'unsure', line_of(doubt))
  redis.call('HDEL', execution, 'awaits:' .. task_id)
end
if newest or about or outcome then
  redis.call('HDEL', trigger, 'handouts', 'left_by', 'died', 'parked', 'member', 'awaiting', 'awaits_at', 'waits_since')
end
if died > 0 then
  redis.call('HSET', trigger, 'died', died)
end
if not is_kept then
  if about then
    redis.call('ZREM', due, member)
  elseif doubt or newest then
    leave_message()
  end
end
leave_line()
local what = doubt and told(doubt) or ''
if #calls > 0 then
  return {'acquired', token, run_id, attempts, what, calls}
end
return acquired(token, run_id, attempts, what)
