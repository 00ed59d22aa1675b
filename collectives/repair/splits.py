"""How an elastic group was split: what its members agreed on, which a replacement is told by those who know.

A split is an operation of the group: an all-gather of what each member asks for and can offer, of which all
compute the same `Split`. It says who belongs to which part and on which channels, so a process that comes
later, and makes the same calls as the others did, takes its place in the parts that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import xxhash

from zbmd.actors.contracts import Contract
from zbmd.actors.view import RANKS_MAX
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.programs.channels import STAMP_MAX, SUBGROUP_CHANNEL_FIRST, SUBGROUPS_MAX, Offer
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError
from zbmd.transport.native._native import CHANNELS

SPLITS_MAX: Final = 256
"""Of one group, in its life: those who come later are told of all of them."""
NUMBER_MAX: Final = 2**62 - 1
PARTS_OF_A_PROCESS_MAX: Final = SUBGROUPS_MAX // 2
"""Each takes a channel, and one for repairs."""
_FIXED = 5
"""Numbers of a row before the stamps: whether there is a color, the color, the key, the free channels, and
what tells the given ranks."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Channel = Annotated[int, msgspec.Meta(ge=SUBGROUP_CHANNEL_FIRST, lt=CHANNELS)]
Number = Annotated[int, msgspec.Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
Place = tuple[Rank, Number, Number]


class Split(msgspec.Struct, array_like=True, frozen=True):
    """One split. `places`: rank, color and key of each that belongs to a part.

    channel, mend: the channels of every part, and of its repairs; base: the stamp of epoch e on them is
    base + e. closed: whether who tells of it has closed its part.
    """

    channel: Channel
    mend: Channel
    base: Annotated[int, msgspec.Meta(ge=0, le=STAMP_MAX)]
    places: Annotated[tuple[Place, ...], msgspec.Meta(max_length=RANKS_MAX)]
    closed: bool = False

    def part_of(self, rank: int) -> tuple[int, ...]:
        """The ranks of the part that `rank` belongs to, by key and then by rank; empty if it is in none."""
        color = next((color for r, color, _ in self.places if r == rank), None)
        if color is None:
            return ()
        return tuple(r for _, r in sorted((key, r) for r, c, key in self.places if c == color))


class SplitsAsked(Contract, id="zbmd.elastic.splits_asked"):
    """How has the group on this channel been split by the operations before `sequence`?"""

    channel: Annotated[int, msgspec.Meta(ge=0, lt=CHANNELS)]
    base: Annotated[int, msgspec.Meta(ge=0, le=STAMP_MAX)]
    sequence: Annotated[int, msgspec.Meta(ge=1, le=NUMBER_MAX)]


class SplitsTold(Contract, id="zbmd.elastic.splits"):
    """All splits of that group, in their order."""

    splits: Annotated[tuple[Split, ...], msgspec.Meta(max_length=SPLITS_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a member asks for: `color` None for no part of its own. ranks: if all who belong are given."""

    color: int | None
    key: int = 0
    ranks: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """As the call tells it, the same on all members."""
        return f"subgroup({list(self.ranks)})" if self.ranks else "split()"


def row_of(wish: Wish, offer: Offer) -> Array:
    """What a member says, (5 + SUBGROUPS_MAX,) int64. Raises `UserError` on numbers out of bounds."""
    if not all(abs(number) <= NUMBER_MAX for number in (wish.color or 0, wish.key)):
        raise UserError(f"color={wish.color} or key={wish.key} is out of bounds")
    fixed = (wish.color is not None, wish.color or 0, wish.key, offer.free, _digest(wish.ranks))
    return np.array([*fixed, *offer.used], np.int64)


def _digest(ranks: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(np.array(ranks, np.int64).tobytes()) >> 2


def agree_on(wish: Wish, rows: Array, contributors: tuple[int, ...]) -> Split:
    """What all members make of the rows, (contributors, 5 + SUBGROUPS_MAX), of these ranks.

    Raises on all of them `Desynchronised` if they gave different ranks for a sub-group, and
    `LocalProtocolError` if they have no two channels free.
    """
    if any(int(row[4]) != int(rows[0][4]) for row in rows):
        raise Desynchronised(
            f"the members gave different ranks, here {list(wish.ranks)}, for a sub-group", {}
        )
    free, used = (1 << SUBGROUPS_MAX) - 1, [0] * SUBGROUPS_MAX
    for row in rows:
        free &= int(row[3])
        used = [max(before, int(stamp)) for before, stamp in zip(used, row[_FIXED:], strict=True)]
    places = [place for place in range(SUBGROUPS_MAX) if free >> place & 1][:2]
    if len(places) < 2:
        raise LocalProtocolError(
            "no two channels are free on all members of a new sub-group: a process can be in "
            f"{PARTS_OF_A_PROCESS_MAX} elastic ones at once; close one that is not needed any more"
        )
    belong = [
        (rank, int(row[1]), int(row[2])) for rank, row in zip(contributors, rows, strict=True) if row[0]
    ]
    if wish.ranks:  # also those who are not there
        belong = [(rank, 0, place) for place, rank in enumerate(wish.ranks)]
    return Split(
        channel=SUBGROUP_CHANNEL_FIRST + places[0],
        mend=SUBGROUP_CHANNEL_FIRST + places[1],
        base=max(used[place] for place in places),
        places=tuple(belong),
    )


@dataclass(slots=True)
class SplitLedger:
    """The splits of one group as one process knows them, and which of them it has called itself."""

    splits: list[Split] = field(default_factory=list[Split])
    called: int = 0
    unknown: str = ""
    """Why this process does not know how the group was split before it came."""

    def learn(self, told: Mapping[int, SplitsTold], rank: int) -> None:
        """Take over what elder members say: the same but for what they have closed.

        told: by their ranks. A part counts as closed if one of its own members has closed it.
        Raises `RemoteProtocolError` if they contradict each other, or name a rank twice.
        """
        if not told:
            self.unknown = "nobody is left who knows how the group was split: they have ended, or closed it"
        known: list[Split] = []
        for by, one in told.items():
            for number, said in enumerate(one.splits):
                closed = said.closed and by in said.part_of(rank)
                split = msgspec.structs.replace(said, closed=closed)
                if number == len(known):
                    known.append(split)
                before = known[number]
                same = msgspec.structs.replace(before, closed=closed) == split
                if not same or len({place[0] for place in split.places}) < len(split.places):
                    raise RemoteProtocolError(f"split {number} is {before} or, says rank {by}, {split}")
                known[number] = msgspec.structs.replace(split, closed=closed or before.closed)
        self.splits = known

    def call(self) -> tuple[int, Split | None]:
        """The number of the next call here, and the split that it is if the others have made it already.

        Raises `OperationAborted` if that is not known, `LocalProtocolError` if there are too many.
        """
        if self.unknown:
            raise OperationAborted(self.unknown)
        number, self.called = self.called, self.called + 1
        if number >= SPLITS_MAX:
            raise LocalProtocolError(f"a group is split {SPLITS_MAX} times at most")
        return number, self.splits[number] if number < len(self.splits) else None

    def made(self, split: Split) -> None:
        """All members have made one more."""
        self.splits.append(split)

    def mark_closed(self, split: Split) -> None:
        """This process has closed its part of it."""
        self.splits = [msgspec.structs.replace(s, closed=True) if s == split else s for s in self.splits]


def check_repeated(split: Split, wish: Wish, rank: int) -> None:
    """Whether a call that the others made earlier asks for what it gave this rank.

    Raises `UserError` if it does not, or the rank was not there, and `OperationAborted` if the others have
    closed the part.
    """
    place: Any = next((place for place in split.places if place[0] == rank), None)
    if place is None and wish.color is not None:
        raise UserError(
            f"rank {rank} was not there when the group was split: have all members split it again, or make "
            "sub-groups of given ranks (`subgroup`), which may come later"
        )
    if place is not None and place[1] != wish.color:
        raise UserError(
            f"rank {rank} asks for color {wish.color}, and had {place[1]} when the group was split"
        )
    if wish.ranks and wish.ranks != split.part_of(rank) and place is not None:
        raise UserError(
            f"rank {rank} asks for {list(wish.ranks)}; the others made {list(split.part_of(rank))}"
        )
    if split.closed:
        raise OperationAborted("the other members have closed this sub-group")
