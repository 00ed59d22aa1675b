"""Two ranks over gloo save or load a checkpoint of PyTorch's own. Arguments: the folder, "save" or "load"."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, zeros

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")


def run(rank, folder, port_file, loads):
    dist.init_process_group("gloo", store=dist.FileStore(port_file, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    if loads:
        into = {"model": {"embed.weight": zeros(256, 16, device_mesh=mesh, placements=[Shard(0)])}}
        dcp.load(into, checkpoint_id=folder)
        whole = into["model"]["embed.weight"].full_tensor()
        if rank == 0:
            torch.save(whole, folder + ".whole")
    else:
        torch.manual_seed(5)
        wide, half = torch.randn(7, 3), torch.randn(4, 2).to(torch.bfloat16)
        sharded = distribute_tensor(wide, mesh, [Shard(0)])
        dcp.save({"model": {"wide": sharded, "half": half}, "steps": 9}, checkpoint_id=folder)
        if rank == 0:
            torch.save({"wide": wide, "half": half}, folder + ".whole")
    dist.barrier()  # gloo may abort a rank whose peer has ended
    dist.destroy_process_group()


if __name__ == "__main__":
    folder, loads = sys.argv[1], sys.argv[2] == "load"
    torch.multiprocessing.spawn(run, (folder, folder + ".store", loads), nprocs=2)
