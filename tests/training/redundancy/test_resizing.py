"""A sharded state that goes on with other ranks: killed between any two moves, it is recut, and whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.cut_events import (
    Cut,
    Divide,
    EnteredCut,
    Forget,
    HeldCut,
    Keeps,
    Reshard,
    Resharded,
)
from zbmd.training.redundancy.holdings import Copy, Held, Source
from zbmd.training.redundancy.holdings_row import HoldingsRow
from zbmd.training.redundancy.left_memory import LeftMemory
from zbmd.training.redundancy.resizing import (
    RESIZING_MIRROR,
    Action,
    CutChoice,
    Event,
    ResizingMirror,
    choose_cut,
    resizing_config,
)
from zbmd.training.redundancy.stamped import StampedSlots, StateName, digest_of
from zbmd.training.scenarios.commit import build
from zbmd.training.scenarios.world import CommitOptions, CommitWorld
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.sim import Crash, Fault, KillPoint
from zbmd.transport.sim.model import SimulationFailure

SPAN_NS = 400_000_000
"""About as long as a run lasts."""
KILLS = st.lists(st.tuples(st.integers(0, SPAN_NS), st.integers(0, 4)), max_size=6)
"""When which rank is killed."""


def sharded(
    ranks: int,
    steps: int,
    *,
    late: bool = False,
    per_host: int = 0,
    first: int = 0,
    mesh: str = "",
    files: bool = False,
    kept: bool = False,
) -> CommitOptions:
    return CommitOptions(
        world_size=ranks,
        steps=steps,
        sharded=True,
        shrink=True,
        late=late,
        per_host=per_host,
        first=first,
        mesh=mesh,
        files=files,
        kept=kept,
    )


def run(
    seed: int,
    options: CommitOptions,
    faults: Sequence[Fault],
    points: tuple[KillPoint, ...] = (),
    machine: type[ResizingMirror] = ResizingMirror,
) -> CommitWorld:
    """Run a job to its end: what must hold in between is checked by the world."""
    simulation, world = build(seed, options)
    world.resizing = machine
    for fault in faults:
        simulation.apply(fault)
    for point in points:
        simulation.crash_during(point)
    simulation.run(until=lambda: world.is_over)
    assert world.is_over or world.finished
    if not world.state_lost:
        world.check_ledger()
    return world


@pytest.mark.parametrize(
    ("ranks", "mesh", "late", "left", "seed"),
    [
        (2, "", False, "", 19),
        (3, "", False, "kept", 26),
        (4, "", True, "", 7),
        (4, "dp=2,tp=2", False, "", 11),
        (4, "pp=2,dp=2", True, "kept", 5),
        (6, "dp=3,pp=2", True, "", 3),
        (3, "", False, "files", 26),
        (4, "dp=2,tp=2", False, "files", 11),
    ],
)
def test_a_kill_at_any_moment_loses_nothing(ranks: int, mesh: str, late: bool, left: str, seed: int) -> None:
    files, kept = left == "files", left == "kept"
    options, ways = sharded(ranks, 2, late=late, mesh=mesh, files=files, kept=kept), Counter[str]()
    calm, _ = build(seed, options)
    calm.run()
    points = calm.kill_faults([f"rank{rank}" for rank in range(ranks)])
    points = points[:: max(1, ranks - 2)]
    assert len(points) > 100
    for point in points:
        world = run(seed, options, [point])
        assert not world.state_lost and set(world.ended.values()) == {options.last}, point
        ways.update(world.ways)
    assert ways["reshards"] > len(points) // 3
    assert (ways["lends"] > len(points) // 9) == bool(mesh), "a rank that waits lends what it holds"


class Alone(ResizingMirror):
    """A planted bug: what those hold that wait beside does not count."""

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        if isinstance(event, EnteredCut) and event.place < len(event.held):
            event = replace(event, beside=())
        return super().handle(event, now_ns=now_ns)


@pytest.mark.parametrize("files", [False, True], ids=["copies", "files"])
def test_what_is_held_beside_the_members_is_needed(files: bool) -> None:
    """Rank 3 is killed: rank 2 waits, whose part has its copy at rank 3; or both parts are in files."""
    options = sharded(4, 3, mesh="dp=2,tp=2", files=files)
    calm, _ = build(2, options)
    calm.run()
    ours = [point for point in calm.kill_points() if point.process == "rank3"]
    half = ours[len(ours) // 2]
    assert not run(2, options, [], (half,)).state_lost
    with pytest.raises(SimulationFailure, match="is said to be lost, and all of it is here"):
        run(2, options, [], (half,), Alone)


MESHES = [*((ranks, "") for ranks in range(1, 6)), (4, "dp=2,tp=2"), (4, "pp=2,dp=2"), (6, "tp=2,dp=3")]


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from(MESHES),
    per_host=st.integers(0, 5),
    first=st.integers(0, 2),
    late=st.booleans(),
    left=st.sampled_from(["", "files", "kept"]),
    kills=KILLS,
)
def test_any_kills_lose_only_what_is_nowhere_left(
    seed: int,
    size: tuple[int, str],
    per_host: int,
    first: int,
    late: bool,
    left: str,
    kills: list[tuple[int, int]],
) -> None:
    ranks, mesh = size
    files, kept = left == "files", left == "kept"
    options = sharded(ranks, 4, late=late, per_host=per_host, first=first, mesh=mesh, files=files, kept=kept)
    faults = [Crash(process=f"rank{rank % ranks}", at_ns=at_ns, for_ns=0) for at_ns, rank in sorted(kills)]
    world = run(seed, options, faults)
    assert world.is_over or set(world.ended.values()) == {options.last}


def second_kills(
    machine: type[ResizingMirror],
    *,
    victims: Sequence[str] = ("rank1", "rank2", "rank3"),
    files: bool = False,
    kept: bool = False,
) -> Iterator[tuple[str, bool]]:
    """Rank 0 is killed, then another at every later point: yield which one, and whether the state is lost."""
    seed, options = 29, sharded(4, 3, files=files, kept=kept)
    calm, _ = build(seed, options)
    calm.run()
    ours = [point for point in calm.kill_points() if point.process == "rank0"]
    first = ours[len(ours) * 3 // 4]
    disturbed, _ = build(seed, options)
    disturbed.crash_during(first)
    disturbed.run()
    for point in disturbed.kill_points():
        if point.process in victims and point > first:
            world = run(seed, options, [], (first, point), machine)
            assert world.state_lost or set(world.ended.values()) == {options.last}, point
            yield point.process, world.state_lost


def test_another_rank_may_be_lost_while_the_state_is_recut() -> None:
    """Rank 1 has the copies of rank 0, and that those of rank 3."""
    ended = Counter(second_kills(ResizingMirror))
    assert ended["rank2", True] == 0 and ended["rank2", False] > 100
    assert ended["rank1", False] > 50 and ended["rank3", False] > 50


@pytest.mark.parametrize("left", ["files", "kept"])
def test_what_is_left_outlives_any_two_ranks_while_the_state_is_recut(left: str) -> None:
    """In files, or in memory that a snapshot process holds: also of a rank and its buddy."""
    ended = Counter(second_kills(ResizingMirror, files=left == "files", kept=left == "kept"))
    assert not any(lost for _, lost in ended) and ended.total() > 200


class Hasty(ResizingMirror):
    """A planted bug: what was cut before is given back as soon as the new part is there."""

    def _resharded(self, event: Resharded, now_ns: int) -> list[Action]:
        actions = super()._resharded(event, now_ns)
        if self.older is not None:
            self.older = None
            actions.append(Forget())
        return actions


def test_what_was_cut_before_is_needed_until_all_have_copies() -> None:
    assert any(lost for _, lost in second_kills(Hasty, victims=["rank2"]))


def test_a_mirror_goes_on_from_any_of_its_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each event, a second machine is restored from the state of the first: its actions are equal."""
    handle, states, followed = ResizingMirror.handle, RESIZING_MIRROR.states, 0

    def followed_handle(machine: ResizingMirror, event: Event, *, now_ns: int) -> list[Action]:
        nonlocal followed
        follower = RESIZING_MIRROR.build(resizing_config(machine))
        assert states is not None and isinstance(follower, ResizingMirror)
        states.restore(follower, states.encode(machine))
        answer = handle(machine, event, now_ns=now_ns)
        assert handle(follower, event, now_ns=0) == answer
        assert states.encode(follower) == states.encode(machine)
        followed += 1
        return answer

    monkeypatch.setattr(ResizingMirror, "handle", followed_handle)
    for seed in range(12):
        kills = [Crash(process=f"rank{seed % 3}", at_ns=50_000_000 + 9_000_000 * seed, for_ns=0)]
        run(seed, sharded(3, 4, late=seed % 2 == 0), kills)
    assert followed > 500


