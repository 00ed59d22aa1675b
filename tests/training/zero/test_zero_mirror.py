"""The mirror of shards: simulated ranks that are killed between any two of their moves, one or more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.holdings_row import ROW_NUMBERS, HoldingsRow
from zbmd.training.redundancy.machine import MIRROR, mirror_config
from zbmd.training.scenarios.commit import build
from zbmd.training.scenarios.world import CELLS, CommitOptions, CommitWorld
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.sim import Crash, CrashWithin, Fault, SimulationFailure

SPAN_NS = 400_000_000
"""About as long as a run lasts."""
KILLS = st.lists(st.tuples(st.integers(0, SPAN_NS), st.integers(0, 4)), max_size=6)
"""When which rank is killed."""


def run(
    seed: int,
    options: CommitOptions,
    faults: Sequence[Fault] = (),
    mirror: type[zm.Mirror] = zm.Mirror,
) -> CommitWorld:
    """Run a job to its end: what must hold in between is checked by the world."""
    simulation, world = build(seed, options, mirror=mirror)
    for fault in faults:
        simulation.apply(fault)
    simulation.run(until=lambda: world.is_over)
    finished = world.finished if options.shrink else set(range(options.world_size)) & world.finished
    assert world.is_over or (bool(finished) if options.shrink else len(finished) == options.world_size)
    return world


def killed(options: CommitOptions, kills: list[tuple[int, int]]) -> list[Fault]:
    ranks = options.world_size
    return [Crash(process=f"rank{rank % ranks}", at_ns=at_ns, for_ns=0) for at_ns, rank in sorted(kills)]


def kill_points(seed: int, options: CommitOptions) -> list[CrashWithin]:
    """Every kill of one rank between two moves of a calm run."""
    simulation, _ = build(seed, options)
    simulation.run()
    return simulation.kill_faults([f"rank{rank}" for rank in range(options.world_size)])


@given(hosts=st.lists(st.integers(0, 4), min_size=2, max_size=24))
def test_buddies_are_on_other_hosts_where_there_are_enough(hosts: list[int]) -> None:
    found = zm.buddies(hosts)
    assert sorted(found) == list(range(len(hosts)))
    assert all(buddy != place for place, buddy in enumerate(found))
    largest = max(hosts.count(host) for host in hosts)
    apart = sum(hosts[buddy] != hosts[place] for place, buddy in enumerate(found))
    assert apart == min(len(hosts), 2 * (len(hosts) - largest))


SHARDED = [
    (19, CommitOptions(world_size=2, steps=3, sharded=True)),
    (26, CommitOptions(world_size=3, steps=2, sharded=True, per_host=2)),
]
"""Jobs, and seeds of short runs of them."""


@pytest.mark.parametrize(("seed", "options"), SHARDED, ids=["2", "3"])
def test_a_kill_at_any_moment_loses_nothing(seed: int, options: CommitOptions) -> None:
    points = kill_points(seed, options)
    assert len(points) > 100
    for point in points:
        world = run(seed, options, [point])
        assert not world.state_lost and set(world.ended.values()) == {options.last}, point


MESHES = {"dp=3": 29, "dp=2,pp=2": 22, "pp=2,dp=2": 24}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_kill_at_any_moment_loses_nothing_that_another_rank_holds(mesh: str) -> None:
    options, seed = CommitOptions(world_size=3 if mesh == "dp=3" else 4, steps=2, mesh=mesh), MESHES[mesh]
    assert options.replicas
    for point in kill_points(seed, options):
        world = run(seed, options, [point])
        assert not world.state_lost and set(world.ended.values()) == {options.last}, point


@pytest.mark.parametrize("kept", [False, True])
def test_a_kill_at_any_moment_loses_nothing_that_is_voted_for_beside_the_next_step(kept: bool) -> None:
    """States on devices: the vote on a version is that of the step after it."""
    options, seed = CommitOptions(world_size=4, steps=2, mesh="dp=2,pp=2", beside=True, kept=kept), 22
    for point in kill_points(seed, options)[::4]:
        world = run(seed, options, [point])
        assert not world.state_lost and set(world.ended.values()) == {options.last}, point


@given(seed=st.integers(0, 2**32), mesh=st.sampled_from(sorted(MESHES)), kills=KILLS, beside=st.booleans())
def test_any_kills_lose_only_what_no_rank_holds(
    seed: int, mesh: str, kills: list[tuple[int, int]], beside: bool
) -> None:
    options = CommitOptions(world_size=3 if mesh == "dp=3" else 4, steps=4, mesh=mesh, beside=beside)
    world = run(seed, options, killed(options, kills))
    assert world.state_lost or set(world.ended.values()) == {options.last}


def test_ranks_with_equal_keys_and_other_bits_end_the_run() -> None:
    mirror = zm.Mirror(place=0, ranks=2, replicas=True)
    mirror.handle(entered(mirror.held, mirror.held), now_ns=0)
    assert mirror.handle(zm.Updated(), now_ns=0) == []
    (action,) = mirror.handle(zm.Voted(votes=((4, 0), (6, 0))), now_ns=0)
    assert isinstance(action, zm.Fail) and not action.lost
    assert "places 0 and 1 hold the same state, and version 1 of it" in action.reason


def entered(*held: zm.Held) -> zm.Entered:
    """An epoch of replicas on one host, as the first one sees it."""
    return zm.Entered(held=held, hosts=(0,) * len(held), place=0, keys=(0,) * len(held))


@given(seed=st.integers(0, 2**32), kills=KILLS, late=st.booleans(), beside=st.booleans())
def test_replicas_go_on_with_fewer_ranks(
    seed: int, kills: list[tuple[int, int]], late: bool, beside: bool
) -> None:
    options = CommitOptions(world_size=4, steps=4, shrink=True, late=late, beside=beside)
    world = run(seed, options, killed(options, kills))
    assert world.state_lost or set(world.ended.values()) == {options.last}


def test_what_only_a_dead_rank_may_know_of_is_computed_again() -> None:
    """A version is prepared everywhere, and nobody is left who knows what it was made of."""
    held = zm.Held(own=(4, 5), known=4, copies=(None, None))
    found = zm.choose([held, held], keys=(0, 0), beyond=False)
    assert isinstance(found, zm.Choice) and found.version == 4
    knows = zm.Held(own=(None, None), known=5, copies=(None, None))
    found = zm.choose([held, knows], keys=(0, 0), beyond=False)
    assert isinstance(found, zm.Choice) and found.version == 5 and found.sources[1] is not None


@pytest.mark.parametrize("replicas", [True, False])
def test_what_is_written_again_is_not_held(replicas: bool) -> None:
    """A rank was ahead, and goes back: until the step is done again, its other slot may be torn."""
    mirror = zm.Mirror(place=0, ranks=2, replicas=replicas, own=(4, 5), known=4)
    other = zm.Held(own=(4, 3), known=4, copies=(None, None))
    mirror.handle(zm.Entered(held=(mirror.held, other), hosts=(0, 0), place=0), now_ns=0)
    assert (mirror.version, mirror.held.own) == (4, (4, None))


def test_a_mirror_goes_on_from_any_of_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each event, a second machine is restored from the state of the first: its actions are equal."""
    handle, states, followed = zm.Mirror.handle, MIRROR.states, 0

    def followed_handle(machine: zm.Mirror, event: zm.Event, *, now_ns: int) -> list[zm.Action]:
        nonlocal followed
        follower = MIRROR.build(mirror_config(machine))
        assert states is not None and isinstance(follower, zm.Mirror)
        states.restore(follower, states.encode(machine))
        answer = handle(machine, event, now_ns=now_ns)
        assert handle(follower, event, now_ns=0) == answer
        assert states.encode(follower) == states.encode(machine)
        followed += 1
        return answer

    monkeypatch.setattr(zm.Mirror, "handle", followed_handle)
    for seed in range(20):
        options = CommitOptions(world_size=3, steps=4, sharded=seed % 2 == 0, files=seed % 3 == 0)
        run(seed, options, killed(options, [(20_000_000 + 9_000_000 * seed, seed % 3)]))
    assert followed > 1000


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), kills=KILLS)
def test_what_lies_in_files_outlives_any_kills(seed: int, ranks: int, kills: list[tuple[int, int]]) -> None:
    options = CommitOptions(world_size=ranks, steps=4, files=True)
    world = run(seed, options, killed(options, kills))
    assert not world.state_lost and set(world.ended.values()) == {options.last}


