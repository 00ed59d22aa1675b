"""`monitored_barrier`, `split_group`."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from datetime import timedelta
from functools import partial

from programs.torch.backend.common import dist, fails
from programs.torch.backend.operations.common import me, mine, same, world

for _ in range(3):
    dist.monitored_barrier()
dist.monitored_barrier(timeout=timedelta(seconds=60), wait_all_ranks=True)
short = timedelta(seconds=0.2)
for wait_all_ranks in (False, True, False):
    if me == 0:
        late = "Ranks 1, 2 failed to pass monitoredBarrier in 200 ms"
        late = late if wait_all_ranks else "Rank 1 failed to pass monitoredBarrier in 200 ms"
        fails(partial(dist.monitored_barrier, timeout=short, wait_all_ranks=wait_all_ranks), late)
    dist.barrier()
if me != 1:
    texts = ["Rank 2 successfully reached monitoredBarrier, but", "from rank 0: "] if me else []
    texts.append("Rank 1 failed to pass monitoredBarrier")
    fails(lambda: dist.monitored_barrier(timeout=timedelta(seconds=1)), *texts)
dist.barrier()  # the group is of use after all that
dist.monitored_barrier(timeout=timedelta(seconds=60))
if me == 0:
    fails(lambda: world.monitored_barrier(timedelta(0)), "Rank 0 timed out in monitoredBarrier")
pair = dist.new_group([0, 2])
dist.monitored_barrier(pair, timedelta(seconds=60))  # does nothing at rank 1

# Groups: each rank of the parent calls it; ranks are the parent's.
half = dist.split_group(split_ranks=[[0, 1], [2]], group_desc="a half", timeout=timedelta(seconds=60))
assert half.group_desc == "a half"
x = mine(2) + 1
dist.all_reduce(x, group=half)
same(x, 3)
if me != 2:
    assert dist.get_process_group_ranks(half) == [0, 1]
again = dist.split_group(parent_pg=half, split_ranks=[[1 if me < 2 else 0]])
assert again is None if me == 0 else dist.get_process_group_ranks(again) == [me]
for wrong in (None, [], [[]], [[0, 0]]):
    try:
        dist.split_group(split_ranks=wrong)
    except ValueError:
        pass
    else:
        raise AssertionError(f"{wrong} was taken for a split")
gloo = dist.new_group(backend="gloo")  # those of other backends go to PyTorch's own functions
dist.monitored_barrier(gloo, timedelta(seconds=60))

print("good")
dist.destroy_process_group()
