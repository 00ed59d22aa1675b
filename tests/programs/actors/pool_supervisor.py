"""Supervises two workers that are forks, prints the pid of their template, and waits."""

from __future__ import annotations

import asyncio

from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process_pool.devices import ProcessPool, cpu_cores
from zbmd.actors.system import ActorSystem


async def main() -> None:
    log_to_stderr()
    system = ActorSystem("boss")
    workers = ProcessPool(system, cpu_cores(capacity=2))
    await system.supervise([workers.child("a"), workers.child("b")])
    print(workers.forks.template_pid, flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
