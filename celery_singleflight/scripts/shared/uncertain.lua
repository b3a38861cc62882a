-- What is known of an execution whose run died, or was cut off, after its body began. Needs `time` and the keys execution and due.
--
-- The field `unsure` of its record has lines of
--   since   when that was found, in ms
--   of      owner token of the run that died; empty once another has begun
--   who     its trigger and its worker, as JSON
--   tries   how often somebody has tried to find out what it has done
--   looked  since when the next try is counted, in ms
--   next    store time in ms of the next try; empty for none, or when it is not known yet
--   by      owner token of the run that finds out
--   asks    the trigger that is to find out next, as `due` names it
-- A field `awaits:<task id>` of the record names a trigger, as `due` does, whose message the store has until it is known.

-- How long an uncertain execution is remembered after the last look, how long a look may be put off, when the others look who
-- has tried to find out, and how long an outcome is there at least for those who have waited for it.
local HELD_MS, LOOK_AGAIN_MS, AFTER_MS, WAITING_MS = 2592000000, 43200000, 10000, 3600000

local function doubt_of(line)
  local since, of, who, tries, looked, next_ms, by, asks = string.match(
    line, '^(%d+)\n([^\n]*)\n([^\n]*)\n(%d+)\n(%d+)\n(%d*)\n([^\n]*)\n(.*)$')
  return {since = tonumber(since), of = of, who = who, tries = tonumber(tries), looked = tonumber(looked), next = tonumber(next_ms),
          by = by, asks = asks ~= '' and asks or nil}
end

local function line_of(doubt)
  return table.concat({text(doubt.since), doubt.of, doubt.who, doubt.tries, text(doubt.looked), doubt.next and text(doubt.next) or '',
                       doubt.by or '', doubt.asks or ''}, '\n')
end

-- Return the doubt about a run that has died: that of an earlier one goes on.
local function new_doubt(earlier, of, task, worker)
  return {since = earlier and earlier.since or now, of = of, who = earlier and earlier.who or cjson.encode({task or '', worker or ''}),
          tries = earlier and earlier.tries or 0, looked = now, asks = earlier and earlier.asks}
end

-- Note that the run of that owner, the last of the execution, has died.
local function begin_doubt(of)
  local unsure, task, worker = unpack(redis.call('HMGET', execution, 'unsure', 'task_id', 'worker'))
  local earlier = unsure and doubt_of(unsure)
  -- Whoever came when its lease had ended may have found it before its main process did, and waits for a try.
  if not earlier or earlier.of ~= of then
    redis.call('HSET', execution, 'unsure', line_of(new_doubt(earlier, of, task, worker)))
  end
end

-- Somebody knows: those who wait for that ask again. Returns how many they are.
local function end_doubt()
  local all, gone = redis.call('HGETALL', execution), {'unsure'}
  for n = 1, #all, 2 do
    if string.sub(all[n], 1, 7) == 'awaits:' then
      redis.call('ZADD', due, text(now), all[n + 1])
      gone[#gone + 1] = all[n]
    end
  end
  for n = 1, #gone, 1000 do
    redis.call('HDEL', execution, unpack(gone, n, math.min(n + 999, #gone)))
  end
  return #gone - 1
end
