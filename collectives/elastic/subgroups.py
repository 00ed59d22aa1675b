"""Sub-groups of an elastic group: what one is made of, and how its members come to make it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

import structlog

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.errors import ActorError, NoReply
from zbmd.actors.rank.member import Worker
from zbmd.actors.rank.once import OncePerWorker
from zbmd.actors.view import MemberId
from zbmd.collectives.communicator.operations import timeout_ns
from zbmd.collectives.device.arrays import taken
from zbmd.collectives.elastic.operations import ElasticOperations, Result
from zbmd.collectives.elastic.views import ElasticViews
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.subgroup_driver import Subgroups
from zbmd.collectives.p2p.elastic import ElasticTagged
from zbmd.collectives.p2p.tagged import Received, TaggedEnd, within
from zbmd.collectives.programs.channels import Agreed
from zbmd.collectives.repair.events import OnLoss
from zbmd.collectives.repair.splits import (
    Split,
    SplitLedger,
    SplitOperation,
    SplitRequest,
    SplitsReply,
    SplitsRequest,
    check_repeated,
    has_ended,
    row_of,
)
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.native._native import now_ns

# The actor `rankN/elastic` tells replacements how the elastic groups of this process were split.

log: Final = structlog.stdlib.get_logger("zbmd.collectives.elastic")

ACTOR_NAME: Final = "elastic"
ANSWERS_MAX: Final = 1024
"""Answers that wait for their group at once: those who ask are ranks of the job."""

Key = tuple[int, int]
"""A group's channel and the base of its stamps, the same on all of its members."""


class Elder(Protocol):
    """A group that replacements ask."""

    async def splits_before(self, sequence: int) -> tuple[Split, ...]:
        """Return how it was split by the operations before that number, once those are over here."""
        ...


class ElasticAsks:
    """The groups of this process that can be asked; used on the worker's loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._groups: dict[Key, Elder] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def add(self, key: Key, group: Elder) -> None:
        """Let replacements ask this group."""
        self._groups[key] = group

    def remove(self, key: Key) -> None:
        """Forget a group that is closed."""
        self._groups.pop(key, None)

    def answer(self, asked: SplitsRequest, later: Deferred) -> None:
        """Answer once the group is where the asker is; with `NoReply` if the group is not here."""
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
        """Return the answers of the older members, by rank; none of one that dies, or has closed the group.

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
    """Answers replacements."""

    captured = False

    def __init__(self, asks: ElasticAsks) -> None:
        self._asks = asks

    @on(SplitsRequest)
    async def asked(self, message: SplitsRequest) -> SplitsReply | DeferredReply:
        """Answer how a group was split."""
        later = self.defer()
        self._asks.answer(message, later)
        return later


async def _make_asks(worker: Worker) -> ElasticAsks:
    made = ElasticAsks(worker)
    await worker.system.spawn(ElasticActor, made, name=ACTOR_NAME)
    return made


_asks: Final = OncePerWorker(_make_asks)


async def open_asks(worker: Worker) -> ElasticAsks:
    """Return the groups of this process that can be asked, with the actor that answers."""
    return await _asks.of(worker)


@dataclass(frozen=True, slots=True)
class ElasticServices:
    """The parts of a process that its elastic groups share."""

    worker: Worker
    views: ElasticViews
    asks: ElasticAsks
    subgroups: Subgroups
    tagged: dict[tuple[int, int], TaggedEnd]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupChannels:
    """A group's channels, the same on all members, and `base` + e, the stamp of epoch e there.

    ranks: those that belong to it; empty: all of the job.
    """

    channel: int
    mend: int
    base: int = 0
    ranks: tuple[int, ...] = ()


