-- End a lease. The epoch is compared and the key deleted in one step: a process that ends after its successor
-- of the same name has joined must not take the successor's lease with it.
-- KEYS: lease.  ARGV: epoch.
if redis.call('HGET', KEYS[1], 'e') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
