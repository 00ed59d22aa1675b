"""The division of a sharded state among ranks, and the next one for another number of them.

Part p of a division of n has the rows of each parameter that `fully_shard` gives rank p of n. Each rank holds
its own part and a copy of its ward's, the rank before. So all parts are there if no rank is lost together
with the next one, and the ranks of the next division put theirs together from them.

In a hybrid mesh there are `distinct` parts, and rank p has part p modulo `distinct`, as `fully_shard` deals
them. A number of ranks that is no whole number of replicas leaves some over: they give what they have, and
get no part. They are the last ones, and wait for others to complete a replica with.

A division is made in two phases, as a step is: each rank receives its part while it keeps the old one; all
agree that all have done so; each adopts its part. A rank that has not seen the agreement adopts when it meets
another one that has. Imports nothing of PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from zbmd.collectives.algorithms.shard_tree import whole_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The part of rank `place` of `size`. number: of the division; a later one has a higher number.

    distinct: the number of parts after which they repeat, in a hybrid mesh; 0: none is another's.
    """

    number: int
    size: int
    place: int
    distinct: int = 0

    @property
    def is_left_over(self) -> bool:
        """Whether it has no part."""
        return self.place >= self.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Part `place` of `size` of the state of `version`, in memory that outlives its rank.

    A state that all ranks have alike is part 0 of 1. keeps: whether a copy of the ward's part is beside it.
    launch: when the job was launched that has written it; parts of two launches are of no common state.
    reach: the last version of the shard that this leads to: later transactions have not changed it, or the
    gradients of the next update are kept, too; -1: it leads to none.
    """

    version: int
    place: int = 0
    size: int = 1
    keeps: bool = False
    launch: int = 0
    reach: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A rank's account of itself when all meet.

    version: of its state; of a fresh rank that of what it has received, if `ready` is something.
    keeps: whether it has a copy of its ward's part. division: its part of a sharded state; None: it has none.
    ready: a part that it has received, of a division of which it does not know whether all agree.
    held: what memory holds for a fresh rank. outlives: whether memory has the rank's part for the one that
    replaces it, so that no buddy needs a copy.
    """

    version: int
    voted: bool
    fresh: bool
    keeps: bool = False
    division: Division | None = None
    ready: Division | None = None
    held: tuple[Held, ...] = ()
    outlives: bool = False


class What(Enum):
    """A part of a sharded state that goes from one rank to another."""

    REST = "rest"
    """All that is not sharded."""
    SHARD = "shard"
    """Of the receiver, from its buddy, or from that of a rank with the same shard."""
    REPLICA = "replica"
    """As `SHARD`, from a rank whose own shard is the same, since both are in one group of replicas."""
    COPY = "copy"
    """Of the sender's shard, to its buddy, which keeps it."""
    LEFT = "left"
    """As `SHARD`, from the memory that the rank before has left: source and target are one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Send this of the state of `version` from `source` to `target`, of which this rank is one."""

    version: int
    what: What
    source: int
    target: int


class Holder(NamedTuple):
    """The rank that a part of the old division is read from. copy: it is its ward's."""

    rank: int
    copy: bool


class Piece(NamedTuple):
    """Rows [begin, stop) of a parameter, in part `part` of the old division, for window `window` of a rank.

    The windows of a rank are its own part of the new division, and its ward's.
    """

    part: int
    window: int
    begin: int
    stop: int


def buddy_of(place: int, size: int) -> int:
    """Return who keeps a copy of a rank's shard: the next one."""
    return (place + 1) % size


def ward_of(place: int, size: int) -> int:
    """Return whose shard a rank keeps a copy of: that of the one before."""
    return (place - 1) % size


def keeps_ward(nodes: Sequence[int], place: int) -> bool:
    """Return whether memory is to hold the copy of the ward's part, beside the own one.

    nodes: of each rank. It is of use once a node's memory is lost, if that had no other part: the ward is
    alone on a node, and that is another one.
    """
    ward = nodes[ward_of(place, len(nodes))]
    return ward != nodes[place] and nodes.count(ward) == 1


def ranks_of_replica(place: int, size: int, distinct: int) -> range:
    """Return the ranks of a hybrid mesh of `size` that have a whole state together, with that of a place."""
    first = whole_of(place, distinct)
    return range(first, min(size, first + distinct))


def ranks_of_part(place: int, size: int, distinct: int) -> range:
    """Return the ranks of a hybrid mesh of `size` that have the same part as that of a place."""
    return range(place % distinct, size, distinct)


