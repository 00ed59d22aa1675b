"""Small asynchronous calls of two ranks. Argument: "calls", or "killed" to have rank 1 killed in one."""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta

from programs.torch.backend.common import begin, dist, fails, functional, torch

me, _ = begin(timeout=timedelta(minutes=5))
world = dist.group.WORLD
path = world.made.communicator.fast_path


def reduced(value, async_op=True):
    x = torch.full((4,), float(value))
    return x, dist.all_reduce(x, async_op=async_op)


def let_go():
    dist.send(torch.ones(1), 1 - me)


def wait_to_go():
    dist.recv(torch.ones(1), 1 - me)


reduced(1, async_op=False)  # one that has been made before is repeated

if sys.argv[1] == "killed":
    if me == 0:
        x, work = reduced(1)
        assert path.flies
        let_go()
        fails(work.wait, "peer rank1 lost", "all_reduce(float32[4], SUM) #2 of default_pg")
        assert not path.flies
        print("good")
    else:
        wait_to_go()
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()

# No thread but the caller's has a part in what is waited for.
submit, taken = world.made.submit, path.taken
world.made.submit = lambda *_, **__: 1 / 0
for k in range(100):
    x, work = reduced(k)
    assert work.wait() and (x == 2 * k).all() and work.is_success() and work.result()[0] is x
    x = functional.all_reduce(torch.full((4,), float(k)), "sum", world)
    assert (functional.wait_tensor(x) == 2 * k).all()
assert path.taken == taken + 200
world.made.submit = submit

# So do those that FSDP, tensor parallelism and samplers make.
x, rows, out, part = torch.empty(3), torch.empty(2, 3), torch.empty(6), torch.empty(3)
KINDS = {
    "broadcast": lambda now: dist.broadcast(x, 1, async_op=now),
    "all_gather_into_tensor": lambda now: dist.all_gather_into_tensor(out, x, async_op=now),
    "reduce_scatter_tensor": lambda now: dist.reduce_scatter_tensor(part, rows.flatten(), async_op=now),
}
for name, call in KINDS.items():
    call(False)  # known from now on
    world.made.submit, taken = (lambda *_, **__: 1 / 0), path.taken
    for k in range(50):
        x.fill_(10 * k + me)
        out.fill_(-1)
        part.fill_(-1)
        rows.copy_(torch.arange(6.0).reshape(2, 3) + k + me)
        work = call(True)
        assert work.wait() and work.is_success() and len(work.result()) == 1
        if name == "broadcast":
            assert (x == 10 * k + 1).all()
        elif name == "all_gather_into_tensor":
            assert (out == 10 * k + torch.tensor([0.0, 0, 0, 1, 1, 1])).all()
        else:
            assert (part == 2 * torch.arange(6.0).reshape(2, 3)[me] + 2 * k + 1).all()
    assert path.taken == taken + 50, name
    world.made.submit = submit

if me == 0:
    # The other one has not come: the call flies, and that rank needs nothing more of this one.
    x, work = reduced(1)
    assert path.flies and not work.is_completed() and not work.is_success() and work.exception() is None
    let_go()
    wait_to_go()  # it has the result
    while not work.is_completed():
        pass
    assert not path.flies and (x == 2).all()

    # What comes next ends it, on its own thread.
    pairs = [reduced(k) for k in range(5)]
    y = torch.ones(3)
    other = dist.broadcast(y, 1, async_op=True)
    z = torch.ones(1 << 16)
    large = dist.all_reduce(z, async_op=True)
    let_go()
    large.wait()
    assert (z == 2).all() and (y == 7).all()
    assert all((x == 2 * k).all() for k, (x, _) in enumerate(pairs))

    # Futures, and a wait with a limit, are for another thread.
    x, work = reduced(3)
    future = work.get_future().then(lambda done: done.value()[0] * 10)
    let_go()
    assert (future.wait() == 60).all()
    x, work = reduced(3)
    fails(lambda: work.wait(timedelta(milliseconds=1)), "not done after")
    let_go()
    work.wait()
    assert (x == 6).all()
    x, work = reduced(4)
    let_go()
    reduced(5, async_op=False)
    assert work.is_completed() and (x == 8).all()
else:
    wait_to_go()
    x, _ = reduced(1, async_op=False)
    assert (x == 2).all()
    let_go()
    wait_to_go()
    for k in range(5):
        reduced(k, async_op=False)
    dist.broadcast(torch.full((3,), 7.0), 1)
    dist.all_reduce(torch.ones(1 << 16))
    for value in (3, 3):
        wait_to_go()
        reduced(value, async_op=False)
    wait_to_go()
    reduced(4, async_op=False)
    reduced(5, async_op=False)

# Calls that differ: the error is of the one that does, whichever call ends it.
if me == 0:
    x, work = reduced(1)
    let_go()
    fails(lambda: dist.broadcast(torch.ones(2), 0), "Aborted", "all_reduce(float32[4], SUM) on rank 0")
    fails(work.wait, "Desynchronised", "all_reduce(float32[4], SUM) on rank 0", "(float32[5], SUM) on rank 1")
    assert isinstance(work.exception(), dist.DistBackendError) and not work.is_success()
else:
    wait_to_go()
    fails(lambda: dist.all_reduce(torch.ones(5)), "Desynchronised", "all_reduce(float32[4], SUM) on rank 0")
dist.destroy_process_group()

# A group that is destroyed, and a script that ends, with a call that nobody has waited for.
dist.init_process_group("zbmd")
world = dist.group.WORLD
path = world.made.communicator.fast_path
reduced(1, async_op=False)
pair = dist.new_group()
if me == 0:
    x, work = reduced(1)
    assert path.flies
    dist.destroy_process_group(pair)
    kept = reduced(2)
    let_go()
    dist.destroy_process_group()
    assert work.is_completed() and not path.flies
else:
    wait_to_go()
print("good")
