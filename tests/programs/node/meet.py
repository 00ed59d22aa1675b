"""A rank that asks all processes of its run and finds the ranks by name and group."""

from __future__ import annotations

from programs.node.greeter import Greeter, Here, Where
from support.processes.polling import pause, until, until_done

import zbmd
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, InsideReply, InsideRequest


async def main() -> None:
    ranks = ["rank0", "rank1"]
    async with zbmd.join() as worker:
        system = worker.system
        me = await system.spawn(Greeter, name="greeter")
        await system.register(f"greeter-{worker.rank}", me)
        group = await system.group("greeters")
        await group.join(me)
        await until(lambda: len(group.members) == 2)
        while len(found := await system.processes()) < 4:  # both nodes, both ranks
            await pause()
        for process, _, _ in found:
            inside = system.ref(f"{process}/{INSIDE_ACTOR}")
            request = InsideRequest(process.partition("@")[0], True)
            assert (await inside.ask(request, reply=InsideReply, timeout=20)).process
        by_name = [await system.whereis(f"greeter-{rank}") for rank in (0, 1)]
        by_group = sorted(group.members, key=lambda ref: ref.process)
        for refs in (by_name, by_group):
            found_refs = [ref for ref in refs if ref is not None]
            assert [(await ref.ask(Where(), reply=Here, timeout=20)).process for ref in found_refs] == ranks
        met = f"{len(found)} processes by address, and rank0 and rank1 by name and group"
        print(f"rank{worker.rank} has met {met}", flush=True)
        await until_done()


zbmd.run(main())
