-- End a lease. The epoch is compared and the key deleted in one step, because a process that ends after a
-- successor of the same name has joined must not delete the successor's lease.
-- KEYS: lease.  ARGV: epoch.
if redis.call('HGET', KEYS[1], 'e') ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
