-- The states of a run record, and which of them may follow which. Needs `time`.
--
-- The state is not stored: `state_of` tells it from the fields of the record.
--   new              nothing is known
--   running          it has an owner, whose lease is live
--   overdue          it has an owner, whose lease has ended, and nobody has found out why
--   uncertain        a run of it died or was cut off, nobody knows what that has done, and no run of it is live
--   waiting          known, and nothing of these: it is parked, with the broker, given back, or in the gap of a retry
--   ended uncertain  it has the outcome "uncertain"
-- and the other outcomes by their names. A trigger with an explicit execution key has a record of its own beside that of the
-- execution; the first knows of no runs, and is waiting until it has its outcome.
--
-- A line of the table is a transition, and the scripts that make it; "time" is what happens by itself. The picture in
-- docs/explanation/run-record.md says the same.

local TRANSITIONS = [[
from > to: by
running > succeeded: finish, resolve
running > failed: conclude, finish, resolve
running > replaced: finish
running > revoked: conclude
running > waiting: abandon, finish
running > uncertain: abandon, conclude, release
running > overdue: time
running > new: abandon, conclude, finish, resolve
new > running: enter
new > waiting: enter
new > succeeded: enter, finish, follow
new > failed: enter, finish, follow
new > coalesced: follow
new > replaced: finish
new > skipped: enter
new > rejected: enter
new > timed out waiting: enter
new > ended uncertain: enter
waiting > running: enter
waiting > uncertain: abandon
waiting > succeeded: enter, finish, follow, resolve
waiting > failed: conclude, enter, finish, follow, resolve
waiting > coalesced: follow
waiting > replaced: enter, finish
waiting > skipped: enter
waiting > rejected: enter
waiting > timed out waiting: enter
waiting > dead-lettered: enter
waiting > revoked: conclude
waiting > ended uncertain: enter
waiting > new: abandon, enter, time
overdue > running: enter
overdue > waiting: abandon, finish, replay, resolve
overdue > uncertain: abandon, conclude, enter, release
overdue > succeeded: finish, resolve
overdue > failed: conclude, finish, resolve
overdue > replaced: finish
overdue > timed out waiting: enter
overdue > dead-lettered: enter
overdue > revoked: conclude
overdue > ended uncertain: enter
overdue > new: abandon, conclude, enter, finish, resolve, time
uncertain > running: enter
uncertain > waiting: abandon, enter, finish, replay, resolve
uncertain > succeeded: finish, resolve
uncertain > failed: conclude, finish, resolve
uncertain > replaced: finish
uncertain > timed out waiting: enter
uncertain > dead-lettered: enter
uncertain > revoked: conclude
uncertain > ended uncertain: enter
uncertain > new: abandon, conclude, enter, finish, resolve, time
ended uncertain > succeeded: resolve
ended uncertain > failed: resolve
ended uncertain > waiting: replay, resolve
ended uncertain > uncertain: replay
ended uncertain > new: time
succeeded > waiting: enter, follow, replay
succeeded > new: replay, time
failed > waiting: follow, replay, resolve_step
failed > uncertain: replay
failed > new: replay, time
coalesced > waiting: follow, replay
coalesced > new: time
skipped > waiting: replay
skipped > new: time
rejected > waiting: replay
rejected > new: time
timed out waiting > waiting: replay
timed out waiting > uncertain: replay
timed out waiting > new: time
replaced > waiting: replay
replaced > new: time
dead-lettered > waiting: replay
dead-lettered > uncertain: replay
dead-lettered > new: time
revoked > waiting: replay
revoked > uncertain: replay
revoked > new: time
]]

local function state_of_outcome(outcome)
  return outcome == 'uncertain' and 'ended uncertain' or outcome
end

-- Return the state of a record with these fields; nothing or false is for a field that is not there. What no script writes is a
-- state that is not in the table.
local function state_of(is_known, owner, until_ms, unsure, outcome)
  local ends = owner and owner ~= '' and (tonumber(until_ms or nil) or math.huge)
  local state = ends and ends > now and 'running' or unsure and 'uncertain' or ends and 'overdue' or is_known and 'waiting' or 'new'
  if outcome then
    return state == 'running' and outcome .. ' and running' or state_of_outcome(outcome)
  end
  return ends == math.huge and 'running without an end' or state
end

-- Refuse to go on with a record that is in no state of the table.
local function must_be_state(state)
  if not string.find(TRANSITIONS, '\n' .. state .. ' > ', 1, true) then
    error('a run record is "' .. state .. '", which none can be: nothing is changed', 0)
  end
end

-- To be called before the first write of a transition. Nothing is changed by a script that it refuses.
local function must_become(from, to)
  if from ~= to and not string.find(TRANSITIONS, '\n' .. from .. ' > ' .. to .. ':', 1, true) then
    error('a run record that is "' .. from .. '" cannot become "' .. to .. '": nothing is changed', 0)
  end
end
