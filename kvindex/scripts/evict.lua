-- Remove blocks, leaf to root. This needs no lease: it removes only entries of the given epoch, so an evict
-- that arrives late cannot remove entries that the worker has published under a newer epoch.
-- KEYS: block prefix.  ARGV: slot, epoch, packed 16-byte hashes.
local removed = 0
for i = 1, #ARGV[3], 16 do
  local key = KEYS[1] .. string.sub(ARGV[3], i, i + 15)
  if redis.call('HGET', key, ARGV[1]) == ARGV[2] then
    removed = removed + redis.call('HDEL', key, ARGV[1])
  end
end
return removed
