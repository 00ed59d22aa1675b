"""A rank that joins, prints how, and does what its argument names: `joins.py BEHAVIOUR`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from zbmd.actors.core.actor import Actor
from zbmd.actors.rank.member import Worker, join

NEVER = 100
"""An epoch that no run of these tests comes to."""


class Counter(Actor):
    """Does nothing."""


def say(*words: object) -> None:
    print(*words, flush=True)


async def ends(worker: Worker) -> None:
    pass


async def logs(worker: Worker) -> None:
    worker.log.info("all_reduce", step=3, group="world", op="ring", peer=1)


async def loses_rank_1_once(worker: Worker) -> None:
    if worker.incarnation == 1 and worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if worker.epoch == 1:
        view = await worker.view(after=1)
        say("entered", view.epoch, [m.incarnation for m in view.members], worker.peers[1].incarnation)


async def waits_for_epoch_2(worker: Worker) -> None:
    say("pid", os.getpid())
    if worker.epoch == 1:
        await worker.view(after=1)
        say("entered", worker.epoch)


async def loses_rank_2(worker: Worker) -> None:
    if worker.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    view = await worker.view(after=1)
    say("entered", view.epoch, view.ranks, view.lost, sorted(worker.peers))


async def reports_steps(worker: Worker) -> None:
    if worker.epoch == 1:
        say("pid", os.getpid())
        if worker.rank == 0:
            worker.report({"kind": "step", "version": 4, "loss": 2.5, "grad_norm": 0.5})
        await worker.view(after=1)
        if worker.rank == 0:
            worker.report({"kind": "step", "version": 5, "loss": 2.25, "steps_total": 9})


async def loses_rank_1_always(worker: Worker) -> None:
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        await worker.view(after=worker.epoch)


async def raises_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        raise RuntimeError("the reason")
    await worker.view(after=NEVER)


async def waits(worker: Worker) -> None:
    say("address", os.environ["ZBMD_NODE"])
    say("template", os.getppid())
    await worker.view(after=NEVER)


async def ignores_sigterm(worker: Worker) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, say, "SIGTERM ignored")
    say("ready")
    await worker.view(after=NEVER)


async def takes_signals(worker: Worker) -> None:
    """SIGUSR2 is counted, and the third one is the last."""
    heard: asyncio.Queue[int] = asyncio.Queue()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, heard.put_nowait, 0)
    say("ready")
    for count in (1, 2, 3):
        await heard.get()
        say("SIGUSR2", count)


async def takes_sigquit(worker: Worker) -> None:
    """SIGQUIT and SIGCONT end it in this order."""
    for number in (signal.SIGQUIT, signal.SIGCONT):
        came = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(number, came.set)
        say("ready for", number.name)
        await came.wait()


async def has_an_actor(worker: Worker) -> None:
    await worker.system.spawn(Counter, name="counter")
    say("ready", os.environ["ZBMD_NODE"], os.getpid())
    await worker.view(after=NEVER)


async def prints_deadlines(worker: Worker) -> None:
    say("deadlines", worker.deadlines.recovery_budget_ns, worker.deadlines.suspicion_ns)


async def main(behave: Callable[[Worker], Awaitable[None]]) -> None:
    async with join() as worker:
        say("joined", worker.incarnation, "epoch", worker.epoch, "with", *sorted(worker.peers))
        await behave(worker)


asyncio.run(main(globals()[sys.argv[1]]))
