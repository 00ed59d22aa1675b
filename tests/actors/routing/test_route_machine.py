"""Routes to processes outside of a view: each waiting sender gets one result, for the right incarnation."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.cluster.node.actors import ClusterRoutes
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.core.ref import (
    abroad,
    at_home,
    external_name,
    is_global,
    name_of_external,
    owner_of,
    scope_of,
)
from zbmd.actors.routing import machine as w

NAMES = ("node1", "rank0@1f", "rank1@1f")


class Cluster:
    """A machine, and processes that come to new lives and dial us, in any order."""

    def __init__(self, seed: int, machine: w.RouteMachine) -> None:
        self.rng = random.Random(seed)
        self.machine = machine
        self.lives: dict[str, int] = dict.fromkeys(NAMES, 1)
        self.links: dict[str, int] = {}
        self.open: dict[int, tuple[str, int]] = {}
        self.work: dict[str, tuple[str, int]] = {}
        self.next = self.found = 0

    def feed(self, event: w.Event) -> None:
        actions = self.machine.handle(event)
        self.machine.check_invariants()
        for action in actions:
            self.perform(action)

    def perform(self, action: w.Action) -> None:
        match action:
            case w.Seek(process=process):
                self.work[process] = ("seek", 0)
            case w.Dial(process=process):
                self.work[process] = ("dial", self.found)
            case w.Arrive(ticket=ticket):
                process, incarnation = self.open.pop(ticket)
                assert self.links.get(process), f"{process} is not linked"
                assert incarnation in (0, self.links[process]), "a link to another life than was wanted"
            case w.RefuseLink(ticket=ticket, kind=kind):
                process, incarnation = self.open.pop(ticket)
                if kind is w.RefusalKind.DEAD:
                    assert incarnation < self.lives[process], "that life is not over"
            case w.AwaitEnd(process=process, incarnation=incarnation):
                assert self.links[process] == incarnation
            case w.Detach(process=process):
                self.end(process)

    def end(self, process: str) -> None:
        incarnation = self.links.pop(process, None)
        if incarnation is not None:
            self.feed(w.LinkEnded(process=process, incarnation=incarnation))

    def link(self, process: str, incarnation: int) -> None:
        known = self.links.get(process, 0)
        if known < incarnation:
            self.end(process)
            self.links[process] = incarnation
            self.feed(w.ProcessLinked(process=process, incarnation=incarnation))

    def want(self, process: str) -> None:
        self.next += 1
        incarnation = self.rng.choice((0, self.lives[process], max(1, self.lives[process] - 1)))
        self.open[self.next] = (process, incarnation)
        self.feed(w.Wanted(process=process, incarnation=incarnation, ticket=self.next))

    def go_on(self, process: str) -> None:
        """Calls under way come to an end."""
        what, incarnation = self.work.pop(process)
        if self.rng.random() < 0.3:
            self.feed(w.NotFound(process=process, reason="as the test wants"))
        elif what == "seek":
            self.found = self.lives[process]
            self.feed(w.ProcessFound(process=process, incarnation=self.found))
        elif incarnation == self.lives[process]:
            self.link(process, incarnation)
        else:
            self.feed(w.NotFound(process=process, reason="another life listens there"))

    def step(self) -> None:
        process = self.rng.choice(NAMES)
        match self.rng.randrange(7):
            case 0 | 1:
                self.want(process)
            case 2 | 3:
                if process in self.work:
                    self.go_on(process)
            case 4:
                self.link(process, self.lives[process])  # it has dialed us
            case 5:
                if self.rng.random() < 0.5:
                    self.end(process)
                    self.lives[process] += 1
                elif process in self.links:
                    incarnation = self.links[process]
                    self.feed(w.Gone(process=process, incarnation=incarnation, reason="the cluster says so"))
            case _:
                if self.open:
                    ticket = self.rng.choice(list(self.open))
                    del self.open[ticket]
                    self.feed(w.GivenUp(ticket=ticket))

    def settle(self) -> None:
        for _ in range(100):
            if not self.work:
                break
            self.go_on(next(iter(self.work)))
        assert not self.open, f"nobody tells {self.open}"


def run(seed: int, machine: w.RouteMachine) -> None:
    cluster = Cluster(seed, machine)
    for _ in range(120):
        cluster.step()
    cluster.settle()


@given(seed=st.integers(0, 2**32))
def test_everybody_who_waits_is_told_once(seed: int) -> None:
    run(seed, w.RouteMachine())


class TakesAnyLife(w.RouteMachine):
    """A caller that waits is content with any incarnation."""

    def _linked(self, process: str, incarnation: int) -> list[w.Action]:
        place = self.places.get(process)
        if place is not None:
            place.waiting = dict.fromkeys(place.waiting, 0)
        return super()._linked(process, incarnation)


class Forgets(w.RouteMachine):
    """A caller that wants a later incarnation than the one that has dialed us is forgotten."""

    def _linked(self, process: str, incarnation: int) -> list[w.Action]:
        return [a for a in super()._linked(process, incarnation) if not isinstance(a, w.Arrive)]


@pytest.mark.parametrize("planted", [TakesAnyLife, Forgets])
def test_planted_bugs_are_found(planted: type[w.RouteMachine]) -> None:
    def finds(seed: int) -> bool:
        try:
            run(seed, planted())
        except AssertionError:
            return True
        return False

    assert any(finds(seed) for seed in range(50))


def test_bounds_are_kept() -> None:
    machine = w.RouteMachine()
    for number in range(w.PROCESSES_MAX):
        machine.handle(w.ProcessLinked(process=f"node{number + 1}", incarnation=1))
    assert not machine.has_room("node9999") and machine.has_room("node1")
    (refused,) = machine.handle(w.Wanted(process="node9999", incarnation=0, ticket=1))
    assert isinstance(refused, w.RefuseLink) and refused.kind is w.RefusalKind.TOO_MANY
    for ticket in range(w.TICKETS_MAX):
        machine.handle(w.Wanted(process="node1", incarnation=2, ticket=ticket))
    (refused,) = machine.handle(w.Wanted(process="node2", incarnation=2, ticket=w.TICKETS_MAX))
    assert isinstance(refused, w.RefuseLink) and refused.kind is w.RefusalKind.TOO_MANY
    machine.check_invariants()


@given(
    process=st.sampled_from(["rank0", "w1", "node", "node3", "session-1-a@node3"]),
    scope=st.sampled_from("abc"),
)
def test_a_name_means_the_same_process_wherever_it_is_sent(process: str, scope: str) -> None:
    outside = abroad(process, scope)
    assert is_global(outside) and abroad(outside, "d") == outside
    assert at_home(outside, scope) == process
    assert at_home(outside, "d") == outside
    hello = external_name(process, "" if is_global(process) else scope)
    assert name_of_external(hello) == outside


def test_a_name_says_who_owns_the_process() -> None:
    owned = {"rank0@1f": "", "rank0": "", "node3": "", "session-1": "", "session-1@node3": "node3"}
    owned |= {"w0@rank0@1f": "rank0@1f", "w0@session-1@node3": "session-1@node3"}
    assert {process: owner_of(process) for process in owned} == owned
    assert {scope_of(process) for process in owned} == {"", "1f"}


@pytest.mark.parametrize("hello", ["rank0", "rank0@", "@1f", "a@@c", "a@b@@", "@", ""])
def test_what_is_no_guest_is_none(hello: str) -> None:
    assert name_of_external(hello) is None


def view(epoch: int, *keys: NodeKey) -> ClusterView:
    return ClusterView(epoch=epoch, nodes=tuple(Node(key, f"10.0.0.{key.id}:1") for key in keys))


async def nowhere(_: NodeKey) -> str:
    return ""


def test_a_process_is_gone_once_it_was_in_a_view_and_not_before() -> None:
    """A peer that links with us may be in a view that this node does not act on yet."""
    finder, told = ClusterRoutes(nowhere), list[str]()
    finder.acts_on(view(1, NodeKey(1, 1)), "test")
    undo = finder.notify_end("node2", 1, told.append)
    finder.notify_end("session-7@node1", 1, told.append)
    assert not told, "it is not known yet"
    finder.acts_on(view(2, NodeKey(1, 1), NodeKey(2, 1)), "test")
    finder.acts_on(ClusterView(epoch=0, nodes=()), "this node is out")
    assert not told, "who is out knows nothing"
    finder.acts_on(view(3, NodeKey(1, 1)), "test")
    assert len(told) == 1 and "node2 has left the cluster in view 3" in told[0]
    undo()
    finder.acts_on(view(4, NodeKey(1, 1), NodeKey(2, 2)), "test")
    assert finder.gone("node2", 1) == "node2 is incarnation 2" and not finder.gone("node2", 2)