# ---- the choice


def held(
    made: int,
    parts: int,
    part: int,
    *own: int,
    copies: tuple[Copy, ...] = (),
    known: int = 0,
    digest: int = 0,
    first: int = 0,
) -> HeldCut:
    slots, kept = [None, None], [None, None]
    for version in own:
        slots[version % 2] = version  # type: ignore[call-overload]
    for copy in copies:
        kept[copy.version % 2] = copy  # type: ignore[call-overload]
    return HeldCut(
        held=Held(
            own=(slots[0], slots[1]), known=known, copies=(kept[0], kept[1]), first=first, digest=digest
        ),
        cut=Cut(made=made, parts=parts, part=part),
    )


def test_the_parts_of_the_dead_are_read_from_copies() -> None:
    copied = Copy(ward=1, version=4, digest=7)
    found = choose_cut(
        [held(2, 3, 0, 4, known=4, digest=5), held(2, 3, 2, 4, copies=(copied,), known=4, digest=6)], epoch=9
    )
    assert isinstance(found, CutChoice) and (found.version, found.made, found.old) == (4, 9, 2)
    assert [part.source for part in found.parts] == [
        Source(place=0, slot=0, digest=5, own=True),
        Source(place=1, slot=0, digest=7),
        Source(place=1, slot=0, digest=6, own=True),
    ]


