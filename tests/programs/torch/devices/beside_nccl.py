"""A backend beside zbmd in one process group: its communicators are aborted and made again.

    zbmd-node run --nproc-per-node 3 tests/programs/torch/devices/beside_nccl.py NAME LOG

`Late` stands where NCCL does: real collectives of gloo over copies, which, like NCCL's kernels, wait for a
dead rank until they are aborted. Its tensors are on a modelled device.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

from support.devices.torch_model import KIND, get, install, put

import zbmd.torch
from zbmd.transport.errors import PeerLost

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
LOG = Path(sys.argv[2])
FIRST = os.environ["ZBMD_INCARNATION"] == "1"


def log(text: str) -> None:
    """Write a line that begins with this rank; what follows is of a communicator, known by its size."""
    with LOG.open("a") as file:
        file.write(f"{os.environ['RANK']} {text}\n")


class LateWork:
    """Work of gloo on copies, until it is done or its communicator is aborted."""

    def __init__(self, owner: Late, work: Any, tensors: list[Any], copies: list[Any]) -> None:
        self.owner, self.work, self.tensors, self.copies = owner, work, tensors, copies

    def wait(self, timeout: Any = None) -> bool:
        try:
            self.work.wait()
        except RuntimeError:  # NCCL would not notice
            self.owner.aborted.wait()
            raise RuntimeError("the communicator was aborted") from None
        for tensor, copy in zip(self.tensors, self.copies, strict=True):
            tensor.copy_(copy)
        return True


class Late:
    """One communicator, with the methods of a `torch._C._distributed_c10d.Backend`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self.aborted, self.size = threading.Event(), size
        log(f"{size} made {rank}")

    def allreduce(self, tensors: list[Any], options: Any) -> LateWork:
        copies = [get(tensor) for tensor in tensors]
        return LateWork(self, self.gloo.allreduce(copies, options), tensors, copies)

    def broadcast(self, tensors: list[Any], options: Any) -> LateWork:
        copies = [get(tensor) for tensor in tensors]
        return LateWork(self, self.gloo.broadcast(copies, options), tensors, copies)

    def _allgather_base(self, output: Any, source: Any, options: Any) -> LateWork:
        copies = [get(output)]
        return LateWork(self, self.gloo._allgather_base(copies[0], get(source), options), [output], copies)

    def send(self, tensors: list[Any], to: int, tag: int) -> LateWork:
        return LateWork(self, self.gloo.send([get(each) for each in tensors], to, tag), [], [])

    def recv(self, tensors: list[Any], source: int, tag: int) -> LateWork:
        copies = [get(tensor) for tensor in tensors]
        return LateWork(self, self.gloo.recv(copies, source, tag), tensors, copies)

    def abort(self) -> None:
        log(f"{self.size} aborted")
        self.aborted.set()

    def shutdown(self) -> None:
        log(f"{self.size} shut down")


def start() -> tuple[int, int]:
    dist.init_process_group(f"cpu:zbmd,{KIND}:late")
    return dist.get_rank(), dist.get_world_size()


def operations() -> None:
    me, n = start()
    total = sum(range(n))
    x, here = put(torch.full((5,), float(me))), torch.full((5,), float(me))
    dist.all_reduce(x)
    dist.all_reduce(here)
    assert torch.equal(get(x), here) and here[0] == total
    x = put(torch.full((5,), float(me)))
    dist.broadcast(x, 1)
    assert get(x)[0] == 1
    out = put(torch.zeros(2 * n))
    dist.all_gather_into_tensor(out, put(torch.full((2,), float(me))))
    assert get(out)[::2].tolist() == [*range(n)]
    if me < 2:
        x = put(torch.full((3,), float(me)))
        if me == 0:
            dist.send(x, 1, tag=2)
        else:
            dist.recv(x, 0, tag=2)
        assert get(x)[0] == 0
    pair = dist.new_group([0, n - 1])
    if me in (0, n - 1):
        x = put(torch.ones(2))
        dist.all_reduce(x, group=pair)
        assert get(x)[0] == 2
    dist.monitored_barrier()
    dist.destroy_process_group()
    dist.init_process_group(f"cpu:gloo,{KIND}:zbmd")  # the other way round
    x, here = put(torch.ones(3)), torch.ones(3)
    dist.all_reduce(x)
    work = dist.all_reduce(here, async_op=True)
    work.wait()
    assert get(x)[0] == here[0] == n
    assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    found: list[Any] = [None] * n
    dist.all_gather_object(found, me)
    assert found == [*range(n)]
    dist.destroy_process_group()


def lost() -> None:
    """A rank dies while the others wait in the other backend; then all initialise again."""
    while True:
        me, n = start()
        pair = dist.new_group([0, 1])  # which loses nobody, and begins again with the others
        try:
            x = put(torch.ones(4))
            dist.all_reduce(x)
            dist.barrier()
            if me == 2 and FIRST:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(x)
            assert get(x)[0] == n * n
        except RuntimeError as error:
            try:  # the group says who was lost
                dist.all_reduce(x)
            except RuntimeError as said:
                assert isinstance(said.__cause__, PeerLost), repr(said)
                assert "aborted" in str(said) or "lost" in str(said), str(said)
            else:
                raise AssertionError("a call of an aborted communicator has succeeded") from error
            dist.destroy_process_group()
            continue
        if me < 2:
            dist.all_reduce(x, group=pair)
        dist.destroy_process_group()
        return


def loop() -> None:
    """A resilient loop whose steps use both backends: a killed rank costs it nothing."""
    me, n = start()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = zbmd.torch.resilient(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        if run.steps == 3 and me == 1 and FIRST:
            os.kill(os.getpid(), signal.SIGKILL)
        x = put(torch.full((3,), run.steps + me * 10.0))
        dist.all_reduce(x)
        assert get(x)[0] == n * run.steps + 10 * sum(range(n)), (get(x), run.steps)
        model(torch.full((2, 4), float(get(x)[0]))).mean().backward()
        optimizer.step()

    while run.steps < 6:
        run.call(step)
    total = float(sum(parameter.sum() for parameter in model.parameters()))
    print(f"total {total:.6f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    dist.Backend.register_backend("late", Late, devices=[KIND])
    install(seed=int(os.environ["RANK"]) + 1)
    globals()[sys.argv[1]]()
    print("good", flush=True)


if __name__ == "__main__":
    main()