KEPT = {
    "replicas": CommitOptions(world_size=3, steps=2, kept=True),
    "meshes": CommitOptions(world_size=4, steps=2, kept=True, mesh="dp=2,pp=2"),
    "buddies": CommitOptions(world_size=3, steps=2, kept=True, sharded=True),
    "alone": CommitOptions(world_size=1, steps=3, kept=True),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_kill_at_any_moment_loses_nothing_of_memory_that_outlives_it(kind: str) -> None:
    seed = 22
    for point in kill_points(seed, KEPT[kind]):
        world = run(seed, KEPT[kind], [point])
        assert not world.state_lost and set(world.ended.values()) == {KEPT[kind].last}, point


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(KEPT)), kills=KILLS)
def test_memory_that_outlives_its_ranks_outlives_any_kills(
    seed: int, kind: str, kills: list[tuple[int, int]]
) -> None:
    options = replace(KEPT[kind], steps=4)
    world = run(seed, options, killed(options, kills))
    assert not world.state_lost and set(world.ended.values()) == {options.last}


@pytest.mark.parametrize("kind", KEPT)
def test_all_ranks_killed_at_once_go_on_from_what_outlives_them(kind: str) -> None:
    options, ranks = KEPT[kind], KEPT[kind].world_size
    for seed in (4, 9):  # in both the lowest rank of a mesh is the last to see a vote
        for at_ns in range(0, SPAN_NS // 2, SPAN_NS // 300):
            world = run(seed, options, killed(options, [(at_ns, rank) for rank in range(ranks)]))
            assert not world.state_lost and set(world.ended.values()) == {options.last}, (seed, at_ns)


def test_a_file_that_is_gone_is_told_as_lost_state() -> None:
    options = CommitOptions(world_size=2, steps=3, files=True)
    simulation, world = build(0, options)
    simulation.run(until=lambda: world.log.last == 2)
    simulation.crash("rank1")
    file = world.files[1]
    file.stamps = [None, None]
    for cell in range(CELLS):
        file.cells.tear(cell)
    simulation.run(until=lambda: world.is_over)
    assert world.state_lost
    assert zm.LOST_WITH_FILE in world.reason


class Hasty(zm.Mirror):
    """A planted bug: a copy is taken for whole before it is written."""

    def check_invariants(self) -> None:
        pass

    def _all_hold(self, version: int) -> list[zm.Action]:
        actions = super()._all_hold(version)
        if actions:
            self.state = zm.State.COPIED
            self.copies[version % zm.SLOTS] = zm.Copy(ward=self.ward, version=version, digest=0)
        return []

    def _voted(self, votes: tuple[tuple[int, int], ...]) -> list[zm.Action]:
        own = [vote[0] for vote in votes]
        return super()._voted(tuple((one, own[self._buddies.index(at)]) for at, one in enumerate(own)))


class Forgetful(zm.Mirror):
    """A planted bug: a rank that is ahead goes on from its own version, whatever the others hold."""

    def _enter(self, event: zm.Entered) -> list[zm.Action]:
        ahead = max((version for version in self.own if version is not None), default=0)
        actions = super()._enter(event)
        if actions and isinstance(actions[0], zm.Resume) and ahead > self.version:
            self._target = ahead
            return self._resume()
        return actions


@pytest.mark.parametrize("bug", [Hasty, Forgetful])
def test_a_planted_bug_is_found(bug: type[zm.Mirror]) -> None:
    options = CommitOptions(world_size=3, steps=3, sharded=True)
    with pytest.raises(SimulationFailure):
        for seed in range(20):
            for point in kill_points(seed, options):
                run(seed, options, [point], bug)


@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 5), per_host=st.integers(0, 5), kills=KILLS)
def test_any_kills_lose_only_what_is_nowhere_left(
    seed: int, ranks: int, per_host: int, kills: list[tuple[int, int]]
) -> None:
    options = CommitOptions(world_size=ranks, steps=4, sharded=True, per_host=per_host)
    world = run(seed, options, killed(options, kills))
    assert world.state_lost or set(world.ended.values()) == {options.last}


