"""The repair machine: seeded runs with kills, every single kill of small runs, and verdicts one by one."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace

import pytest

from zbmd.actors.view import RANKS_MAX, MemberId
from zbmd.collectives.communicator.cost_model import Model
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.events import Failure, Inputs, OnLoss, Outcome, Phase
from zbmd.collectives.repair.machine import RepairMachine, RepairState, VerdictKind, decide
from zbmd.collectives.repair.wire import ExchangedReport, MeasuredModel, decode_report, encode_report
from zbmd.collectives.scenarios.hosted_job import JobOptions
from zbmd.collectives.scenarios.repair import RepairScenario, build
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

FRESH = random.SystemRandom().randrange(2**32)
NOBODY: frozenset[int] = frozenset()
SUM = rm.Call(text="sum", on_loss=OnLoss.SURVIVORS, inputs=Inputs.PRESERVE)


def members(*ranks: int) -> tuple[MemberId, ...]:
    return tuple(MemberId(rank=rank, incarnation=1) for rank in ranks)


def report(sequence: int, phase: Phase, *, call: rm.Call = SUM, failed: rm.Failed | None = None) -> rm.Report:
    return rm.Report(
        born=1,
        sequence=sequence,
        phase=phase,
        call=None if phase is Phase.IDLE else call,
        attempted=members(0, 1, 2),
        contributors=members(0, 1, 2) if phase is Phase.HELD else (),
        failed=failed,
    )


FRESH_REPORT = rm.Report(born=0, sequence=1, phase=Phase.IDLE)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("shrink", [False, True])
def test_seeded_kills(world_size: int, shrink: bool) -> None:
    print(f"fresh seeds from {FRESH}")
    for index in range(40):
        options = JobOptions(world_size=world_size, steps=4, kills=index % 5, shrink=shrink)
        world = RepairScenario().run(FRESH + index, options)
        if options.kills == 0:
            assert world.finished == set(range(world_size))
            assert {sequence for _, sequence in {**world.returned, **world.raised}} == {1, 2, 3, 4}
            failures = {failed.failure for by in world.raised.values() for failed in by.values()}
            assert failures <= {Failure.SPOILED}, "links may be lost: nobody has died"


def test_every_single_kill_of_small_runs_and_all_ways_of_repair() -> None:
    print(f"fresh seeds from {FRESH}")
    ways: set[str] = set()
    for seed in range(FRESH, FRESH + 12):
        options = JobOptions(world_size=2 + seed % 2, steps=1, kills=0, shrink=seed % 4 == 0)
        undisturbed, _ = build(seed, options)
        undisturbed.run()
        points = [point for point in undisturbed.kill_points() if point.process != "node"]
        assert len(points) > 20
        for point in points:
            simulation, world = build(seed, options)
            simulation.crash_during(point)
            simulation.run()
            left = [rank for rank in range(options.world_size) if simulation.lives(f"rank{rank}")]
            assert not left, (seed, point)
            ways |= world.ways
    assert ways, "no kill struck an operation"


def test_the_same_seed_gives_the_same_history() -> None:
    first, _ = build(11, JobOptions())
    second, _ = build(11, JobOptions())
    first.run()
    second.run()
    assert first.digest() == second.digest()


def test_a_result_that_one_holds_is_copied() -> None:
    reports = {0: report(3, Phase.PENDING), 1: report(3, Phase.HELD)}
    verdict = decide(2, members(0, 1), reports, NOBODY)
    assert (verdict.kind, verdict.source, verdict.runners) == (VerdictKind.COPY, 1, (0,))
    assert verdict.contributors == members(0, 1, 2)


def test_what_each_has_for_itself_is_made_again_by_all_who_live() -> None:
    own = replace(SUM, own=True)
    held, pending = report(3, Phase.HELD, call=own), report(3, Phase.PENDING, call=own)
    verdict = decide(2, members(0, 1), {0: held, 1: pending}, NOBODY)
    assert (verdict.kind, verdict.runners, verdict.contributors) == (VerdictKind.RERUN, (0, 1), members(0, 1))
    assert decide(2, members(0, 1), {0: held, 1: held}, NOBODY).kind is VerdictKind.COMPLETE
    rooted = replace(own, needs=2)
    reports = {0: replace(held, call=rooted), 1: replace(pending, call=rooted)}
    failed = decide(2, members(0, 1), reports, NOBODY).failed
    assert failed is not None and failed.failure is Failure.LOST


def test_what_nobody_holds_is_made_again_by_the_living() -> None:
    reports = {0: report(3, Phase.PENDING), 1: report(3, Phase.PENDING), 2: FRESH_REPORT}
    back = (*members(0, 1), MemberId(rank=2, incarnation=2))
    verdict = decide(2, back, reports, NOBODY)
    assert (verdict.kind, verdict.runners, verdict.contributors) == (VerdictKind.RERUN, (0, 1), members(0, 1))


def test_a_published_contribution_of_the_dead_counts() -> None:
    adopting = replace(SUM, inputs=Inputs.ADOPT)
    one, other = (report(3, Phase.PENDING, call=adopting) for _ in range(2))
    verdict = decide(2, members(0, 1), {0: one, 1: replace(other, readable=members(2))}, NOBODY)
    assert verdict.adopted == (rm.Adoption(member=members(2)[0], carrier=1),)
    assert verdict.contributors == members(0, 1, 2)


def test_spoiled_inputs_fail_on_all() -> None:
    in_place = replace(SUM, inputs=Inputs.RECOMPUTE)
    reports = {r: report(3, phase, call=in_place) for r, phase in enumerate((Phase.PENDING, Phase.SPOILED))}
    verdict = decide(2, members(0, 1), reports, NOBODY)
    assert verdict.failed is not None and verdict.failed.failure is Failure.SPOILED
    assert "rank 2 died in it; the inputs of ranks [1] are overwritten" in verdict.reason


@pytest.mark.parametrize(("gone", "kind"), [((), VerdictKind.WAIT), ((2,), VerdictKind.FAIL)])
def test_waiting_for_a_replacement(gone: tuple[int, ...], kind: VerdictKind) -> None:
    waiting = replace(SUM, on_loss=OnLoss.WAIT_FOR_REPLACEMENT)
    reports = {rank: report(3, Phase.PENDING, call=waiting) for rank in (0, 1)}
    assert decide(2, members(0, 1), reports, frozenset(gone)).kind is kind
    back = (*members(0, 1), MemberId(rank=2, incarnation=2))
    verdict = decide(3, back, {**reports, 2: FRESH_REPORT}, frozenset())
    assert (verdict.kind, verdict.sequence) == (VerdictKind.RUN, 3)


def test_abort_completes_only_what_all_the_living_hold() -> None:
    abort = replace(SUM, on_loss=OnLoss.ABORT)
    held, pending = report(3, Phase.HELD, call=abort), report(3, Phase.PENDING, call=abort)
    assert decide(2, members(0, 1), {0: held, 1: held}, NOBODY).kind is VerdictKind.COMPLETE
    failed = decide(2, members(0, 1), {0: held, 1: pending}, NOBODY).failed
    assert failed is not None and failed.failure is Failure.LOST
    cut = decide(2, members(0, 1, 2), {0: held, 1: pending, 2: pending}, NOBODY)
    assert (cut.kind, cut.source) == (VerdictKind.COPY, 0), "a link was lost, and nobody has died"


def test_who_is_behind_follows_who_has_gone_on() -> None:
    ahead = report(4, Phase.PENDING)
    assert decide(2, members(0, 1), {0: ahead, 1: report(3, Phase.HELD)}, NOBODY).kind is VerdictKind.COMPLETE
    failed = rm.Failed(sequence=3, failure=Failure.SPOILED, reason="gone")
    verdict = decide(
        2, members(0, 1), {0: replace(ahead, failed=failed), 1: report(3, Phase.SPOILED)}, NOBODY
    )
    assert (verdict.kind, verdict.failed) == (VerdictKind.FAIL, failed)
    with pytest.raises(RemoteProtocolError, match="have no result of it"):
        decide(2, members(0, 1), {0: ahead, 1: report(3, Phase.PENDING)}, NOBODY)
    with pytest.raises(RemoteProtocolError, match="cannot be so far apart"):
        decide(2, members(0, 1), {0: report(5, Phase.PENDING), 1: report(3, Phase.HELD)}, NOBODY)


def test_a_replacement_tells_of_a_failure_that_others_have_not_heard_of() -> None:
    abort = report(2, Phase.PENDING, call=replace(SUM, on_loss=OnLoss.ABORT))
    back = (*members(0), MemberId(rank=1, incarnation=2))
    newcomer = RepairMachine(rank=1)
    newcomer.handle(rm.EpochEntered(epoch=2, members=back), now_ns=0)
    newcomer.handle(rm.Exchanged(epoch=2, reports=(abort, FRESH_REPORT)), now_ns=0)
    newcomer.handle(rm.FollowAsked(), now_ns=0)
    (exchange,) = newcomer.handle(rm.EpochEntered(epoch=3, members=back), now_ns=0)
    assert isinstance(exchange, rm.Exchange)
    verdict = decide(3, back, {0: abort, 1: exchange.report}, NOBODY)
    assert verdict.failed is not None and verdict.failed.failure is Failure.LOST


def test_calls_that_differ_are_told() -> None:
    other = report(3, Phase.PENDING, call=replace(SUM, text="max"))
    verdict = decide(2, members(0, 1), {0: report(3, Phase.PENDING), 1: other}, NOBODY)
    assert verdict.failed is not None and verdict.failed.failure is Failure.DESYNCHRONISED
    assert "rank 0 called sum; rank 1 called max" in verdict.reason


def test_a_view_that_is_followed_between_operations() -> None:
    """Rank 0 has called nothing; rank 1 has called an operation that rank 0 never entered: it runs again."""
    both = [RepairMachine(rank=rank) for rank in range(2)]
    for machine in both:
        machine.handle(rm.EpochEntered(epoch=1, members=members(0, 1)), now_ns=0)
        machine.handle(rm.Exchanged(epoch=1, reports=(FRESH_REPORT,) * 2), now_ns=0)
    assert both[0].handle(rm.FollowAsked(), now_ns=0) == [rm.AwaitView(after=1)]
    both[1].handle(rm.Called(call=SUM), now_ns=0)
    both[1].handle(rm.Ended(epoch=1, outcome=Outcome.INTACT), now_ns=0)
    grown = (*members(0, 1), MemberId(rank=2, incarnation=1))
    told: list[rm.Report] = []
    for machine in both:
        (exchange,) = machine.handle(rm.EpochEntered(epoch=2, members=grown), now_ns=0)
        assert isinstance(exchange, rm.Exchange)
        told.append(exchange.report)
    reports = (*told, FRESH_REPORT)
    ends = [machine.handle(rm.Exchanged(epoch=2, reports=reports), now_ns=0) for machine in both]
    assert ends == [[rm.Settled(epoch=2, sequence=1)], [rm.Run(epoch=2, sequence=1)]]


def test_an_operation_whose_root_is_absent_fails_on_all_together() -> None:
    machine = RepairMachine(rank=0)
    machine.handle(rm.EpochEntered(epoch=1, members=members(0, 1)), now_ns=0)
    machine.handle(rm.Exchanged(epoch=1, reports=(FRESH_REPORT,) * 2), now_ns=0)
    call = replace(SUM, needs=2)
    assert machine.handle(rm.Called(call=call), now_ns=0) == [rm.Confirm(epoch=1, sequence=1)]
    machine.check_invariants()
    cut = deepcopy(machine)
    (told,) = machine.handle(rm.Ended(epoch=1, outcome=Outcome.COMMITTED), now_ns=0)
    assert isinstance(told, rm.Raise)
    assert (told.failed.failure, told.failed.ranks, told.failed.sequence) == (Failure.LOST, (2,), 1)
    assert (machine.state, machine.sequence) == (RepairState.IDLE, 2)
    # A rank that was cut off before it knew that all are there holds nothing; the others tell it.
    assert cut.handle(rm.Ended(epoch=1, outcome=Outcome.HELD), now_ns=0) == [rm.AwaitView(after=1)]
    assert cut.phase is Phase.PENDING
    reports: list[rm.Report] = []
    for one in (cut, machine):
        if one is machine:
            one.handle(rm.FollowAsked(), now_ns=0)
        (exchange,) = one.handle(rm.EpochEntered(epoch=2, members=members(0, 1)), now_ns=0)
        assert isinstance(exchange, rm.Exchange)
        reports.append(exchange.report)
    assert cut.handle(rm.Exchanged(epoch=2, reports=tuple(reports)), now_ns=0) == [told]


def test_misuse_is_told_with_the_story() -> None:
    machine = RepairMachine(rank=0)
    with pytest.raises(LocalProtocolError, match="it is NEW"):
        machine.handle(rm.Called(call=SUM), now_ns=0)
    machine.handle(rm.EpochEntered(epoch=1, members=members(0, 1)), now_ns=0)
    with pytest.raises(LocalProtocolError, match="1 reports of 2 members"):
        other = RepairMachine(rank=0)
        other.handle(rm.EpochEntered(epoch=1, members=members(0, 1)), now_ns=0)
        other.handle(rm.Exchanged(epoch=1, reports=(FRESH_REPORT,)), now_ns=0)
    with pytest.raises(LocalProtocolError, match="cannot follow"):
        machine.handle(rm.EpochEntered(epoch=2, members=members(1)), now_ns=0)
    machine.handle(rm.ExchangeCut(epoch=1), now_ns=0)
    assert machine.handle(rm.NoView(), now_ns=0) == [rm.GaveUp(sequence=1)]
    assert machine.state is RepairState.OVER
    machine.check_invariants()


@pytest.mark.parametrize("ranks", [2, 62, RANKS_MAX])
def test_the_longest_report_comes_as_it_was_sent(ranks: int) -> None:
    members = tuple(MemberId(rank=rank, incarnation=2**32 - 1) for rank in range(ranks))
    failed = rm.Failed(sequence=2**47, failure=Failure.LOST, reason="é" * 120, ranks=tuple(range(ranks)))
    call = rm.Call(text="x" * 240, on_loss=OnLoss.SURVIVORS, inputs=Inputs.ADOPT, needs=ranks - 1, own=True)
    said = rm.Report(
        born=2**47,
        sequence=2**47,
        phase=Phase.PENDING,
        call=call,
        attempted=members,
        contributors=members,
        readable=members,
        failed=failed,
    )
    model = Model(alpha_ns=1e11 / 3, beta_ns_per_byte=1e11 / 3, gamma_ns_per_byte=1e11 / 3, cores=65535)
    told = ExchangedReport(
        report=said, record_at=2**47, measured=MeasuredModel(model=model, far=True), reading=2**47
    )
    assert decode_report(encode_report(told, ranks=ranks), 1) == told
