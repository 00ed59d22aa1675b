"""Record how an elastic group was split, so that a replacement learns it from the other members.

A split is an operation of the group: an all-gather of what each member requests and can offer, from which all
compute the same `Split`. It says which members form each sub-group and on which channels, so a process that
joins later and makes the same calls takes its place in the existing sub-groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash

from zbmd.actors.contracts import Contract
from zbmd.actors.rank.member import Worker
from zbmd.actors.view import RANKS_MAX, MemberId
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.native._stepper import COUNTER_MAX
from zbmd.collectives.programs.channels import FAR_SUBGROUPS_MAX, STAMP_MAX, SUBGROUP_CHANNEL_FIRST, Offer
from zbmd.collectives.repair.operations_shared import AllGather, CallContext
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError
from zbmd.transport.native._native import CHANNELS, FAR_CHANNELS, load_cell


class SplitOperation(AllGather):
    """All members exchange their requests; a member that returns has entered the result in `ledger`.

    `x`: this member's request, see `row_of`.
    """

    def __init__(
        self,
        context: CallContext,
        x: Array,
        out: None,
        *,
        request: SplitRequest,
        number: int,
        ledger: SplitLedger,
    ) -> None:
        super().__init__(context, x, out)
        self.call = context.call(f"{request.text} #{number}, {context.on_loss.value}")
        self._request, self._ledger = request, ledger

    def returned(self, contributors: tuple[int, ...]) -> None:
        """See `ElasticOperation`. Raises as `agree_on`, on all members alike."""
        self._ledger.made(agree_on(self._request, self.value, contributors))


def has_ended(worker: Worker, member: MemberId, channel: int, base: int) -> bool:
    """Return whether this member has also closed a sub-group that is closed here, or has ended."""
    peer = worker.peers.get(member.rank)
    if (
        peer is None
        or peer.incarnation != member.incarnation
        or worker.segment.lost_mask() >> member.rank & 1
    ):
        return True
    cell = load_cell(worker.segment.base, member.rank, channel)
    return cell & COUNTER_MAX == COUNTER_MAX and cell >> 32 > base


SPLITS_MAX: Final = 256
"""Splits of one group in its lifetime; later members receive all of them."""
NUMBER_MAX: Final = 2**62 - 1
SUBGROUPS_OF_A_PROCESS_MAX: Final = FAR_SUBGROUPS_MAX // 2
"""Sub-groups of a process: each takes one channel, and one for repairs."""
_ALL_FREE: Final = (1 << FAR_SUBGROUPS_MAX) - 1
_FIXED = 5
"""Numbers of a row before the stamps: whether there is a color, the color, the key, the free channels, and
what tells the given ranks."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Channel = Annotated[int, msgspec.Meta(ge=SUBGROUP_CHANNEL_FIRST, lt=FAR_CHANNELS)]
Number = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
SplitMember = tuple[Rank, Number, Number]