def test_a_cut_of_as_many_parts_stays_where_its_parts_are_in_place() -> None:
    copied = Copy(ward=0, version=4, digest=7)
    new = held(0, 2, 0)
    found = choose_cut([new, held(5, 2, 1, 4, copies=(copied,), known=4)], epoch=9)
    assert isinstance(found, CutChoice) and (found.made, found.parts) == (5, ())
    assert found.sources == (Source(place=1, slot=0, digest=7), None)
    moved = choose_cut([held(5, 2, 1, 4, copies=(copied,), known=4), new], epoch=9)
    assert isinstance(moved, CutChoice) and moved.made == 9 and len(moved.parts) == 2


def test_what_is_recut_without_a_rank_is_read_from_the_cut_before() -> None:
    """Of the newer cut a part is lost."""
    copied, other = Copy(ward=2, version=4, digest=7), Copy(ward=3, version=4, digest=3)
    rows = [
        replace(held(6, 3, 0, 4, known=4), older=held(2, 4, 0, 4, copies=(other,))),
        replace(held(6, 3, 2, known=4), older=held(2, 4, 1, 4, copies=(copied,))),
    ]
    found = choose_cut(rows, epoch=9)
    assert isinstance(found, CutChoice) and (found.old, len(found.parts)) == (2, 4)
    assert all(part.older for part in found.parts)


def test_ranks_that_can_all_begin_with_what_was_committed_do() -> None:
    fresh = [held(0, 2, place, 4, known=4, first=4) for place in (0, 1)]
    found = choose_cut(fresh, epoch=3)
    assert found == CutChoice(version=4, made=3, sources=(None, None))


