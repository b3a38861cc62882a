-- Keep a lease for another while. Never brings back one that is gone or has expired.
--
-- KEYS[1] lease      sorted set: owner token -> expiry in ms
-- KEYS[2] holders    hash: owner token -> JSON list of since in ms, fencing token, task id, worker
-- KEYS[3] execution  hash: run record of the execution key
-- KEYS[4] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- ARGV[1] owner      owner token of the holder
-- ARGV[2] ttl_ms     how long the lease lasts from now
--
-- Returns {"renewed", remaining_ms}  it is still ours
--      or {"lost", why}  why is "expired" or "taken"

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local ends = now + tonumber(ttl_ms)

local function keep(key)
  if redis.call('PTTL', key) < tonumber(ttl_ms) + 60000 then
    redis.call('PEXPIRE', key, string.format('%.0f', ttl_ms + 60000))
  end
end

local score = tonumber(redis.call('ZSCORE', lease, owner))
if not score then
  return {'lost', 'taken'}
end
if score <= now then
  return {'lost', 'expired'}
end
local holder = redis.call('HGET', execution, 'owner')
if holder and holder ~= owner then
  return {'lost', 'taken'}
end
redis.call('ZADD', lease, 'XX', string.format('%.0f', ends), owner)
if holder then
  redis.call('HSET', execution, 'until_ms', string.format('%.0f', ends))
end
for _, key in ipairs(KEYS) do
  keep(key)
end
return {'renewed', tonumber(ttl_ms)}
