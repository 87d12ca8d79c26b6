-- Record what one router runs of a tenant's requests, and take places for another request if they are free.
-- Returns "granted", "waits" or "refused".
-- A record counts until its lease ends. A new request takes no place while requests of other routers wait.
-- KEYS: records.  ARGV: router, its running places, its waiting requests (with this one), places wanted or 0,
-- whether the request is new (1 or 0), whether it is the router's first in line (1 or 0), most places, most
-- waiting requests, lease in ms.
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local router, wanted, is_new, is_first = ARGV[1], tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6] == '1'
local running, waiting = tonumber(ARGV[2]), tonumber(ARGV[3])
local max_running, max_waiting, lease = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local running_elsewhere, waiting_elsewhere = 0, 0
local records = redis.call('HGETALL', KEYS[1])
for i = 1, #records, 2 do
  if records[i] ~= router then
    local run, wait, till = string.match(records[i + 1], '(%d+) (%d+) (%d+)')
    if tonumber(till) < now then
      redis.call('HDEL', KEYS[1], records[i])
    else
      running_elsewhere, waiting_elsewhere = running_elsewhere + run, waiting_elsewhere + wait
    end
  end
end
local outcome = 'waits'
if wanted > 0 then
  local is_behind = not is_first or (is_new and waiting_elsewhere > 0)
  if not is_behind and running + running_elsewhere + wanted <= max_running then
    outcome, running, waiting = 'granted', running + wanted, waiting - 1
  elseif is_new and waiting + waiting_elsewhere > max_waiting then
    outcome, waiting = 'refused', waiting - 1
  end
end
if running + waiting > 0 then
  redis.call('HSET', KEYS[1], router, string.format('%d %d %.0f', running, waiting, now + lease))
  redis.call('PEXPIRE', KEYS[1], lease)
else
  redis.call('HDEL', KEYS[1], router)
end
return outcome
