-- Begin a lease: from now on only entries with this epoch are valid. Returns the worker's slot.
-- A worker keeps its slot while it lives, so that what it publishes again replaces its older entries. Another
-- process of the same name is fenced by the new epoch: its beat and its next publish fail.
-- A full Redis refuses the first write of a script if that write takes memory; it accepts all later ones. The
-- first write here takes no memory, since it deletes the lease of slot 0, which no worker has. Otherwise no
-- worker could join a full index, and a router would believe that the worker is dead.
-- KEYS: slots, lease prefix.  ARGV: worker id, epoch, record, ttl in ms.
redis.call('DEL', KEYS[2] .. '0')
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
