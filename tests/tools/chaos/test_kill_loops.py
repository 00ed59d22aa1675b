"""Kills of resilient loops: what is drawn, what counts as undisturbed, and a short run over real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.tools.chaos.loop_case import LOSSES
from zbmd.tools.chaos.loops import (
    SETTINGS,
    LoopSetting,
    difference,
    difference_of_fewer,
    drawn,
    main,
    reports_in,
    verdict_on_end,
)
from zbmd.tools.chaos.sweep import Ledger
from zbmd.transport import kill_points as faults

WANTED = [f"{kind} rank {rank}: aa" for kind in ("step 1", "step 2", "final") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("told", "fault", "wrong"),
    [
        (WANTED, "rank0:loop.begin:1", ""),
        ([line for line in WANTED if line != "step 1 rank 0: aa"], "rank0:loop.begin:1", ""),
        ([line for line in WANTED if line != "step 1 rank 1: aa"], "rank0:loop.begin:1", "not reported"),
        ([line for line in WANTED if line != "final rank 0: aa"], "rank0:loop.begin:1", "not reported"),
        ([*WANTED, "step 2 rank 0: aa"], "rank0:loop.begin:1", "reported twice: step 2 rank 0"),
        ([*WANTED, "step 2 rank 0: bb"], "rank0:loop.begin:1", "reported differently: step 2 rank 0: bb"),
    ],
)
def test_a_run_is_as_an_undisturbed_one_but_for_what_the_killed_had_to_say(
    told: list[str], fault: str, wrong: str
) -> None:
    assert reports_in(["[rank0]: step 1 rank 0: aa", "a word"]) == ["step 1 rank 0: aa"]
    found = difference(told, WANTED, fault)
    assert found.startswith(wrong) and bool(found) == bool(wrong)


LATE = "UserError: rank 1 finished its script: no process group can be made any more"
LOST = "LoopLost: ranks 2 and 0 are lost together"


@pytest.mark.parametrize(
    ("kind", "fault", "said", "verdict"),
    [
        ("ddp", "rank0:loop.voted:9", [LATE, *WANTED], "late, and said so"),
        ("ddp", "rank0:loop.voted:9", [LATE, *WANTED[:-1]], "failed"),
        ("ddp", "rank0:loop.voted:9", WANTED, "failed"),
        ("ddp", "rank0:loop.voted:9,rank1:loop.voted:9", [LATE], "failed"),
        ("fsdp", "rank0:loop.begin:1,rank1:loop.begin:1", [LOST], "lost, and said so"),
        ("fsdp", "rank0:loop.begin:1", [LOST], "failed"),
    ],
)
def test_a_loop_may_end_where_nobody_is_left_to_recover_from(
    kind: str, fault: str, said: list[str], verdict: str
) -> None:
    """Those that live have reported all: a replacement that comes after their end finds nobody."""
    setting = LoopSetting(kind=kind, mode="plain")
    assert verdict_on_end(setting, fault, "\n".join(said), WANTED) == verdict


@pytest.mark.parametrize(
    ("shrinks", "steps", "verdict"),
    [(True, [], "lost, and said so"), (True, WANTED[:1], "failed"), (False, [], "failed")],
)
def test_a_loop_that_replaces_nobody_may_lose_a_shard_before_its_first_step(
    shrinks: bool, steps: list[str], verdict: str
) -> None:
    setting = LoopSetting(kind="fsdp", mode="plain", shrinks=shrinks)
    said = [*steps, "LoopLost: rank 0 is lost before rank 1 had a copy of its shard: start the run again"]
    assert verdict_on_end(setting, "rank0:collective.point:571", "\n".join(said), WANTED) == verdict


@pytest.mark.parametrize(("shrinks", "verdict"), [(True, "late, and said so"), (False, "failed")])
def test_a_script_may_end_by_a_loss_outside_of_its_loop(shrinks: bool, verdict: str) -> None:
    setting = LoopSetting(kind="fsdp", mode="plain", shrinks=shrinks)
    said = "line 145, in tell_whole\n    whole = [\nDistBackendError: MembersLost: peer rank0 lost"
    assert verdict_on_end(setting, "rank0:loop.done:8", said, WANTED) == verdict


def test_kills_of_loops_are_drawn_alone_and_in_pairs() -> None:
    setting, passes = LoopSetting(kind="ddp", mode="plain"), [{"loop.begin": 9, "collective.point": 99}] * 3
    cases = drawn(setting, passes, 40, 1)
    assert cases == drawn(setting, passes, 40, 1) != drawn(setting, passes, 40, 2)
    assert len(set(cases)) == 40 and [len(faults.parse(case)) for case in cases].count(2) == 18
    assert any(case.endswith("#2:loop.take:1") for case in cases)
    runs = [one.case(out=Path(), data=Path(), fault="", counts=None) for one in SETTINGS]
    assert all(each.program.exists() for each in runs)


def test_kills_of_loops_that_shrink_are_of_ranks_that_are_there() -> None:
    """None is of a replacement, and some are of ranks that divide the state."""
    setting = LoopSetting(kind="fsdp", mode="plain", ranks=4, shrinks=True)
    cases = drawn(setting, [{"loop.begin": 9, "collective.point": 99}] * 4, 60, 1)
    assert not any("#2" in case for case in cases)
    assert any(case.endswith(("loop.divided:1", "loop.agreed:1")) for case in cases)


CALM = f"[rank0]: rank 0 ends with aa\n{LOSSES}1.0 0.5"


@pytest.mark.parametrize(
    ("kind", "told", "left", "wrong"),
    [
        ("ddp", CALM, 1, ""),
        ("ddp", CALM, 2, "2 ranks are left"),
        ("ddp", f"rank 1 ends with aa\n{CALM}", 2, ""),
        ("ddp", f"rank 1 ends with bb\n{CALM}", 2, "2 ranks are left"),
        ("ddp", CALM.replace("aa", "bb"), 1, "it ends with bb"),
        ("ddp", CALM.replace("0.5", "0.50001"), 1, "it ends with aa"),
        ("fsdp", CALM.replace("0.5", "0.50001").replace("aa", "bb"), 1, ""),
        ("fsdp", CALM.replace("0.5", "0.6"), 1, "losses"),
        ("fsdp", CALM.replace(" 0.5", ""), 1, "losses"),
    ],
)
def test_a_loop_that_has_shrunk_is_as_an_undisturbed_one(kind: str, told: str, left: int, wrong: str) -> None:
    found = difference_of_fewer(LoopSetting(kind=kind, mode="plain", shrinks=True), told, CALM, left)
    assert found.startswith(wrong) and bool(found) == bool(wrong)


@pytest.mark.optional
def test_kills_of_a_loop_are_run_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = ["--kills", "2", "--only", "ddp plain n=3", "--ledger", str(tmp_path / "ledger")]
    assert main(wanted) == 0, capfd.readouterr().out
    found = Ledger(tmp_path / "ledger").found
    assert [one.verdict for one in found.values()] == ["same bits"] * 2
    assert "2 cases, 0 of them done before" in capfd.readouterr().out
    assert main([*wanted, "--table"]) == 0


def test_kills_of_loops_that_grow_are_of_newcomers_that_have_come() -> None:
    """Points before they are in the view are left out; two ranks are killed at once in some cases."""
    setting = LoopSetting(kind="grows", mode="fsdp", ranks=4, shrinks=True, newcomers=2)
    passes = [{"loop.begin": 9, "rank.joins": 1}] * 2 + [
        {"loop.comes": 1, "loop.begin": 4, "rank.joins": 1}
    ] * 2
    kills = [faults.parse(case) for case in drawn(setting, passes, 60, 1)]
    assert {one.process for kill in kills for one in kill} == {f"rank{rank}" for rank in range(4)}
    alone = [kill[0] for kill in kills if len(kill) == 1]
    assert any(one.point == "rank.joins" for one in alone)
    assert all(one.process in ("rank0", "rank1") for one in alone if one.point == "rank.joins")
    assert any(len(kill) == 2 and len({(one.point, one.count) for one in kill}) == 1 for kill in kills)


def test_kills_of_mirrored_loops_are_also_in_the_operations_of_their_optimizers() -> None:
    setting = LoopSetting(kind="mirrored", mode="fsdp+muon")
    cases = drawn(setting, [{"loop.updating": 8, "loop.mirroring": 8}] * 3, 60, 1)
    points = {one.point for case in cases for one in faults.parse(case)}
    assert {"test.before_reduce", "test.after_reduce", "loop.updating", "loop.mirroring"} <= points


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [("rank0:loop.begin:4,rank1:loop.begin:4", "lost, and said so"), ("rank0:loop.begin:4", "failed")],
)
def test_a_loop_that_grows_is_lost_with_all_that_it_began_with(fault: str, verdict: str) -> None:
    setting = LoopSetting(kind="grows", mode="ddp", ranks=4, shrinks=True, newcomers=2)
    said = "[rank3]: out/commits.zlog belongs to another run (26a9, seed 1): give …"
    assert verdict_on_end(setting, fault, said, []) == verdict
