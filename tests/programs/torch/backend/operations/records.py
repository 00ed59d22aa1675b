"""The flight recorder and the profiler know each call."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import json
from datetime import timedelta

from programs.torch.backend.common import dist, fails, torch
from programs.torch.backend.operations.common import me, mine, n


def dumped(**options):
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(**options))


with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
    dist.all_reduce(mine(3, 4))
    dist.all_gather([torch.empty(2)] * n, mine(2), async_op=True).wait()
    works = [dist.isend(mine(5), (me + 1) % n), dist.irecv(torch.empty(5), (me - 1) % n)]
    for work in works:
        work.wait()
shapes = {event.name: event.input_shapes for event in profile.events() if event.name.startswith("zbmd:")}
assert shapes == {
    "zbmd:all_reduce": [[3, 4]],
    "zbmd:all_gather": [[2]],
    "zbmd:send": [[5]],
    "zbmd:recv": [[5]],
}, shapes

group = dist.new_group(group_desc="recorded", timeout=timedelta(minutes=2))
for count in range(1, 6):
    dist.all_reduce(mine(count), group=group)
dist.broadcast(mine(2, 3, dtype=torch.bfloat16), 0, group=group)
dist.barrier(group)
names = [group.group_name, "recorded"]
kept = [entry for entry in dumped()["entries"] if entry["process_group"] == names]
assert [entry["collective_seq_id"] for entry in kept] == [4, 5, 6, 7], kept  # the last 4, by the variable
last = kept[-2]
assert last["profiling_name"] == "zbmd:broadcast" and last["state"] == "completed" and last["retired"], last
assert last["input_sizes"] == [[2, 3]] and last["input_dtypes"] == ["BFloat16"], last
times = [last[f"time_{name}_ns"] for name in ("created", "discovered_started", "discovered_completed")]
assert last["timeout_ms"] == 120_000 and 0 < times[0] <= times[1] <= times[2], last
found = dumped(includeCollectives=False)
assert not found.get("entries") and found["pg_config"][group.group_name]["ranks"] == str([*range(n)]), found
assert not dumped(onlyActive=True).get("entries"), dumped(onlyActive=True)
if me == 0:  # what the others do not call is under way, until its time is up
    short = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    fails(lambda: dist.all_reduce(mine(9), group=short), "Timed out in ", "waited for rank 1 until")
    (active,) = dumped(onlyActive=True)["entries"]
    assert active["input_sizes"] == [[9]] and active["state"] == "started", active
else:
    dist.new_group([0, 1], timeout=timedelta(seconds=1))
dist.barrier()

print("good")
dist.destroy_process_group()
