-- Charge a tenant's token bucket, and take a prompt's tokens if enough are left. Returns the time until they
-- are, in microseconds; 0: they were taken.
-- The key expires when the bucket is full again, which is the state of a missing key.
-- KEYS: bucket.  ARGV: tokens a minute, tokens to charge in any case, tokens wanted or -1.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local capacity, spent, wanted = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local rate = capacity / 60000000
local stored = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(stored[1]) or capacity, tonumber(stored[2]) or now
level = math.min(capacity, level + math.max(0, now - at) * rate) - spent
local wait = 0
if wanted >= 0 then
  local missing = math.min(wanted, capacity) - level
  if missing > 0.000001 then
    wait = math.ceil(missing / rate)
  else
    level = level - wanted
  end
end
redis.call('HSET', KEYS[1], 'level', string.format('%.17g', level), 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil((capacity - level) / rate / 1000) + 1)
return wait