def test_a_rank_and_its_buddy_at_once_are_told_as_lost_state() -> None:
    held = [zm.Held(own=(6, 7), known=6, copies=(zm.Copy(ward=2, version=6, digest=1), None))]
    fresh = zm.Held(own=(0, None), known=0, copies=(None, None))
    found = zm.choose([*held, fresh, fresh])
    assert isinstance(found, zm.Lost)
    assert found.places == (1,)
    assert "a rank and its buddy were lost at once" in found.reason
    options = CommitOptions(world_size=2, steps=3, sharded=True)
    simulation, world = build(0, options)
    simulation.run(until=lambda: world.log.last == 2)
    simulation.crash("rank0")
    simulation.crash("rank1")
    simulation.run(until=lambda: world.is_over)
    assert world.state_lost and zm.LOST_WITH_BUDDY in world.reason


def test_a_copy_with_other_bits_ends_the_run() -> None:
    mirror = zm.Mirror(place=0, ranks=2)
    fresh = mirror.held
    entered = mirror.handle(zm.Entered(held=(fresh, fresh), hosts=(0, 0), place=0), now_ns=0)
    assert entered == [zm.StartAnew(), zm.Resume(version=0)]
    assert mirror.handle(zm.AllHold(version=0), now_ns=0) == [zm.CopyWard(ward=1, version=0, slot=0)]
    mirror.handle(zm.Copied(digest=5), now_ns=0)
    (action,) = mirror.handle(zm.Voted(votes=((4, 5), (6, 4))), now_ns=0)
    assert isinstance(action, zm.Fail) and not action.lost
    assert "at place 0 of version 0 of place 1 has digest 0000000000000005" in action.reason


