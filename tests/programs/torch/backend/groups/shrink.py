"""Two of four ranks die one after the other; the rest goes on in a smaller group."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import signal

from programs.torch.backend.common import dist, torch

for world in (4, 3, 2):
    dist.init_process_group("zbmd")
    assert dist.get_world_size() == world, dist.get_world_size()
    me, last = dist.get_rank(), int(os.environ["RANK"])
    try:
        gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        for step in range(3):
            if (world, last, step) in {(4, 1, 2), (3, 0, 1)}:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_gather(gathered, torch.tensor([last]))
        if world == 2:
            break
        dist.barrier()
    except RuntimeError as error:
        print(f"lost: {error}")
    dist.destroy_process_group()
left = torch.cat(gathered).tolist()
assert left == [2, 3] and left[me] == last, (left, me)
pair = dist.new_group([0, 1])  # ranks of the new numbering
x = torch.full((2,), float(me))
dist.broadcast(x, 1, group=pair)
assert x[0] == 1
dist.send(x, 1 - me) if me else dist.recv(x, 1)
print("good")
dist.destroy_process_group()
