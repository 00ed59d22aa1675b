"""A rank that upgrades an actor class twice, and the replacement of another."""

from __future__ import annotations

import zbmd
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on


class Version(Contract, id="joiner.version"):
    pass


class Runs(Contract, id="joiner.runs"):
    version: int
    handled: int


class Speaker(Actor, remote=True):
    handled = 0

    @on(Version)
    async def say(self, _: Version) -> Runs:
        self.handled += 1
        return Runs(self.version, self.handled)


class Speaker2(Speaker, remote=True, version=2):
    pass


class Speaker3(Speaker2, remote=True, version=3):
    pass


async def main() -> None:
    async with zbmd.join(enter=False) as worker:
        early = await worker.system.spawn(Speaker, name="early")
        await worker.view(after=0)
        late = await worker.system.spawn(Speaker, name="late")
        if worker.incarnation > 1:
            first = [await ref.ask(Version(), reply=Runs, timeout=10) for ref in (early, late)]
            worker.report({"versions": [found.version for found in first]})
            return
        if worker.rank == 0:
            await worker.upgrade(Speaker, Speaker2, probation_s=0.01)
            await worker.upgrade(Speaker2, Speaker3, probation_s=0.01)
            worker.report({"changed": True})
        await worker.view(after=worker.epoch)


zbmd.run(main())
