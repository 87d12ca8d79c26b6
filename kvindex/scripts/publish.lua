-- Add blocks, root to leaf. Returns -1 if the worker has lost its lease (after a pause or a flush): it must
-- not add entries that a look-up might take for those of the lease's present owner.
-- KEYS: lease, block prefix.  ARGV: slot, epoch, packed 16-byte hashes.
if redis.call('HGET', KEYS[1], 'e') ~= ARGV[2] then return -1 end
for i = 1, #ARGV[3], 16 do
  redis.call('HSET', KEYS[2] .. string.sub(ARGV[3], i, i + 15), ARGV[1], ARGV[2])
end
return #ARGV[3] / 16
