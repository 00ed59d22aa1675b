"""A rank with a busy worker below two supervisors; it prints `ready` once the worker was restarted."""

from __future__ import annotations

import asyncio
import contextlib

import zbmd
from zbmd.actors.supervision.supervisor import Supervisor


class Note(zbmd.Contract):
    pass


class Crash(zbmd.Contract):
    pass


class Worker(zbmd.Actor):
    @zbmd.on(Note)
    async def note(self, message: Note) -> None:
        pass

    @zbmd.on(Crash)
    async def crash(self, message: Crash) -> None:
        raise RuntimeError("as told")


async def flood(ref: zbmd.Ref) -> None:
    while True:
        await ref.tell(Note())
        await asyncio.sleep(0)


async def main() -> None:
    async with zbmd.join() as worker:
        children = [zbmd.ChildSpec(name="worker", actor=Worker)]
        inner = zbmd.ChildSpec(name="inner", actor=Supervisor, args=(children,))
        await worker.system.supervise([inner], name="outer")
        ref = worker.system.ref("worker")
        with contextlib.suppress(zbmd.ActorFailed):
            await ref.ask(Crash(), timeout=180)
        while worker.system.find("worker", 0) is None:  # noqa: ASYNC110 (its supervisor starts it again)
            await asyncio.sleep(0)
        flooding = asyncio.create_task(flood(ref))
        group = await zbmd.group(worker)
        await group.barrier()
        print("ready", flush=True)
        await flooding


zbmd.run(main())
