-- Renew a lease. 0 means it is gone or another's: join again with a new epoch and publish everything.
-- KEYS: lease.  ARGV: epoch, ttl in ms.
if redis.call('HGET', KEYS[1], 'e') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