class ElasticSubgroups(ElasticOperations[Coroutine[Any, Any, Result]]):
    """An elastic group, as far as it is split into others. See
    `zbmd.collectives.elastic.group.ElasticGroup`."""

    def __init__(self, home: ElasticServices, place: GroupChannels) -> None:
        self._job_rank = home.worker.rank
        self.rank = place.ranks.index(self._job_rank) if place.ranks else self._job_rank
        self._home = home
        self._place = place
        self._ledger = SplitLedger()
        may_be = place.ranks or tuple(range(home.worker.world_size))
        self._tagged = ElasticTagged(home.worker, ranks=may_be, stamp=place.base, channel=place.channel)
        home.tagged[place.base, place.channel] = self._tagged

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Of the view that the group is in."""

    @property
    @abstractmethod
    def _present(self) -> tuple[MemberId, ...]:
        """Its members in that view, in rank order."""

    @abstractmethod
    async def _opened(self, place: GroupChannels, on_close: Callable[[Self], None], timeout: float) -> Self:
        """A sub-group, once this process is in line with its other members."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that belong to a sub-group, there or not, in its order; of a job's group, those there."""
        return self._place.ranks or tuple(member.rank for member in self._present)

    def _member(self, name: str, rank: int) -> int:
        if not 0 <= rank < self._ranks_max:
            raise UserError(f"{name}={rank} is not a rank of this group: expected 0..{self._ranks_max - 1}")
        return self._place.ranks[rank] if self._place.ranks else rank

    def _row_of(self, rank: int) -> int:
        return self._place.ranks.index(rank) if self._place.ranks else rank

    @property
    def _ranks_max(self) -> int:
        return len(self._place.ranks) or self._home.worker.world_size

    async def send(
        self, x: Any, to: int, *, tag: int = 0, timeout: float | None = None, stream: Any = None
    ) -> None:
        """Send a copy of `x` to rank `to` of the group; see `Group.send`. No other rank has to call.

        Messages between those who live are neither lost nor doubled, whoever else dies, and in whichever view
        each is. Raises `MembersLost` if `to` is absent, or is lost before it has taken an array of over 64
        KiB, until an operation or `refresh` has brought the group to a view with its replacement;
        `OperationAborted` if it has closed the group. Neither harms anything.
        """
        given, member = taken(x, stream), self._member("to", to)
        async with within(timeout, f"send to rank {to} with tag {tag}"):
            await self._tagged.send(given, member, tag)

    async def recv(
        self,
        source: int | None = None,
        *,
        tag: int | None = None,
        out: Any = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Received:
        """The first message that came from rank `source` of the group (None: any) with `tag` (None: any).

        See `Group.recv`. Raises `MembersLost` at once when `source` is lost, or absent, and no message of it
        is left. A receive from any rank raises it once for each loss, and may be called again. Messages that
        a rank sent before its end can be taken until the group comes to its next view.
        """
        place, member = taken(out, stream), None if source is None else self._member("source", source)
        async with within(timeout, f"receive from {source} with tag {tag}"):
            got = await self._tagged.receive(member, tag, place)
        return Received(got.array, self._row_of(got.source), got.tag)

    def look(self) -> None:
        """Hear of members that are lost by now; see `zbmd.collectives.elastic.views.Follower`."""
        self._tagged.look()

    async def split(
        self,
        color: int | None,
        *,
        key: int = 0,
        on_loss: str = "wait_for_replacement",
        timeout: float | None = None,
    ) -> Self | None:
        """An elastic group of the ranks that give the same `color`; their order is by key, then rank.

        An operation of this group: all members call it; who gives None gets None. The new group has its own
        operations, and lives on through views as this one does: a death in it concerns its members alone.
        A replacement makes the same calls as the others did, and comes back into the groups that they made;
        then a call waits for nobody but the members of that group. Raises as operations do, `UserError` on
        numbers out of bounds or a color that is not the predecessor's, and `LocalProtocolError` if no
        channels are left.
        """
        return await self._subgroup(SplitRequest(color=color, key=key), on_loss, timeout)

    async def subgroup(
        self,
        ranks: Sequence[int],
        *,
        on_loss: str = "wait_for_replacement",
        timeout: float | None = None,
    ) -> Self | None:
        """The elastic group of these ranks of this one, in this order, there or not; as `split`.

        All members of this group call it, with the same `ranks`; None for those that are not among them.
        """
        chosen = tuple(self._member("rank", rank) for rank in ranks)
        if not chosen or len(set(chosen)) != len(chosen):
            raise UserError(f"ranks={list(ranks)}: expected ranks of this group, each once")
        color = 0 if self._job_rank in chosen else None
        return await self._subgroup(SplitRequest(color=color, ranks=chosen), on_loss, timeout)

    async def _subgroup(self, request: SplitRequest, on_loss: str, timeout: float | None) -> Self | None:
        end_ns = now_ns() + timeout_ns(timeout)
        on_loss_of(on_loss)  # also where the others have made the call, and it runs nothing
        subgroups, ledger = self._home.subgroups, self._ledger
        async with subgroups.turn:  # two agreements at once would offer the same channels
            number, split = ledger.call()
            if split is None:
                offer = subgroups.channels.offer()
                try:
                    row = row_of(request, offer)
                    call = self._start(
                        SplitOperation,
                        row,
                        None,
                        on_loss,
                        "preserve",
                        timeout,
                        request=request,
                        number=number,
                        ledger=ledger,
                    )
                    await call
                except ZbmdError:
                    ledger.called -= 1
                    raise
                split = ledger.splits[number]
            else:
                check_repeated(split, request, self._job_rank)
            ranks = split.ranks_with(self._job_rank)
            if not ranks:
                return None
            epoch = self._home.views.view.epoch
            for channel in (split.channel, split.mend):
                subgroups.channels.take(Agreed(channel=channel, stamp=split.base + epoch))
            place = GroupChannels(channel=split.channel, mend=split.mend, base=split.base, ranks=ranks)
            left_s = max(1e-9, (end_ns - now_ns()) / 1e9)
            opening = self._opened(place, lambda made: self._subgroup_closed(made, split), left_s)
        return await opening

    def _subgroup_closed(self, closed: Self, split: Split) -> None:
        """Its channels are free again once its other members have closed it, too."""
        self._ledger.mark_closed(split)
        worker, others = self._home.worker, [m for m in closed._present if m.rank != self._job_rank]

        def all_have() -> bool:
            return all(has_ended(worker, member, split.channel, split.base) for member in others)

        for channel in (split.channel, split.mend):
            self._home.subgroups.channels.give_back(channel, all_have, last=split.base + closed.epoch)


def on_loss_of(name: str) -> OnLoss:
    """Return the mode of this name. Raises `UserError` if there is none."""
    try:
        return OnLoss(name)
    except ValueError:
        raise UserError(f"on_loss={name!r} is not one of {[mode.value for mode in OnLoss]}") from None
