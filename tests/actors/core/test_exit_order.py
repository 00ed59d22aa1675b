"""Exit signals go out in the order in which the links were made, whatever Python's string hashes are."""

from __future__ import annotations

import asyncio

from support.processes.hash_seeds import printed_under_hash_seeds

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Exited
from zbmd.actors.system import ActorSystem
from zbmd.transport.sim import SimLoop

ACTORS = 12


class Hub(Actor):
    """Others are tied to it."""


class Tied(Actor):
    """Notes when it hears of the end of the hub."""

    trap_exit = True

    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    @on(Exited)
    async def exited(self, _: Exited) -> None:
        self.heard.append(self.ref.actor)


def exit_order() -> list[str]:
    """The names of the actors, in the order in which they heard."""

    async def main() -> list[str]:
        system = ActorSystem("rank0")
        heard: list[str] = []
        hub = await system.spawn(Hub, name="hub")
        for number in range(ACTORS):
            tied = await system.spawn(Tied, heard, name=f"tied{number}")
            system.link(tied, hub)
        await system.terminate(hub)
        await system.stop()
        return heard

    with asyncio.Runner(loop_factory=lambda: SimLoop(seed=1)) as runner:
        return runner.run(main())


def test_exit_signals_go_out_in_the_order_of_the_links() -> None:
    wanted = [f"tied{number}" for number in range(ACTORS)]
    assert exit_order() == wanted
    assert printed_under_hash_seeds(__file__, "exit_order()") == {f"{wanted}\n"}