def test_a_part_that_is_nowhere_left_is_named() -> None:
    found = choose_cut([held(2, 3, 0, 4, known=4), held(2, 3, 2, 4, known=4)], epoch=9)
    assert isinstance(found, zm.Lost) and found.places == (1,)
    assert "of parts 1 of its state neither originals nor copies are left" in found.reason


def test_what_others_read_here_is_compared_with_what_was_voted_for() -> None:
    mirror = ResizingMirror(place=0, ranks=2)
    assert mirror.handle(entered(mirror, held(0, 2, 1)), now_ns=0) == [zm.StartAnew(), zm.Resume(version=0)]
    for version in (0, 1):
        mirror.handle(zm.AllHold(version=version), now_ns=0)
        mirror.handle(zm.Copied(digest=5), now_ns=0)
        mirror.handle(zm.Voted(votes=((4, 5), (5, 4))), now_ns=0)
        mirror.handle(zm.Updated(), now_ns=0)
    mirror.handle(zm.EpochOver(), now_ns=0)
    alone = EnteredCut(held=(mirror.report(1),), hosts=(0,), place=0, epoch=3)
    divide, reshard = mirror.handle(alone, now_ns=0)
    assert divide == Divide(parts=1, part=0, keeps=Keeps.OWN)
    assert isinstance(reshard, Reshard) and len(reshard.sources) == 2
    (failed,) = mirror.handle(Resharded(digest=8, given=(3, 5)), now_ns=0)
    assert isinstance(failed, zm.Fail) and not failed.lost
    assert (
        "part 0 of the state that is recut, which others read at place 0, has digest 0000000000000003"
        in failed.reason
    )


def test_the_files_of_the_dead_are_read_beside_those_of_ranks_that_live() -> None:
    mirror = ResizingMirror(place=0, ranks=2, outlives=True)
    mirror.handle(entered(mirror, held(0, 2, 1)), now_ns=0)
    for version in (0, 1):
        mirror.handle(zm.AllHold(version=version), now_ns=0)
        assert mirror.handle(zm.Voted(votes=((4, 4), (5, 5))), now_ns=0) == [
            zm.Commit(version=version, digests=(4, 5))
        ]
        mirror.handle(zm.Updated(), now_ns=0)
    mirror.handle(zm.EpochOver(), now_ns=0)
    report, dead = mirror.report(1), held(1, 2, 1, 1)
    both = EnteredCut(held=(report,), beside=(dead,), hosts=(0,), place=0, epoch=3)
    divide, reshard = mirror.handle(both, now_ns=0)
    assert divide == Divide(parts=1, part=0, keeps=Keeps.OWN)
    assert isinstance(reshard, Reshard) and [one.source.place for one in reshard.sources] == [0, 1]
    assert not any(one.older for one in reshard.sources)
    mirror.handle(Resharded(digest=8, given=(4,)), now_ns=0)
    mirror.handle(zm.AllHold(version=1), now_ns=0)
    assert mirror.handle(zm.Voted(votes=((8, 8),)), now_ns=0) == [
        zm.Commit(version=1, digests=(8,)),
        Forget(),
    ]


def test_a_part_whose_file_is_gone_is_named() -> None:
    mirror = ResizingMirror(place=0, ranks=1, known=3, outlives=True)
    event = EnteredCut(held=(held(1, 2, 0, 3, known=3),), hosts=(0,), place=0, epoch=3)
    (failed,) = mirror.handle(event, now_ns=0)
    assert isinstance(failed, zm.Fail) and failed.lost and "parts 1" in failed.reason
    assert zm.LOST_WITH_FILE in failed.reason


def entered(mirror: ResizingMirror, other: HeldCut) -> EnteredCut:
    return EnteredCut(held=(mirror.report(0), other), hosts=(0, 0), place=0, epoch=1)