def rows_of(rows: int, size: int, place: int) -> tuple[int, int]:
    """Return the rows [begin, stop) that `fully_shard` gives rank `place` of `size`: see `torch.chunk`."""
    chunk = -(-rows // size)
    return min(rows, place * chunk), min(rows, (place + 1) * chunk)


def windows_of(rows: int, size: int, place: int, distinct: int = 0) -> list[tuple[int, int]]:
    """Return the rows that a rank holds: of its own part, and of its ward's, if it has them."""
    if place >= size:
        return []
    places, parts = [place] if size == 1 else [place, ward_of(place, size)], distinct or size
    return [rows_of(rows, parts, each % parts) for each in places]


def pieces_of(rows: int, parts: int, windows: Sequence[tuple[int, int]]) -> list[Piece]:
    """Return what windows consist of, in order. parts: their number in the old division."""
    found = []
    for window, (begin, stop) in enumerate(windows):
        for part in range(parts):
            first, last = rows_of(rows, parts, part)
            if max(begin, first) < min(stop, last):
                found.append(Piece(part, window, max(begin, first), min(stop, last)))
    return found


def settled(reports: Sequence[Report]) -> list[Report]:
    """Return the reports of ranks that have adopted the newest division of which all have their part.

    One that some rank has adopted is such a division: it has seen that all had received theirs.
    """
    held = [
        {each.number for each in (report.division, report.ready) if each is not None} for report in reports
    ]
    common = set[int].intersection(*filter(None, held)) if any(held) else set()
    number = max(common, default=-1)
    found = []
    for each in reports:
        adopts = each.ready is not None and each.ready.number == number and each.division != each.ready
        waits = adopts and each.ready is not None and each.ready.is_left_over
        found.append(
            Report(
                version=each.version,
                voted=each.voted and not waits,
                fresh=waits or (each.fresh and not adopts),
                keeps=not waits and (each.keeps or adopts),
                division=None if waits else each.ready if adopts else each.division,
                held=() if adopts else each.held,
                outlives=each.outlives and not adopts,
            )
        )
    return found


def is_divided(reports: Sequence[Report], distinct: int = 0) -> bool:
    """Return whether all ranks that have a part have that of their place among these."""
    parts = {at: each.division for at, each in enumerate(reports) if each.division is not None}
    size = whole_of(len(reports), distinct)
    return all((part.place, part.size) == (at, size) for at, part in parts.items())


def apart_in_words(reports: Sequence[Report], target: int) -> str:
    """Return which rank no rule brings to the version `target`; "": there is none."""
    for place, each in enumerate(reports):
        if each.fresh or each.version == target or (each.version == target - 1 and each.voted):
            continue
        voted = "" if each.voted else ", has not voted"
        return f"rank {place} is at version {each.version}{voted}; others at {target}"
    return ""


def next_number(reports: Sequence[Report]) -> int:
    """Return the number of the next division."""
    made = [each for report in reports for each in (report.division, report.ready) if each is not None]
    return max((each.number for each in made), default=-1) + 1


def holders_of(reports: Sequence[Report], distinct: int = 0) -> list[Holder | None]:
    """Return where each part of the division is; None: nobody has it. reports: `settled`.

    distinct: the number of parts after which they repeat, in a hybrid mesh; 0: none is another's.
    """
    parts = [(at, each.division, each.keeps) for at, each in enumerate(reports) if each.division is not None]
    size = parts[0][1].size
    found: list[Holder | None] = [None] * size
    for at, part, keeps in parts:
        if keeps and size > 1 and found[ward_of(part.place, size)] is None:
            found[ward_of(part.place, size)] = Holder(at, True)
    for at, part, _ in parts:
        found[part.place] = Holder(at, False)
    for place in [place for place, holder in enumerate(found) if holder is None and distinct]:
        held = [each for each in enumerate(found) if each[1] is not None]
        found[place] = next((holder for other, holder in held if (other - place) % distinct == 0), None)
    return found


def lost_part(reports: Sequence[Report], version: int, distinct: int = 0) -> str:
    """Return which part nobody has any more; "": each is there. Arguments: of `moves_of`."""
    left = left_at(reports, version, distinct)
    holders, again = holders_of(reports, distinct), "start the run again, from its last checkpoint"
    if len(reports) < distinct:
        return f"{len(reports)} ranks are left, and a replica of the hybrid mesh takes {distinct}: {again}"
    for place, holder in enumerate(holders):
        if holder is not None or place in left:
            continue
        buddy = buddy_of(place, len(holders))
        kept = holders[buddy]
        if kept is not None and not kept.copy:
            return f"rank {place} is lost before rank {buddy} had a copy of its shard: {again}"
        return (
            f"ranks {place} and {buddy} are lost together, and rank {buddy} kept the copy of rank "
            f"{place}'s shard: a shard survives if its rank or the next one lives; {again}"
        )
    return ""


def left_at(reports: Sequence[Report], version: int, distinct: int) -> set[int]:
    """Return the places whose part of `version` is in memory that the rank before has left there.

    Of a state that is to be divided again, or in a hybrid mesh, there are none.
    """
    if distinct or not is_divided(reports):
        return set()
    sizes = {each.division.size for each in reports if each.division is not None}
    return {
        place
        for place, report in enumerate(reports)
        if report.fresh
        for each in report.held
        if each.place == place and {each.size} == sizes and each.version <= version <= each.reach
    }


def all_outlive(reports: Sequence[Report], version: int, distinct: int) -> bool:
    """Return whether no part needs a copy at a buddy: memory has each for the rank that replaces its own."""
    left = left_at(reports, version, distinct)
    return not distinct and all(each.outlives or place in left for place, each in enumerate(reports))


def newest_held(reports: Sequence[Report]) -> Held | None:
    """Return the newest state, by one of its parts, of which memory holds all; None: there is none.

    One of a later launch is newer: the run has begun again, or gone on, from what was there then.
    """
    return next((each for each in _newest_first(reports) if not absent_parts(reports, each)), None)


def _newest_first(reports: Sequence[Report]) -> list[Held]:
    every = {each for report in reports for each in report.held}
    return sorted(every, key=lambda each: (each.launch, each.version, each.size, each.place), reverse=True)


def absent_parts(reports: Sequence[Report], of: Held) -> list[int]:
    """Return the parts of the state that `of` is one of, of which memory has neither them nor a copy."""
    there = set[int]()
    for each in (each for report in reports for each in report.held):
        if (each.launch, each.version, each.size) == (of.launch, of.version, of.size):
            there |= {each.place, ward_of(each.place, each.size)} if each.keeps else {each.place}
    return [place for place in range(of.size) if place not in there]


def absent_in_words(reports: Sequence[Report]) -> str:
    """Return what the newest state in memory lacks; "" if there is none."""
    newest = next(iter(_newest_first(reports)), None)
    if newest is None:
        return ""
    absent = ", ".join(map(str, absent_parts(reports, newest)))
    return f"no step is whole in it: of the last one, the shard of rank {absent} of {newest.size} is missing"


def missing_held(reports: Sequence[Report], version: int, distinct: int = 0) -> list[int]:
    """Return the parts that memory of fresh ranks has to give, so that none is missing at `version`.

    Empty: it cannot. A part of which memory has a copy alone is had by its buddy, with the buddy's own part.
    distinct: see `holders_of`.
    """
    holders = holders_of(reports, distinct)
    taken = {report.division.place for report in reports if report.division is not None}
    held = {
        (each.place, keeps)
        for report in reports
        if report.fresh
        for each in report.held
        if (each.version, each.size) == (version, len(holders))
        for keeps in {False, each.keeps}
    }
    found = list[int]()
    for place in (place for place, holder in enumerate(holders) if holder is None):
        buddy = buddy_of(place, len(holders))
        if (place, False) in held:
            found.append(place)
        elif (buddy, True) in held and buddy not in taken:
            found.append(buddy)
        else:
            return []
    return found


def moves_of(reports: Sequence[Report], version: int, source: int, distinct: int = 0) -> list[Move]:
    """Return what goes from whom to whom if each has the part of its place, or is to have it.

    distinct: see `holders_of`. A part comes from the memory that its rank has left, from a buddy, or, if that
    has no copy, from a replica. All make their moves in this order, so none waits in a circle.
    """
    size, moves = whole_of(len(reports), distinct), list[Move]()
    left = left_at(reports, version, distinct)
    for place, report in enumerate(reports[:size]):
        if report.fresh:
            moves.append(Move(version=version, what=What.REST, source=source, target=place))
            if place in left:
                moves.append(Move(version=version, what=What.LEFT, source=place, target=place))
                continue
            giver = Holder(buddy_of(place, size), True)
            if distinct and not reports[giver.rank].keeps:
                giver = holders_of(reports, distinct)[place] or giver
            what = What.SHARD if giver.copy else What.REPLICA
            moves.append(Move(version=version, what=what, source=giver.rank, target=place))
    copies = size > 1 and not all_outlive(reports, version, distinct)
    without = [place for place, report in enumerate(reports[:size]) if copies and not report.keeps]
    wards = sorted((ward_of(place, size) for place in without), key=lambda ward: (ward % 2, ward))
    moves += [
        Move(version=version, what=What.COPY, source=ward, target=buddy_of(ward, size)) for ward in wards
    ]
    return moves


class Plan(NamedTuple):
    """The steps of a meeting after which each rank has its part.

    moves: of all ranks, in the order in which they are made. division: this rank's afterwards. divides: it is
    another one. holders: of the parts of the old division, if they are divided again. leaves: whether the
    memory of all ranks has their parts, so that no buddy has copies.
    """

    moves: tuple[Move, ...] = ()
    division: Division | None = None
    divides: bool = False
    holders: tuple[Holder, ...] = ()
    leaves: bool = False


def plan_of(reports: Sequence[Report], version: int, source: int, part: Division, number: int) -> Plan:
    """Return what the rank of `part` is to do. part: as the state is divided; number: of the next division.

    version, source: see `moves_of`. None of the parts is lost.
    """
    distinct, size = part.distinct, whole_of(len(reports), part.distinct)
    if is_divided(reports, distinct):
        return Plan(
            tuple(moves_of(reports, version, source, distinct)),
            replace(part, size=size),
            leaves=all_outlive(reports, version, distinct),
        )
    rest = (
        Move(version=version, what=What.REST, source=source, target=place)
        for place, report in enumerate(reports[:size])
        if report.fresh
    )
    holders = (each for each in holders_of(reports, distinct)[: distinct or None] if each is not None)
    return Plan(tuple(rest), replace(part, size=size, number=number), True, tuple(holders))
