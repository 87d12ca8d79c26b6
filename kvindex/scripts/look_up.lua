-- Longest prefix of each live holder, in one round trip: binary search, since what a worker publishes is
-- closed under prefixes. A linear walk would hold Redis for milliseconds. Were the set not closed, the answer
-- would be a worse hint, never a wrong block: the owner decides.
-- KEYS: block prefix, lease prefix.  ARGV: packed 16-byte hashes.  Returns [lease record, depth, ...].
local packed = ARGV[1]
local n = #packed / 16
local function key(i) return KEYS[1] .. string.sub(packed, (i - 1) * 16 + 1, i * 16) end
local answer = {}
if n == 0 then return answer end
local holders = redis.call('HGETALL', key(1))
for h = 1, #holders, 2 do
  local slot, epoch = holders[h], holders[h + 1]
  local lease = redis.call('HMGET', KEYS[2] .. slot, 'e', 'r')
  if lease[1] == epoch then
    local low, high = 1, n  -- the holder has block `low`; the answer is in [low, high]
    while low < high do
      local middle = math.ceil((low + high) / 2)
      if redis.call('HGET', key(middle), slot) == epoch then low = middle else high = middle - 1 end
    end
    answer[#answer + 1] = lease[2]
    answer[#answer + 1] = low
  end
end
return answer