def test_events_out_of_place_are_refused() -> None:
    mirror = zm.Mirror(place=0, ranks=2)
    for event in (zm.AllHold(version=0), zm.Copied(digest=1), zm.Voted(votes=()), zm.Updated()):
        with pytest.raises(LocalProtocolError):
            mirror.handle(event, now_ns=0)
    wrong = zm.Held(own=(0, None), known=0, copies=(zm.Copy(ward=2, version=0, digest=0), None))
    with pytest.raises(RemoteProtocolError):
        mirror.handle(zm.Entered(held=(mirror.held, wrong), hosts=(0, 0), place=0), now_ns=0)
    with pytest.raises(LocalProtocolError):
        zm.Mirror(place=2, ranks=2)


@given(
    own=st.tuples(st.sampled_from([None, 0, 6]), st.sampled_from([None, 7])),
    copies=st.tuples(*(st.none() | st.tuples(st.integers(0, 61), st.integers(0, 2**64 - 1)) for _ in "01")),
    places=st.lists(st.integers(0, 2**62), min_size=8, max_size=8),
)
def test_what_a_rank_says_comes_as_it_was_said(
    own: tuple[int | None, int | None],
    copies: tuple[tuple[int, int] | None, tuple[int, int] | None],
    places: list[int],
) -> None:
    first, second = (
        None if copy is None else zm.Copy(ward=copy[0], version=6 + slot, digest=copy[1])
        for slot, copy in enumerate(copies)
    )
    handles = tuple(
        RegionHandle(slot=3, incarnation=2, offset=offset, nbytes=nbytes, writable=False)
        for offset, nbytes in zip(places[::2], places[1::2], strict=True)
    )
    said = HoldingsRow(held=zm.Held(own=own, known=5, copies=(first, second)), handles=handles)
    assert HoldingsRow.decoded(said.encoded(), 3, 2) == said


@given(st.lists(st.integers(0, 2**64 - 1), min_size=0, max_size=20))
def test_whatever_numbers_a_peer_sends_are_a_row_or_refused(numbers: list[int]) -> None:
    padded = np.array(numbers + [0] * (ROW_NUMBERS - len(numbers)), np.uint64)
    for row in (padded[:ROW_NUMBERS], padded[:-1]):
        try:
            found = HoldingsRow.decoded(row, 0, 1)
        except RemoteProtocolError:
            continue
        assert found.held.known < 2**41
