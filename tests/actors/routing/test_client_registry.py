"""Guests of a process: one with an address is found, and one that waits for its end hears of it once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.routing import client_registry as b

NAMES = ["session-1@node1", "session-2@node1"]


class Owner:
    """A book, and guests that come, go, come back under the same life or the next, and are waited for."""

    def __init__(self, seed: int, book: b.ClientRegistry) -> None:
        self.rng = random.Random(seed)
        self.book = book
        self.lives = dict.fromkeys(NAMES, 1)
        self.links: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        """The driver's table of addresses."""
        self.was: dict[str, set[int]] = {name: set() for name in NAMES}
        self.late: list[tuple[str, int]] = []
        """Links that a later life has replaced, and whose ends are not told yet."""
        self.open: dict[int, tuple[str, int]] = {}
        self.next = 0

    def feed(self, event: b.Event) -> None:
        actions = self.book.handle(event)
        self.book.check_invariants()
        for action in actions:
            match action:
                case b.SendNotice(ticket=ticket):
                    process, incarnation = self.open.pop(ticket)
                    assert self.links.get(process) != incarnation, "that life is linked"
                    assert incarnation < self.links.get(process, 0) or incarnation <= max(
                        self.was[process]
                    ), "not seen yet"
                case b.Forget(process=process, incarnation=incarnation):
                    assert self.kept.pop(process) == incarnation
                case b.RefuseNotice():
                    raise AssertionError("there are few")
        for process in NAMES:
            kept = self.kept.get(process, 0)
            assert self.book.incarnation_of(process) == kept, "what is found is what is kept"
            assert self.kept.get(process) in (None, self.links.get(process)), "who is found is linked"

    def link(self, process: str) -> None:
        incarnation, before = self.lives[process], self.links.get(process)
        if before != incarnation:
            if before is not None:
                self.late.append((process, before))
            self.links[process] = incarnation
            self.feed(b.ClientLinked(process=process, incarnation=incarnation))

    def enrol(self, process: str, incarnation: int) -> None:
        if self.links.get(process) == incarnation:
            self.kept[process] = incarnation
            self.was[process].add(incarnation)
        self.feed(b.Enrolled(process=process, incarnation=incarnation))

    def leave(self, process: str) -> None:
        incarnation = self.links.pop(process, None)
        if incarnation is not None:
            self.feed(b.Left(process=process, incarnation=incarnation))

    def heed(self, process: str) -> None:
        self.next += 1
        incarnation = max(1, self.lives[process] + self.rng.choice((-1, 0, 0, 1)))
        self.open[self.next] = (process, incarnation)
        self.feed(b.NoticeWanted(ticket=self.next, process=process, incarnation=incarnation))

    def step(self) -> None:
        process = self.rng.choice(NAMES)
        match self.rng.randrange(7):
            case 0 | 1:
                self.link(process)
            case 2:
                self.enrol(process, self.lives[process])
            case 3:
                self.lives[process] += 1  # its link may stand for a while, and the next life come first
                self.enrol(process, self.lives[process] - 1)
            case 4:
                if self.late:
                    late, incarnation = self.late.pop(0)
                    self.feed(b.Left(process=late, incarnation=incarnation))
                else:
                    self.leave(process)
            case 5:
                self.heed(process)
            case _:
                if self.open:
                    ticket = self.rng.choice(list(self.open))
                    del self.open[ticket]
                    self.feed(b.NoticeDropped(ticket=ticket))

    def settle(self) -> None:
        """All go; who waits for one that others could find has heard of it by then."""
        for process in NAMES:
            self.leave(process)
        for ticket, (process, incarnation) in self.open.items():
            assert incarnation > max(self.was[process], default=0), (
                f"nobody tells {ticket} of {process}#{incarnation}"
            )


def run(seed: int, book: b.ClientRegistry) -> None:
    owner = Owner(seed, book)
    for _ in range(100):
        owner.step()
    owner.settle()


@given(seed=st.integers(0, 2**32))
def test_everybody_who_waits_is_told_once(seed: int) -> None:
    run(seed, b.ClientRegistry())


class ForgetsWhoWaits(b.ClientRegistry):
    """Nobody hears of the end of a guest."""

    def _strike(self, process: str) -> list[b.Action]:
        return [action for action in super()._strike(process) if not isinstance(action, b.SendNotice)]


class EndsTheNextLife(b.ClientRegistry):
    """The end of a link strikes whatever life is linked by then."""

    def handle(self, event: b.Event) -> list[b.Action]:
        guest = self.linked.get(event.process) if isinstance(event, b.Left) else None
        if isinstance(event, b.Left) and guest is not None:
            return self._strike(event.process)
        return super().handle(event)


class FindsTheDead(b.ClientRegistry):
    """A client without an address of its own is found at that of its last incarnation."""

    def _linked(self, process: str, incarnation: int) -> list[b.Action]:
        known = self.linked.get(process)
        actions = super()._linked(process, incarnation)
        if known is not None and process in self.linked:
            self.linked[process].enrolled = known.enrolled
        return actions


@pytest.mark.parametrize("planted", [ForgetsWhoWaits, EndsTheNextLife, FindsTheDead])
def test_planted_bugs_are_found(planted: type[b.ClientRegistry]) -> None:
    def finds(seed: int) -> bool:
        try:
            run(seed, planted())
        except (AssertionError, KeyError):
            return True
        return False

    assert any(finds(seed) for seed in range(50))


def test_bounds_are_kept() -> None:
    book, process = b.ClientRegistry(), NAMES[0]
    for ticket in range(b.HEEDED_MAX):
        book._heeded[ticket] = (process, 1)
    (refused,) = book.handle(b.NoticeWanted(ticket=b.HEEDED_MAX, process=process, incarnation=1))
    assert isinstance(refused, b.RefuseNotice)
    for number in range(b.SEEN_MAX + 1):
        name = f"session-{number}@node1"
        book.handle(b.ClientLinked(process=name, incarnation=1))
        book.handle(b.Enrolled(process=name, incarnation=1))
        book.handle(b.Left(process=name, incarnation=1))
    book.check_invariants()
