-- Renew a lease. Returns 0 if the lease is gone or belongs to another process; the worker must then join
-- again with a new epoch and publish everything.
-- KEYS: lease.  ARGV: epoch, ttl in ms.
if redis.call('HGET', KEYS[1], 'e') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
