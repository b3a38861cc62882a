-- Who holds a lock key. Needs `time`, and the key `lease`: a hash of owner token -> lines of expiry in ms, since in ms, fencing
-- token, worker, the group of those who wait for the outcome, digest of the payload, task id.

local function facts(value)
  local ends, since, fenced, at, group, digest, task = string.match(
    value, '^(%d+)\n(%d+)\n(%d+)\n([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
  return {ends = tonumber(ends), since = tonumber(since), fence = fenced, worker = at, group = group, digest = digest, task = task}
end

-- Return how many hold the key, the one of them whose lease ends first, all of them, and the owners whose lease has expired.
local function holders_now()
  local live, expired, first = {}, {}, nil
  local all = redis.call('HGETALL', lease)
  for n = 2, #all, 2 do
    local holder = facts(all[n])
    if holder.ends > now then
      live[#live + 1] = holder
      first = (not first or holder.ends < first.ends) and holder or first
    else
      expired[#expired + 1] = all[n - 1]
    end
  end
  return #live, first, live, expired
end

-- Release the lease of an owner, who may keep the place for a while after the acquisition. Its outcome is told to whoever waits
-- for it now, so the place goes on without group and payload: nobody may begin to wait for them. `line` is what the lease says of
-- the owner, where the caller knows it.
local function leave_place(owner, hold_ms, line)
  line = line or redis.call('HGET', lease, owner)
  if line then
    local ends = string.match(line, '^%d+\n(%d+)') + hold_ms
    redis.call('HDEL', lease, owner)
    if ends > now then
      local holder = facts(line)
      -- The place stays taken, by a name that nobody can renew.
      redis.call('HSET', lease, owner .. ' ended', table.concat(
        {text(ends), text(holder.since), holder.fence, holder.worker, '', '', holder.task}, '\n'))
      redis.call('PEXPIRE', lease, text(math.max(redis.call('PTTL', lease), ends - now + 60000)))
    end
  end
end

-- The outcome of a holder that goes on for a while is told: nobody may begin to wait for it.
local function lead_no_more(owner)
  local line = redis.call('HGET', lease, owner)
  if line then
    local holder = facts(line)
    redis.call('HSET', lease, owner, table.concat(
      {text(holder.ends), text(holder.since), holder.fence, holder.worker, '', '', holder.task}, '\n'))
  end
end
