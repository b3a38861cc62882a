-- Taking the lease and writing down the run. Needs `time` and the keys and values of `enter`.

local separate = execution ~= trigger

local keeps, linger_ms, digest, expires_ms, which, delay_ms, within_ms, merged_with, merged_copy = '1', '', '', '', '', '', '', '', ''
if waits ~= '1\n\n\n\n\n\n\n\n' then
  keeps, linger_ms, digest, expires_ms, which, delay_ms, within_ms, merged_with, merged_copy = string.match(
    waits, '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)\n([^\n]*)$')
end
local payload, unsure_as, delays, origin = '', '', '', nil
if terms ~= '' then
  payload, unsure_as, delays, origin = string.match(terms, '^([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
end

local is_kept = message ~= '' and keeps ~= ''
-- A message that the store keeps is kept for a day at least.
local lives = math.max(tonumber(keep_ms), message ~= '' and 86400000 or 3600000)

local function remember(...)
  redis.call('HSET', trigger, 'generation', generation, 'copy', copy, ...)
  keep(trigger, lives)
end

-- A key that nobody else has lives for so long; one that others may need longer is not cut.
local function extend(key, ms, is_new)
  if is_new then
    redis.call('PEXPIRE', key, ms)
  else
    keep(key, ms)
  end
end

-- Return the next fencing token of the lock key, with which its owner is among the holders until then, and the group of those
-- who wait for its outcome: its own, where there is none yet. `is_first` is whether nobody else is in the lease.
local function take_lease(ends, group, is_first)
  local token = clock[1] * 1000000 + clock[2]
  local last = tonumber(redis.call('SET', fence, token, 'PX', 86400000, 'GET')) or 0
  if last >= token then
    token = last + 1
    redis.call('SET', fence, token, 'PX', 86400000)
  end
  token = text(token)
  group = group and group ~= '' and group or token
  redis.call('HSET', lease, owner, text(ends) .. '\n' .. text(now) .. '\n' .. token .. '\n' .. worker .. '\n' .. group .. '\n' ..
             digest .. '\n' .. task_id)
  extend(lease, ttl_ms + 60000, is_first)
  return token, group
end

-- Write down the run with its trigger, and have a sweeper look at it when its lease ends. `is_new` is whether nothing was known.
local function begin_run(since, ends, token, run_id, attempt, group, is_new)
  local record = {'owner', owner, 'until_ms', ends, 'since_ms', since, 'fence', token, 'run', run_id, 'attempt', attempt,
                  'task_id', task_id, 'worker', worker, 'lock_key', lock_key, 'run_generation', generation}
  local function note(field, value)
    record[#record + 1] = field
    record[#record + 1] = value
  end
  if task ~= '' then
    note('task', task)
    if #member - #task_id > 200 then
      -- The name of the record may have its beginning and a digest only.
      note('execution_key', string.sub(member, #task_id + 2))
    end
  end
  if payload ~= '' then
    note('payload', payload)
  end
  if origin or not is_new then
    note('origin', origin or '')
  end
  if separate then
    remember('has_run', '1', 'group', group)
    if is_kept then
      redis.call('HSET', trigger, 'message', message)
    end
  else
    note('generation', generation)
    note('copy', copy)
    note('group', group)
    if is_kept then
      note('message', message)
    end
  end
  redis.call('HSET', execution, unpack(record))
  if is_kept then
    redis.call('ZADD', due, ends, member)
  end
  extend(execution, ttl_ms + (separate and keep_ms or lives) + 60000, is_new)
end

local function acquired(token, run_id, attempt, unsure)
  return 'acquired\n' .. token .. '\n' .. run_id .. '\n' .. attempt .. '\n' .. unsure .. '\n'
end
