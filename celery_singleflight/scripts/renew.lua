-- Keep a lease for another while. Never brings back one that is gone or has expired.
--
-- Uses time.
--
-- KEYS[1] lease      hash: owner token -> who holds the lock key; see shared/holders.lua
-- KEYS[2] execution  hash: run record of the execution key
-- KEYS[3] trigger    hash: record of the trigger; the same key as execution unless the execution key is explicit
-- KEYS[4] pace       hash: stop, the fencing token of a holder that is asked to stop, and stop_by, the trigger that asks
-- ARGV[1] owner      owner token of the holder
-- ARGV[2] ttl_ms     how long the lease lasts from now
--
-- Returns {"renewed", remaining_ms, stop_by}  it is still ours; stop_by is the trigger that asks it to stop, or empty
--      or {"lost", why}  why is "expired" or "taken"

local ends = text(now + tonumber(ttl_ms))

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
for _, key in ipairs({lease, execution, trigger}) do
  keep(key, ttl_ms + 60000)
end
local stop, stop_by = unpack(redis.call('HMGET', pace, 'stop', 'stop_by'))
if stop and stop ~= string.match(rest, '^\n%d+\n(%d+)') then
  stop_by = ''
end
return {'renewed', tonumber(ttl_ms), stop_by or ''}
