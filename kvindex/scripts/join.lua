-- Begin a lease: from here on only entries with this epoch count. Returns the worker's slot.
-- KEYS: slots, lease prefix.  ARGV: worker id, epoch, record, ttl in ms.
local slot = redis.call('HGET', KEYS[1], ARGV[1])
if not slot then
  slot = redis.call('HINCRBY', KEYS[1], '#next', 1)
  redis.call('HSET', KEYS[1], ARGV[1], slot)
end
local lease = KEYS[2] .. slot
redis.call('DEL', lease)
redis.call('HSET', lease, 'e', ARGV[2], 'r', ARGV[3])
redis.call('PEXPIRE', lease, ARGV[4])
return tonumber(slot)
