-- Find the longest prefix of each live holder, in one round trip. The blocks that a worker publishes are
-- closed under prefixes, so "holds block i" is true up to its depth and false beyond. A full match takes one
-- probe; any other takes a binary search of at most 12 probes. A linear search would block Redis for
-- milliseconds.
--
-- Races: no other command runs during a script, so all probes of one holder see the same state. A worker may
-- evict right afterwards; it checks its blocks again when they are requested. Entries of a dead worker
-- remain, as may those from before a restart, but their epoch differs from the lease's. If the set were not
-- closed, the answer would be a worse hint, never a wrong block.
-- KEYS: block prefix, lease prefix.  ARGV: packed 16-byte hashes, most holders.
-- Returns [lease record, depth, ...].
local packed, max_holders = ARGV[1], tonumber(ARGV[2])
local n = #packed / 16
local function key(i) return KEYS[1] .. string.sub(packed, (i - 1) * 16 + 1, i * 16) end
local answer = {}
if n == 0 then return answer end
local holders = redis.call('HGETALL', key(1))
for h = 1, #holders, 2 do
  if #answer == 2 * max_holders then break end
  local slot, epoch = holders[h], holders[h + 1]
  local lease = redis.call('HMGET', KEYS[2] .. slot, 'e', 'r')
  if lease[1] == epoch then
    local depth = n
    if redis.call('HGET', key(n), slot) ~= epoch then
      local low, high = 1, n - 1  -- the holder has block `low`, and none beyond `high`
      while low < high do
        local middle = math.ceil((low + high) / 2)
        if redis.call('HGET', key(middle), slot) == epoch then low = middle else high = middle - 1 end
      end
      depth = low
    end
    answer[#answer + 1] = lease[2]
    answer[#answer + 1] = depth
  end
end
return answer
