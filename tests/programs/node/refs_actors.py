"""Actors that reach each other across a cluster: nodes, ranks and scripts spawn a `caller`."""

from __future__ import annotations

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.actors.core.ref import Down, Exited, Ref
from zbmd.actors.system import Actor, ActorSystem


class Where(Contract, id="refs.where"):
    pass


class Here(Contract, id="refs.here"):
    process: str
    me: Ref


class Call(Contract, id="refs.call"):
    """Makes the receiver ask the actor `ref`, monitor it and link to it."""

    ref: Ref


class Called(Contract, id="refs.called"):
    process: str
    me: Ref


class Note(Contract, id="refs.note"):
    text: str


class Heard(Contract, id="refs.heard"):
    """Asks for all that the actor has received so far."""


class Notes(Contract, id="refs.notes"):
    texts: list[str]


class Caller(Actor, remote=True):
    trap_exit = True

    def __init__(self) -> None:
        self.texts = list[str]()

    @on(Where)
    async def where(self, _: Where) -> Here:
        return Here(self.system.name, self.ref)

    @on(Call)
    async def call(self, message: Call) -> Called:
        there = await message.ref.ask(Where(), reply=Here, timeout=20)
        await message.ref.tell(Note(f"from {self.system.name}"))
        self.monitor(message.ref)
        self.link(message.ref)
        return Called(there.process, self.ref)

    @on(Note)
    async def note(self, message: Note) -> None:
        self.texts.append(message.text)

    @on(Down)
    async def down(self, down: Down) -> None:
        self.texts.append(f"down {down.ref.process} {down.reason.kind.value}")

    @on(Exited)
    async def exited(self, exited: Exited) -> None:
        self.texts.append(f"exited {exited.ref.process} {exited.reason.kind.value}")

    @on(Heard)
    async def heard(self, _: Heard) -> Notes:
        return Notes(self.texts)


async def start(system: ActorSystem) -> None:
    await system.spawn(Caller, name="caller")
