"""Groups of priority machines: one order on all members, however far one is ahead; the highest goes first."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.group import priority_machine as pm
from zbmd.collectives.group.priority_machine import WINDOW, PriorityMachine
from zbmd.transport.errors import LocalProtocolError


class World:
    """The members of a group. A round completes once all have begun their turn."""

    def __init__(self, members: int, priorities: list[list[int]]) -> None:
        self.machines = {rank: PriorityMachine() for rank in range(members)}
        self.priorities = priorities
        self.made = [0] * members
        self.reports: dict[int, pm.WaitingCalls] = {}
        self.order: list[list[int]] = [[] for _ in range(members)]
        self.differed: list[list[int]] = [[] for _ in range(members)]

    def make(self, rank: int) -> None:
        priority = self.priorities[rank][self.made[rank]]
        assert self.put(rank, pm.Made(priority=priority)) is None
        self.made[rank] += 1

    def begin(self, rank: int) -> None:
        action = self.put(rank, pm.TurnBegan())
        assert isinstance(action, pm.Count)
        self.reports[rank] = action.own
        if len(self.reports) < len(self.machines):
            return
        reports, self.reports = self.reports, {}
        for member in self.machines:
            match self.put(member, pm.Counted(reports=reports)):
                case pm.Run(number=number):
                    self.order[member].append(number)
                    self.check_choice(member, number, min(one.made for one in reports.values()))
                case pm.Differ(number=number):
                    self.order[member].append(number)
                    self.differed[member].append(number)
                case action:
                    raise AssertionError(action)

    def check_choice(self, rank: int, chosen: int, common: int) -> None:
        left = [k for k in range(common) if k not in self.order[rank][:-1]][:WINDOW]
        assert chosen in left
        assert all((self.priorities[rank][k], -k) <= (self.priorities[rank][chosen], -chosen) for k in left)

    def put(self, rank: int, event: pm.PriorityEvent) -> pm.PriorityAction | None:
        actions = self.machines[rank].handle(event, now_ns=0)
        self.machines[rank].check_invariants()
        return actions[0] if actions else None

    def moves(self) -> list[tuple[str, int]]:
        found = [("make", r) for r in self.machines if self.made[r] < len(self.priorities[r])]
        ready = [r for r in self.machines if r not in self.reports and self.made[r] > len(self.order[r])]
        return found + [("begin", r) for r in ready]


priorities = st.lists(st.integers(-3, 3), min_size=1, max_size=70)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 4), priorities, st.randoms(use_true_random=False))
def test_all_run_the_same_calls_in_the_same_order(members: int, wanted: list[int], random: Random) -> None:
    world = World(members, [wanted] * members)
    while moves := world.moves():
        what, rank = random.choice(moves)
        (world.make if what == "make" else world.begin)(rank)
    assert sorted(world.order[0]) == list(range(len(wanted)))
    assert all(order == world.order[0] for order in world.order)
    assert not any(world.differed)


@settings(max_examples=100, deadline=None)
@given(priorities, st.data())
def test_priorities_that_differ_are_told_on_all_alike(wanted: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(wanted) - 1))
    other = [*wanted[:at], wanted[at] + 1, *wanted[at + 1 :]]
    world = World(3, [wanted, other, wanted])
    while moves := world.moves():
        what, rank = data.draw(st.sampled_from(moves))
        (world.make if what == "make" else world.begin)(rank)
    assert all(order == world.order[0] for order in world.order)
    assert world.differed == [[at]] * 3


def test_who_lags_decides_how_far_is_looked() -> None:
    world = World(2, [[0, 0, 5]] * 2)
    for _ in range(3):
        world.make(0)
    world.make(1)
    world.begin(0)
    world.begin(1)
    assert world.order[0] == [0], "member 1 does not know of the call of the highest priority yet"
    world.make(1)
    world.make(1)
    for rank in (1, 0, 1, 0):
        world.begin(rank)
    assert world.order == [[0, 2, 1]] * 2


def test_a_broken_round_fails_the_first_call_that_waits() -> None:
    world = World(1, [[0, 3]])
    world.make(0)
    world.make(0)
    machine = world.machines[0]
    machine.handle(pm.TurnBegan(), now_ns=0)
    assert machine.handle(pm.Broken(), now_ns=0) == [pm.Fail(number=0)]
    world.begin(0)
    assert world.order == [[1]]


def test_misuse_is_told() -> None:
    machine = PriorityMachine()
    with pytest.raises(LocalProtocolError, match="in -127"):
        machine.handle(pm.Made(priority=128), now_ns=0)
    with pytest.raises(LocalProtocolError, match="without a call"):
        machine.handle(pm.TurnBegan(), now_ns=0)
    with pytest.raises(LocalProtocolError, match="not begun"):
        machine.handle(pm.Made(priority=1), now_ns=0)
        machine.handle(pm.Broken(), now_ns=0)