class Split(msgspec.Struct, array_like=True, frozen=True):
    """One split. `places`: rank, color and key of each member of a sub-group.

    `channel`, `mend`: the channels of every sub-group, and of its repairs; `base`: the stamp of epoch e on
    them is base + e. `closed`: whether the sender has closed its sub-group.
    """

    channel: Channel
    mend: Channel
    base: Annotated[int, msgspec.Meta(ge=0, le=STAMP_MAX)]
    places: Annotated[tuple[SplitMember, ...], msgspec.Meta(max_length=RANKS_MAX)]
    closed: bool = False

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of the sub-group of `rank`, by key and then by rank; empty if it is in none."""
        color = next((color for r, color, _ in self.places if r == rank), None)
        if color is None:
            return ()
        return tuple(r for _, r in sorted((key, r) for r, c, key in self.places if c == color))


class SplitsRequest(Contract, id="zbmd.elastic.splits_asked"):
    """Ask how the group on this channel was split by the operations before `sequence`."""

    channel: Annotated[int, msgspec.Meta(ge=0, lt=CHANNELS)]
    base: Annotated[int, msgspec.Meta(ge=0, le=STAMP_MAX)]
    sequence: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class SplitsReply(Contract, id="zbmd.elastic.splits"):
    """All splits of that group, in order."""

    splits: Annotated[tuple[Split, ...], msgspec.Meta(max_length=SPLITS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRequest:
    """A member's request: `color` None for no sub-group. `ranks`: if all members are given explicitly."""

    color: int | None
    key: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Return the text of the call, equal on all members."""
        return f"subgroup({list(self.ranks)})" if self.ranks else "split()"


def row_of(request: SplitRequest, offer: Offer) -> Array:
    """Return a member's request, (5 + FAR_SUBGROUPS_MAX,) int64.

    Raises `UserError` for numbers out of bounds.
    """
    if not all(abs(number) <= NUMBER_MAX for number in (request.color or 0, request.key)):
        raise UserError(f"color={request.color} or key={request.key} is out of bounds")
    free = offer.free & _ALL_FREE
    fixed = (request.color is not None, request.color or 0, request.key, free, _digest(request.ranks))
    return np.array([*fixed, *offer.used[:FAR_SUBGROUPS_MAX]], np.int64)


def _digest(ranks: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(ranks, np.int64).tobytes()) >> 2


def agree_on(request: SplitRequest, rows: Array, contributors: tuple[int, ...]) -> Split:
    """Return the split that all members compute from the rows of these ranks.

    rows: (contributors, 5 + FAR_SUBGROUPS_MAX).

    Raises, on all of them, `Desynchronised` if they gave different ranks for a sub-group, and
    `LocalProtocolError` if they have no two channels free.
    """
    if any(int(row[4]) != int(rows[0][4]) for row in rows):
        raise Desynchronised(
            f"the members gave different ranks, here {list(request.ranks)}, for a sub-group", {}
        )
    free, used = _ALL_FREE, [0] * FAR_SUBGROUPS_MAX
    for row in rows:
        free &= int(row[3])
        used = [max(before, int(stamp)) for before, stamp in zip(used, row[_FIXED:], strict=True)]
    places = [place for place in range(FAR_SUBGROUPS_MAX) if free >> place & 1][:2]
    if len(places) < 2:
        raise LocalProtocolError(
            "no two channels are free on all members of a new sub-group: a process can be in "
            f"{SUBGROUPS_OF_A_PROCESS_MAX} elastic ones at once; close one that is not needed any more"
        )
    belong = [
        (rank, int(row[1]), int(row[2])) for rank, row in zip(contributors, rows, strict=True) if row[0]
    ]
    if request.ranks:  # absent ones too
        belong = [(rank, 0, place) for place, rank in enumerate(request.ranks)]
    return Split(
        channel=SUBGROUP_CHANNEL_FIRST + places[0],
        mend=SUBGROUP_CHANNEL_FIRST + places[1],
        base=max(used[place] for place in places),
        places=tuple(belong),
    )


@dataclass(slots=True)
class SplitLedger:
    """The splits of one group that this process knows, and which of them it has called itself."""

    splits: list[Split] = field(default_factory=list[Split])
    called: int = 0
    unknown: str = ""
    """Why this process does not know how the group was split before it joined."""

    def learn(self, replies: Mapping[int, SplitsReply], rank: int) -> None:
        """Take over what older members report: equal but for what each has closed.

        `replies`: by rank. A sub-group counts as closed if one of its own members has closed it. Raises
        `RemoteProtocolError` if replies contradict each other, or name a rank twice.
        """
        if not replies:
            self.unknown = "nobody is left who knows how the group was split: they have ended, or closed it"
        known: list[Split] = []
        for by, one in replies.items():
            for number, split_there in enumerate(one.splits):
                closed = split_there.closed and by in split_there.ranks_with(rank)
                split = msgspec.structs.replace(split_there, closed=closed)
                if number == len(known):
                    known.append(split)
                before = known[number]
                same = msgspec.structs.replace(before, closed=closed) == split
                if not same or len({place[0] for place in split.places}) < len(split.places):
                    raise RemoteProtocolError(f"split {number} is {before} or, says rank {by}, {split}")
                known[number] = msgspec.structs.replace(split, closed=closed or before.closed)
        self.splits = known

    def call(self) -> tuple[int, Split | None]:
        """Return the number of the next call here, and its split if the other members have already made it.

        Raises `OperationAborted` if that is unknown, `LocalProtocolError` if there are too many.
        """
        if self.unknown:
            raise OperationAborted(self.unknown)
        number, self.called = self.called, self.called + 1
        if number >= SPLITS_MAX:
            raise LocalProtocolError(f"a group is split {SPLITS_MAX} times at most")
        return number, self.splits[number] if number < len(self.splits) else None

    def made(self, split: Split) -> None:
        """Add a split that all members have made."""
        self.splits.append(split)

    def mark_closed(self, split: Split) -> None:
        """Note that this process has closed its sub-group of the split."""
        self.splits = [msgspec.structs.replace(s, closed=True) if s == split else s for s in self.splits]


def check_repeated(split: Split, request: SplitRequest, rank: int) -> None:
    """Check that a call which other members made earlier requests what it gave this rank.

    Raises `UserError` if it does not, or the rank was absent then, and `OperationAborted` if the other
    members have closed the sub-group.
    """
    place: Any = next((place for place in split.places if place[0] == rank), None)
    if place is None and request.color is not None:
        raise UserError(
            f"rank {rank} was missing when the group was split: have all members split it again, or make "
            "sub-groups of given ranks (`subgroup`), which may come later"
        )
    if place is not None and place[1] != request.color:
        raise UserError(
            f"rank {rank} asks for color {request.color}, and had {place[1]} when the group was split"
        )
    if request.ranks and request.ranks != split.ranks_with(rank) and place is not None:
        raise UserError(
            f"rank {rank} asks for {list(request.ranks)}; the others made {list(split.ranks_with(rank))}"
        )
    if split.closed:
        raise OperationAborted("the other members have closed this sub-group")
