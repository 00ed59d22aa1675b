"""`rankN/elastic`: tells those who come later how the elastic groups of this process were split."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol
from weakref import WeakKeyDictionary

import structlog

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.deferred import Deferred, DeferredReply
from zbmd.actors.errors import ActorError, NoReply
from zbmd.actors.rank.member import Worker
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.repair.splits import Split, SplitsReply, SplitsRequest
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.collectives.elastic")

ACTOR_NAME: Final = "elastic"
ANSWERS_MAX: Final = 1024
"""Owed at once: those who come are ranks of the job."""

Key = tuple[int, int]
"""A group's channel and the base of its stamps, the same on all of its members."""


class Elder(Protocol):
    """A group that those who come later ask."""

    async def splits_before(self, sequence: int) -> tuple[Split, ...]:
        """How it was split by the operations before that number, once those are over here."""
        ...


class ElasticAsks:
    """The groups of this process that can be asked; used on the worker's loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._groups: dict[Key, Elder] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def add(self, key: Key, group: Elder) -> None:
        """From now on it can be asked."""
        self._groups[key] = group

    def remove(self, key: Key) -> None:
        """It is closed."""
        self._groups.pop(key, None)

    def answer(self, asked: SplitsRequest, later: Deferred) -> None:
        """Answer once the group is where the asker is; a group that is not here is told of by `NoReply`."""
        group = self._groups.get((asked.channel, asked.base))
        if group is None or len(self._answers) >= ANSWERS_MAX:
            later.fail(NoReply(f"no elastic group on channel {asked.channel} can tell how it was split"))
            return
        task = asyncio.ensure_future(self._answer(group, asked.sequence, later))
        self._answers.add(task)
        task.add_done_callback(self._answers.discard)

    async def _answer(self, group: Elder, sequence: int, later: Deferred) -> None:
        try:
            later.reply(SplitsReply(splits=await group.splits_before(sequence)))
        except OperationAborted as error:
            later.fail(NoReply(str(error)))

    async def ask(
        self, key: Key, sequence: int, elders: tuple[int, ...], end_ns: int
    ) -> dict[int, SplitsReply]:
        """What the elders say, by rank; of those who die meanwhile, or have closed the group, nothing.

        Raises `DeadlineExceeded` once the time is up.
        """
        message = SplitsRequest(channel=key[0], base=key[1], sequence=sequence)
        answers = await asyncio.gather(*(self._ask(rank, message, end_ns) for rank in elders))
        return {rank: answer for rank, answer in zip(elders, answers, strict=True) if answer is not None}

    async def _ask(self, rank: int, message: SplitsRequest, end_ns: int) -> SplitsReply | None:
        left_s = (end_ns - now_ns()) / 1e9
        if left_s <= 0:
            raise DeadlineExceeded(f"rank {rank} was not asked in time how the group was split")
        ref = self._worker.system.ref(f"rank{rank}/{ACTOR_NAME}")
        try:
            return await ref.ask(message, reply=SplitsReply, timeout=left_s)
        except (PeerLost, LinkClosed, ActorError) as error:
            log.info("an elder says nothing", rank=rank, reason=str(error))
            return None


class ElasticActor(Actor):
    """Hears those who come later."""

    captured = False

    def __init__(self, asks: ElasticAsks) -> None:
        self._asks = asks

    @on(SplitsRequest)
    async def asked(self, message: SplitsRequest) -> SplitsReply | DeferredReply:
        """How was a group split?"""
        later = self.defer()
        self._asks.answer(message, later)
        return later


_asks: WeakKeyDictionary[Worker, ElasticAsks] = WeakKeyDictionary()


async def open_asks(worker: Worker) -> ElasticAsks:
    """Those of this process."""
    known = _asks.get(worker)
    if known is None:
        known = _asks[worker] = ElasticAsks(worker)
        await worker.system.spawn(ElasticActor, known, name=ACTOR_NAME)
    return known