@pytest.mark.parametrize(
    "wrong",
    [
        held(0, 2, 2),
        held(0, 2, 1, copies=(Copy(ward=2, version=0, digest=1),)),
        replace(held(1, 2, 1), older=held(9, 2, 1)),
    ],
)
def test_an_impossible_report_is_refused(wrong: HeldCut) -> None:
    mirror = ResizingMirror(place=0, ranks=2)
    event = EnteredCut(held=(mirror.report(0), wrong), hosts=(0, 0), place=0, epoch=3)
    with pytest.raises(RemoteProtocolError):
        mirror.handle(event, now_ns=0)


def test_epochs_go_forward() -> None:
    mirror = ResizingMirror(place=0, ranks=2)
    with pytest.raises(LocalProtocolError):
        mirror.handle(EnteredCut(held=(mirror.report(0),) * 2, hosts=(0, 0), place=0, epoch=0), now_ns=0)


@given(places=st.lists(st.integers(0, 2**62), min_size=16, max_size=16), parts=st.integers(1, 2**16))
def test_what_a_rank_says_of_both_cuts_comes_as_it_was_said(places: list[int], parts: int) -> None:
    handles = tuple(
        RegionHandle(slot=3, incarnation=2, offset=offset, nbytes=nbytes, writable=False)
        for offset, nbytes in zip(places[::2], places[1::2], strict=True)
    )
    copied = Copy(ward=parts - 1, version=6, digest=2**64 - 1)
    older = held(3, parts, parts - 1, 6, 7, copies=(copied,), known=6, digest=2**63)
    now = held(5, 2, 1, 6)
    kept = HoldingsRow(held=older.held, handles=handles[4:], cut=older.cut)
    said = HoldingsRow(held=now.held, handles=handles[:4], cut=now.cut, older=kept)
    decoded = HoldingsRow.decoded(said.encoded(), 3, 2)
    assert decoded == said and decoded.of_cut() == replace(now, older=older)


def test_a_rank_goes_on_in_the_part_that_its_predecessor_left() -> None:
    """Epochs of a new launcher begin at one: the cut before has a higher number, the next one a higher."""
    found = ResizingMirror(place=0, ranks=2, known=4, own=(4, 3), made=7)
    other = held(7, 2, 1, 4, 3, known=4)
    (resumed,) = found.handle(entered(found, other), now_ns=0)
    assert resumed == zm.Resume(version=4) and found.cut == Cut(made=7, parts=2, part=0)

    alone = ResizingMirror(place=0, ranks=1, known=4)
    event = EnteredCut(
        held=(alone.report(0),),
        hosts=(0,),
        place=0,
        epoch=1,
        beside=(held(7, 2, 1, 4, 3), held(7, 2, 0, 4)),
    )
    (reshard,) = alone.handle(event, now_ns=0)
    assert isinstance(reshard, Reshard) and reshard.version == 4
    assert [one.source.place for one in reshard.sources] == [2, 1], "what the dead left is reported beside"
    assert alone.cut == Cut(made=8, parts=1, part=0)
    with pytest.raises(LocalProtocolError, match="never made"):
        ResizingMirror(place=0, ranks=1, own=(4, None))


def test_memory_of_the_dead_counts_only_if_its_digest_is_right() -> None:
    name = StateName(run=1, place=0, ranks=2, elements=100)
    memory = np.zeros(name.nbytes, np.uint8)
    slots = StampedSlots(memory, name)
    for version in (4, 5):
        slots.slots[version % 2][:] = version
        slots.end(version % 2, version, digest_of(slots.slots[version % 2]))
    assert [LeftMemory(memory, name, 4).version_in(slot) for slot in (0, 1)] == [4, 5]
    assert [LeftMemory(memory, name, 5).version_in(slot) for slot in (0, 1)] == [None, 5]
    slots.slots[1][7] = 0
    assert [LeftMemory(memory, name, 4).version_in(slot) for slot in (0, 1)] == [4, None]
