"""A kill of the demo that comes when its rank has ended; prints how many kills there were, and goes on."""

from __future__ import annotations

import asyncio

from zbmd.actors.cluster.jobs.reports import RankInfo, RankReport
from zbmd.actors.view import RankState
from zbmd.tools.cli.console import Console
from zbmd.tools.demo.command import KillPlan, Watch


async def main() -> None:
    async with Console(live=False) as console:
        plans = (KillPlan(rank=0, step=2, fraction=0.0),)
        watch = Watch(console, steps=2, tokens_per_step=1, flops_per_step=1.0, plans=plans)
        watch.ranks = lambda: {0: RankInfo(rank=0, incarnation=1, pid=0, state=RankState.FINISHED)}
        for version in (1, 2):
            step = {"version": version, "at_ns": version, "loss": 1.0, "epoch": 1, "grad_norm": 1.0}
            await watch(RankReport(rank=0, incarnation=1, payload={"kind": "step", **step}))
        called = asyncio.Event()
        asyncio.get_running_loop().call_later(0.0, called.set)  # later than the kill
        await called.wait()
        print(len(watch.kills), "kills", flush=True)


asyncio.run(main())
