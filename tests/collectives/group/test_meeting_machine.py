"""Rings of meeting machines: who meets for a number has met the same offers, and gave-up calls do no harm."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.collectives.group import subgroup_machine as mm
from zbmd.collectives.group.subgroup_machine import MeetingMachine
from zbmd.collectives.programs.channels import SUBGROUPS_MAX, Offer
from zbmd.transport.errors import LocalProtocolError

RANKS = (0, 1, 2)
TURNS_MAX = 1000
Links = dict[tuple[int, int], deque[mm.MeetingEvent]]


class World:
    """Three members. Offers to one stay in order; a withdrawal may come behind the offer that follows it."""

    def __init__(self) -> None:
        self.machines = {rank: MeetingMachine(rank, RANKS) for rank in RANKS}
        self.links: dict[tuple[int, int], deque[mm.MeetingEvent]] = {
            (a, b): deque() for a in RANKS for b in RANKS if a != b
        }
        self.calling: set[int] = set()
        self.met: dict[int, dict[int, tuple[Offer, ...]]] = {rank: {} for rank in RANKS}
        self.offers: dict[tuple[int, int], Offer] = {}
        self.given_up: set[tuple[int, int]] = set()
        self.made = 0

    def put(self, rank: int, event: mm.MeetingEvent) -> None:
        machine = self.machines[rank]
        for action in machine.handle(event, now_ns=0):
            match action:
                case mm.TellOffer(number=number, offer=offer):
                    assert (rank, number) not in self.offers, "two offers for one number"
                    self.offers[rank, number] = offer
                    self.send(rank, mm.Offered(source=rank, number=number, offer=offer), late=False)
                case mm.TellWithdrawn(number=number):
                    self.given_up.add((rank, number))
                    self.send(rank, mm.Withdrawn(source=rank, number=number), late=True)
                case mm.Met(number=number, offers=offers):
                    assert number not in self.met[rank]
                    assert offers == tuple(self.offers[member, number] for member in RANKS)
                    self.met[rank][number] = offers
                    self.calling.remove(rank)
                case mm.Left(number=number, source=source):
                    assert (source, number) in self.given_up
        machine.check_invariants()

    def send(self, rank: int, event: mm.MeetingEvent, *, late: bool) -> None:
        for (source, _), link in self.links.items():
            if source == rank:
                swap = not late and link and isinstance(link[-1], mm.Withdrawn) and self.made % 2 == 0
                link.insert(len(link) - 1 if swap else len(link), event)

    def call(self, rank: int) -> None:
        self.made += 1
        self.calling.add(rank)
        self.put(rank, mm.Called(offer=Offer(free=self.made, used=(self.made,) * SUBGROUPS_MAX)))

    def give_up(self, rank: int) -> None:
        self.calling.remove(rank)
        self.put(rank, mm.GaveUp())

    def drain(self) -> None:
        for _ in range(TURNS_MAX):
            full = [key for key, link in self.links.items() if link]
            if not full:
                return
            for key in full:
                self.put(key[1], self.links[key].popleft())
        raise AssertionError("messages without an end")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_all_meet_in_the_end_whoever_gave_up_before(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(0, 60))):
        moves: list[tuple[str, Any]] = [("call", r) for r in RANKS if r not in world.calling]
        moves += [("give up", r) for r in world.calling]
        moves += [("deliver", key) for key, link in world.links.items() if link] * 2
        what, which = data.draw(st.sampled_from(moves))
        if what == "call":
            world.call(which)
        elif what == "give up":
            world.give_up(which)
        else:
            world.put(which[1], world.links[which].popleft())
    world.drain()
    for rank in sorted(world.calling):
        world.give_up(rank)
    world.drain()
    before = {rank: len(met) for rank, met in world.met.items()}
    for rank in data.draw(st.permutations(RANKS)):
        world.call(rank)
        for key in data.draw(st.lists(st.sampled_from(sorted(world.links)), max_size=6)):
            if world.links[key]:
                world.put(key[1], world.links[key].popleft())
    world.drain()
    assert not world.calling
    last = {max(met) for met in world.met.values()}
    assert len(last) == 1, "they met for different numbers"
    assert all(len(met) == before[rank] + 1 for rank, met in world.met.items())


def test_calls_without_a_timeout_are_numbered_from_nought_alike() -> None:
    world = World()
    for _ in range(5):
        for rank in RANKS:
            world.call(rank)
        world.drain()
    assert all(sorted(met) == [0, 1, 2, 3, 4] for met in world.met.values())


def test_who_met_one_that_had_given_up_is_told() -> None:
    world = World()
    world.call(2)
    world.give_up(2)
    withdrawn = [world.links[2, rank].pop() for rank in (0, 1)]
    world.call(0)
    world.call(1)
    world.drain()
    assert 0 in world.met[0]
    assert world.machines[0].handle(withdrawn[0], now_ns=0) == [mm.Left(number=0, source=2)]


def test_one_call_at_a_time() -> None:
    world = World()
    world.call(0)
    with pytest.raises(LocalProtocolError, match="already"):
        world.call(0)
    assert world.machines[1].handle(mm.GaveUp(), now_ns=0) == []
