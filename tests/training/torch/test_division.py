"""Divisions of a sharded state: its rows come to their places, whatever ranks are lost meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.torch import transaction as tx
from zbmd.training.torch.fsdp.division import (
    Division,
    Move,
    Report,
    What,
    holders_of,
    lost_part,
    pieces_of,
    rows_of,
    settled,
    ward_of,
    windows_of,
)
from zbmd.training.torch.transaction import Phase, Transactions


@given(rows=st.integers(0, 40), old=st.integers(1, 7), new=st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_windows_are_whole_and_parts_are_those_of_fully_shard(rows: int, old: int, new: int) -> None:
    every = [rows_of(rows, old, place) for place in range(old)]
    assert [at for begin, stop in every for at in range(begin, stop)] == [*range(rows)]
    assert len({stop - begin for begin, stop in every if stop < rows}) <= 1, "all but the last are alike"
    for place in range(new):
        windows = windows_of(rows, new, place)
        found: list[list[int]] = [[] for _ in windows]
        for piece in pieces_of(rows, old, windows):
            first, last = every[piece.part]
            assert first <= piece.begin < piece.stop <= last
            found[piece.window] += range(piece.begin, piece.stop)
        assert found == [[*range(*window)] for window in windows]


def report(
    number: int, size: int, place: int, *, keeps: bool = True, ready: Division | None = None
) -> Report:
    part = Division(number=number, size=size, place=place)
    return Report(version=4, voted=False, fresh=False, keeps=keeps, division=part, ready=ready)


def test_a_division_that_one_rank_has_adopted_is_adopted_by_all() -> None:
    ready = Division(number=1, size=3, place=1)
    found = settled([report(1, 3, 0), report(0, 4, 2, ready=ready)])
    assert [each.division for each in found] == [Division(number=1, size=3, place=0), ready]
    assert lost_part(found, 4) == "" and [each.rank for each in holders_of(found) if each] == [0, 1, 0]


def test_a_division_that_some_have_received_is_dropped() -> None:
    found = settled([report(0, 4, 0), report(0, 4, 2, ready=Division(number=1, size=3, place=1))])
    assert [each.division and each.division.number for each in found] == [0, 0]
    assert {each.ready for each in found} == {None}


@dataclass
class Rank:
    """A rank with its machine, and the rows that it has: of each division, of its own part and its copy."""

    number: int
    machine: Transactions
    own: set[int]
    ward: set[int]
    received: tuple[set[int], set[int]] | None = None
    waits: list[tx.Action] = field(default_factory=list)
    has_come: bool = False
    """Whether it has come to where all agree, in the meeting under way."""

    def take(self, actions: list[tx.Action]) -> None:
        """Perform what needs nobody else, and keep the rest."""
        for action in actions:
            if isinstance(action, tx.Adopt):
                assert self.received is not None
                (self.own, self.ward), self.received = self.received, None
            else:
                self.waits.append(action)


ROWS = 29


def rows_in(place: int, size: int) -> set[int]:
    return set(range(*rows_of(ROWS, size, place)))


def copied_in(place: int, size: int) -> set[int]:
    return rows_in(ward_of(place, size), size) if size > 1 else set()


def meet(ranks: list[Rank], rng: random.Random, *, dies_at: int) -> bool:
    """Have all meet; return whether all have adopted a part. dies_at: the action at which one is lost."""
    for rank in ranks:
        rank.machine.handle(tx.Cut(), now_ns=0)
    reports = tuple(rank.machine.report for rank in ranks)
    for place, rank in enumerate(ranks):
        rank.has_come = False
        rank.waits = []
        rank.take(rank.machine.handle(tx.Met(place=place, reports=reports), now_ns=0))
    order, counted = [*ranks], 0
    while any(rank.waits for rank in ranks):
        rng.shuffle(order)
        for rank in order:
            if not rank.waits:
                continue
            if counted == dies_at:
                return False
            counted += 1
            action = rank.waits.pop(0)
            if isinstance(action, tx.Fail):
                raise AssertionError(action.reason)
            perform(action, rank, ranks)
    return all(rank.machine.phase is Phase.OPEN for rank in ranks)


def perform(action: tx.Action, rank: Rank, ranks: list[Rank]) -> None:
    machine = rank.machine
    match action:
        case tx.Divide(division=division, holders=holders):
            for part, holder in enumerate(holders):
                there = ranks[holder.rank].ward if holder.copy else ranks[holder.rank].own
                assert there == rows_in(part, len(holders)), "a rank is taken for a holder, and is none"
            rank.received = rows_in(division.place, division.size), copied_in(division.place, division.size)
            rank.take(machine.handle(tx.Divided(), now_ns=0))
        case tx.Agree():
            rank.has_come = True
            if all(each.has_come for each in ranks):
                rank.take(machine.handle(tx.Agreed(), now_ns=0))
            else:
                rank.waits.append(action)
        case Move(what=what, source=source, target=target):
            if ranks[target] is rank:
                if what is What.SHARD:
                    rank.own = ranks[source].ward
                elif what is What.COPY:
                    rank.ward = ranks[source].own
                if not rank.waits:
                    machine.handle(tx.Taken(version=4), now_ns=0)
        case _:
            assert isinstance(action, tx.Repeat)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=400, deadline=None)
def test_losses_while_a_state_is_divided_leave_each_rank_its_part(seed: int) -> None:
    """Ranks are lost at any action, and new ones come: a meeting that ends leaves each with its part."""
    rng = random.Random(seed)
    size = rng.randrange(3, 7)
    ranks = []
    for place in range(size):
        machine = Transactions(version=4, sharded=True, place=place, size=size)
        machine.phase, machine.keeps = Phase.OPEN, True
        ranks.append(Rank(place, machine, rows_in(place, size), copied_in(place, size)))
    for _ in range(6):
        gone = rng.randrange(len(ranks))
        if len(ranks) > 1 and rng.random() < 0.7:
            ranks.pop(gone)
        elif len(ranks) < 7:
            ranks.append(Rank(9, Transactions(fresh=True, sharded=True), set(), set()))
        reports = settled([rank.machine.report for rank in ranks])
        if all(each.fresh for each in reports) or lost_part(reports, 4):
            return
        whole = meet(ranks, rng, dies_at=rng.choice([*range(20), 1000]))
        for rank in ranks:
            rank.machine.check_invariants()
        if whole:
            for place, rank in enumerate(ranks):
                assert (rank.own, rank.ward) == (rows_in(place, len(ranks)), copied_in(place, len(ranks)))
                assert rank.machine.division is not None and rank.machine.version == 4
                assert (rank.machine.division.place, rank.machine.division.size) == (place, len(ranks))
    assert meet(ranks, rng, dies_at=1000) or len(ranks) == 1
