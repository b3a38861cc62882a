-- Keep a lease for another while. Never brings back one that is gone or has expired.
--
-- KEYS[1] lease      hash: owner token -> lines of expiry in ms, since in ms, fencing token, worker, task id
-- KEYS[2] execution  hash: run record of the execution key
-- KEYS[3] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- ARGV[1] owner      owner token of the holder
-- ARGV[2] ttl_ms     how long the lease lasts from now
--
-- Returns {"renewed", remaining_ms}  it is still ours
--      or {"lost", why}  why is "expired" or "taken"

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local ends = string.format('%.0f', now + tonumber(ttl_ms))

local line = redis.call('HGET', lease, owner)
if not line then
  return {'lost', 'taken'}
end
local until_ms, rest = string.match(line, '^(%d+)(\n.*)$')
if tonumber(until_ms) <= now then
  return {'lost', 'expired'}
end
local holder = redis.call('HGET', execution, 'owner')
holder = holder ~= '' and holder
if holder and holder ~= owner then
  return {'lost', 'taken'}
end
redis.call('HSET', lease, owner, ends .. rest)
if holder then
  redis.call('HSET', execution, 'until_ms', ends)
end
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < tonumber(ttl_ms) + 60000 then
    redis.call('PEXPIRE', key, string.format('%.0f', ttl_ms + 60000))
  end
end
return {'renewed', tonumber(ttl_ms)}
