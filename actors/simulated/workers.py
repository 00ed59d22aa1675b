"""The actors of the simulated trees, in all their versions, and what is said to them."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.mailbox import MailboxSpec
from zbmd.actors.core.ref import Ref
from zbmd.actors.directory.events import GroupNews
from zbmd.actors.simulated.stand import Stand, here

LINGER_S: Final = 0.02
ANSWER_S: Final = 0.005
CRASHES: Final = 0.2
UNFIT: Final = 0.3
WAITING_MAX: Final = 1 << 16


class Who(Contract, id="sim.actors.who"):
    """Asks an actor which life it is."""


class Here(Contract, id="sim.actors.here"):
    """The actor's own reference."""

    ref: Ref


class SessionMessage(Contract, id="sim.actors.told"):
    """The `number`-th message of a session. sure: the last of those before that was sent for certain."""

    session: int
    number: int
    sure: int


class Question(Contract, id="sim.actors.question"):
    """A `SessionMessage` that wants an answer."""

    told: SessionMessage


class Answer(Contract, id="sim.actors.answer"):
    """To a `Question`. count: how many messages of its session the actor has handled."""

    number: int
    count: int


class Fresh(Contract, id="sim.actors.fresh"):
    """The `number`-th broadcast of a source."""

    source: int
    number: int


class Fail(Contract, id="sim.actors.fail"):
    """Raise."""


class Leave(Contract, id="sim.actors.leave"):
    """End normally."""


class Failure(Exception):
    """What a worker fails with."""


class Worker(Actor, remote=True, version=1):
    """Remembers what it has handled, and does as it is told."""

    mailbox = MailboxSpec(capacity=WAITING_MAX)

    def __init__(self) -> None:
        self.handled: dict[int, list[int]] = {}

    def memory(self, session: int) -> list[int]:
        """The last number of a session, and how many there were."""
        return self.handled.setdefault(session, [0, 0])

    async def started(self) -> None:
        """Be born, and take a while to start, or none."""
        _, stand = here()
        stand.lives.born(self.ref)
        self.system.watch(self.ref, stand.lives.ended)
        await _linger()

    async def stopping(self, reason: object) -> None:
        """Take a while, or none; longer than it may, now and then."""
        await _linger()

    @on(Who)
    async def who(self, _: Who) -> Here:
        """Say which life this is."""
        return Here(self.ref)

    @on(SessionMessage)
    async def told(self, told: SessionMessage) -> None:
        """Handle a message."""
        self._handle(told)

    @on(Question)
    async def question(self, question: Question) -> Answer:
        """Handle a message, and answer after a while."""
        process, _ = here()
        count = self._handle(question.told)
        if process.rng.random() < 0.3:
            await asyncio.sleep(process.rng.expovariate(1 / ANSWER_S))
        return Answer(question.told.number, count)

    @on(Fresh)
    async def fresh(self, fresh: Fresh) -> None:
        """Hear a broadcast."""
        here()[1].talks.heard_news(self.ref, fresh.source, fresh.number)

    @on(Fail)
    async def fail(self, _: Fail) -> None:
        """Raise."""
        raise Failure("as it was told to")

    @on(Leave)
    async def leave(self, _: Leave) -> None:
        """End normally."""
        self.stop("as it was told to")

    def _handle(self, told: SessionMessage) -> int:
        memory = self.memory(told.session)
        here()[1].talks.handled(self.ref, told.session, told.number, told.sure, memory[0])
        memory[:] = [told.number, memory[1] + 1]
        return memory[1]


class Worker2(Worker, remote=True, version=2):
    """Keeps its memory elsewhere."""

    numbers: dict[int, list[int]]

    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        """See `Actor`."""
        return {"numbers": state["handled"]} if from_version == 1 else state

    @classmethod
    def code_change_back(cls, state: dict[str, Any], to_version: int) -> dict[str, Any]:
        """See `Actor`."""
        return {"handled": state["numbers"]} if to_version == 1 else state

    def __init__(self) -> None:
        self.numbers = {}

    def memory(self, session: int) -> list[int]:
        """See `Worker`."""
        return self.numbers.setdefault(session, [0, 0])


class Worker3(Worker2, remote=True, version=3):
    """Another that is right."""


class Broken(Worker2, remote=True, version=4):
    """Crashes in a message now and then, after it has spoilt what it remembers."""

    def _handle(self, told: SessionMessage) -> int:
        if here()[0].rng.random() < CRASHES:
            self.memory(told.session)[:] = [told.number, -1]
            self.numbers[-1] = [0, 0]
            raise Failure("a bug of the new version")
        return super()._handle(told)


class Unfit(Worker2, remote=True, version=5):
    """Cannot take over what some actors remember."""

    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        """See `Actor`."""
        if here()[0].rng.random() < UNFIT:
            raise Failure("this cannot be taken over")
        return super().code_change(state, from_version)


LATER: Final[dict[type[Actor], tuple[type[Actor], ...]]] = {
    Worker: (Worker2, Worker2, Broken, Broken, Unfit),
    Worker2: (Worker3, Broken),
    Broken: (Worker3,),
    Unfit: (Worker3, Broken),
}
"""What each version may become."""


class Watcher(Actor):
    """Is told of the changes of a group."""

    def __init__(self, stand: Stand, group: str) -> None:
        self._stand, self._group = stand, group

    @on(GroupNews)
    async def news(self, news: GroupNews) -> None:
        """Who has come and gone."""
        life = (self.system.name, self.system.incarnation)
        self._stand.groups.changed(life, self._group, "news", tuple(news.joined), tuple(news.left))


async def _linger() -> None:
    process, _ = here()
    if process.rng.random() < 0.3:
        await asyncio.sleep(process.rng.expovariate(1 / LINGER_S))
