-- Return the records of all live leases.
-- KEYS: slots, lease prefix.
local answer = {}
local slots = redis.call('HGETALL', KEYS[1])
for i = 1, #slots, 2 do
  if slots[i] ~= '#next' then
    local record = redis.call('HGET', KEYS[2] .. slots[i + 1], 'r')
    if record then answer[#answer + 1] = record end
  end
end
return answer
