-- The store's time, and numbers as texts.

local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- A number inside of a text: `..` would round it. One that is an argument by itself goes to the server in full.
local function text(number)
  return string.format('%.0f', number)
end

-- A key lives at least this long from now; what somebody else needs longer is not cut.
local function keep(key, ms)
  if redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, text(ms))
  end
end
