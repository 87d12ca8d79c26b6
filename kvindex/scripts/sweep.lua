-- Remove invalid entries: those of dead workers, of older epochs and of freed slots. Each call visits a
-- bounded number of keys. The call that ends a pass frees the slots of dead workers. A worker that comes back
-- gets a new slot, and no slot is ever assigned twice.
-- KEYS: slots, lease prefix, block prefix.  ARGV: cursor, keys to visit.  Returns [next cursor, removed].
local epochs = {}
local function epoch_of(slot)
  if epochs[slot] == nil then epochs[slot] = redis.call('HGET', KEYS[2] .. slot, 'e') end
  return epochs[slot]
end
local removed = 0
local page = redis.call('SCAN', ARGV[1], 'COUNT', ARGV[2])
for _, key in ipairs(page[2]) do
  if string.sub(key, 1, #KEYS[3]) == KEYS[3] then
    local holders = redis.call('HGETALL', key)
    for h = 1, #holders, 2 do
      if holders[h + 1] ~= epoch_of(holders[h]) then removed = removed + redis.call('HDEL', key, holders[h]) end
    end
  end
end
if page[1] == '0' then
  local slots = redis.call('HGETALL', KEYS[1])
  for s = 1, #slots, 2 do
    if slots[s] ~= '#next' and not epoch_of(slots[s + 1]) then redis.call('HDEL', KEYS[1], slots[s]) end
  end
end
return {page[1], removed}
