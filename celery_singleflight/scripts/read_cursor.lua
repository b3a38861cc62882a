-- Return where a cursor stands.
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
-- ARGV[6] name       of the cursor
-- ARGV[7] digest     of the payload; empty when there is none
-- ARGV[8] accepts    "1" when the caller goes on also with another payload
--
-- Returns {"nowhere"}  it was never moved
--      or {"at", content_type, content_encoding, body}
--      or {"changed", content_type, content_encoding, body}  it was moved there with another payload
--      or {"refused", owner, outcome}  somebody else owns the record or the lock key now, or the run has ended; nothing is changed

local refused = overtaken()
if refused then
  return refused
end
open_steps()
local line = redis.call('HGET', steps, 'cursor:' .. name)
if not line then
  return {'nowhere'}
end
local moved_with, content_type, content_encoding, body = string.match(line, '^([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
local is_changed = moved_with ~= digest and moved_with ~= '' and digest ~= ''
if is_changed and accepts ~= '1' and execution ~= trigger then
  hold_payload(moved_with)
end
return {is_changed and 'changed' or 'at', content_type, content_encoding, body}
