"""`zbmd goodput`: each second of each rank has one cause, and they add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.jobs.profiles import WALL, S, encoded, life, step

from zbmd.tools.entry import zbmd as cli
from zbmd.tools.runs.goodput import Cause, RunTime, goodput_of, read_runs, time_of
from zbmd.training.profiler.lines import CutLine, Death, RankProfile, StepLine, lines_path


def seconds(run: RunTime, rank: int) -> dict[str, float]:
    return {str(cause): ns / S for cause, ns in run.ranks[rank].items() if ns}


def killed_run() -> list[RankProfile]:
    """Rank 1 is killed in step 2, at second 16; rank 0 leaves it a second later, and both begin it at 25."""
    cut = CutLine(at_ns=17 * S, deaths=(Death(1, 1, 16 * S),))
    survivor = [
        step(1, 5, 12, comm=3, data=1, checkpoint=2),
        step(2, 12, 25, comm=1),
        step(2, 25, 31, comm=2),
        step(3, 31, 36, idle=1),
    ]
    return [
        life(0, survivor, cuts=(cut,)),
        life(1, [step(1, 6, 12, comm=1)]),
        life(1, [step(2, 25, 31, comm=3), step(3, 31, 36)], incarnation=2, began_s=20),
    ]


def test_a_kill_costs_each_rank_what_it_does() -> None:
    run = time_of(killed_run(), Path("run"))
    assert run.wall_ns == 35 * S
    assert seconds(run, 0) == {
        "start-up": 4,
        "useful step": (7 - 1 - 2 - 2) + 6 + 4,
        "waiting for data": 1,
        "checkpoint stall": 2,
        "straggler wait": 2,  # of step 1: rank 1 waited one second in it, and rank 0 three
        "recomputed step": 4,
        "detection": 1,
        "repair": 8,
        "idle": 1,
    }
    assert seconds(run, 1) == {
        "start-up": 5,
        "useful step": 6 + 5 + 5,
        "straggler wait": 1,
        "recomputed step": 4,
        "restart": 9,
    }
    found = goodput_of([run])
    assert (found.failures, found.mttr_s, found.mtbf_s) == (1, 9.0, 35.0)
    assert found.ettr == pytest.approx((12 + 16) / 70)
    assert found.availability == pytest.approx(1 - 9 / 35)


def test_a_step_that_is_rolled_back_was_for_nothing() -> None:
    """After a loss all go back two steps: the first of them had ended, and is done again."""
    cut = CutLine(at_ns=12 * S, deaths=(Death(1, 1, 12 * S),))
    run = time_of([life(0, [step(1, 2, 10), step(2, 10, 14), step(1, 14, 22)], cuts=(cut,))], Path("run"))
    assert seconds(run, 0) == {"start-up": 1, "recomputed step": 8 + 2, "useful step": 8, "repair": 2}


def test_a_step_whose_result_is_taken_was_useful() -> None:
    """All had prepared step 2 when rank 1 died, so it counts, and nobody does it again."""
    cut = CutLine(at_ns=12 * S, deaths=(Death(1, 1, 12 * S),))
    run = time_of([life(0, [step(1, 2, 10), step(2, 10, 14), step(3, 14, 22)], cuts=(cut,))], Path("run"))
    assert seconds(run, 0) == {"start-up": 1, "useful step": 8 + 2 + 8, "repair": 2}


def test_ranks_lost_one_after_the_other_are_one_loss() -> None:
    cut = CutLine(at_ns=6 * S, deaths=(Death(1, 1, 5 * S), Death(2, 1, 6 * S)))
    lives = [
        life(0, [step(1, 2, 4), step(2, 4, 9), step(2, 9, 12)], cuts=(cut,)),
        life(1, [step(1, 2, 4)]),
        life(1, [step(2, 9, 12)], incarnation=2, began_s=7),
        life(2, [step(1, 2, 4)]),
        life(2, [step(2, 10, 12)], incarnation=2, began_s=7),
    ]
    (loss,) = time_of(lives, Path("run")).failures
    assert loss.ranks == (1, 2)
    assert (loss.died_ns, loss.began_again_ns) == (WALL + 5 * S, WALL + 10 * S)


def test_time_between_runs_counts_against_them() -> None:
    first = time_of([life(0, [step(1, 1, 11)])], Path("a"))
    second = time_of([life(0, [step(2, 21, 31)], began_s=21)], Path("b"))
    found = goodput_of([second, first])
    assert found.between_ns == 10 * S and found.wall_ns == 30 * S
    assert found.ettr == pytest.approx(20 / 30) and found.availability == pytest.approx(20 / 30)
    assert found.mttr_s is None and found.mtbf_s is None


STEPS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 5), st.booleans(), st.integers(0, 5)),
    max_size=6,
)
"""Of a life: what each step goes back by, what it takes, its wait, and whether and when it is cut."""


@example(  # a step is cut before it begins, by the clock of another host
    lives=[(2, 0, []), (1, 3, [(0, 1, 0, True, 0)]), (2, 0, [(0, 1, 0, False, 0), (0, 2, 0, True, 0)])]
)
@given(lives=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), STEPS), min_size=1, max_size=6))
def test_causes_add_up_for_any_profiles(
    lives: list[tuple[int, int, list[tuple[int, int, int, bool, int]]]],
) -> None:
    made: list[RankProfile] = []
    clocks, incarnations = dict[int, int](), dict[int, int]()
    for rank, gap, steps in lives:
        began = at = clocks.get(rank, 1) + gap
        number, lines, cuts = 4, list[StepLine](), list[CutLine]()
        for back, took, waited, is_cut, died in steps:
            number = max(1, number - back)
            lines.append(step(number, at, at + took, comm=min(waited, took)))
            if is_cut:
                cuts.append(CutLine(at_ns=at * S, deaths=(Death((rank + 1) % 3, 1, (at - 1 + died) * S),)))
            at, number = at + took, number + 1
        incarnations[rank] = incarnations.get(rank, 0) + 1
        made.append(life(rank, lines, incarnation=incarnations[rank], began_s=began, cuts=tuple(cuts)))
        clocks[rank] = at
    if not any(one.steps for one in made):
        return
    run = time_of(made, Path("run"))
    for times in run.ranks.values():
        assert sum(times.values()) == run.wall_ns and min(times.values()) >= 0
    assert goodput_of([run]).rank_ns == sum(goodput_of([run]).ns.values())


def write(directory: Path, lives: list[RankProfile]) -> Path:
    for one in lives:
        path = lines_path(directory, one.run.rank, one.run.incarnation)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(encoded(one)))
    return directory


def test_directories_of_hosts_are_one_run(tmp_path: Path) -> None:
    every = killed_run()
    hosts = [write(tmp_path / "a", every[:1]), write(tmp_path / "b", every[1:])]
    (run,) = read_runs(hosts)
    assert run == time_of(every, tmp_path)


@pytest.mark.usefixtures("fonts")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, picture = write(tmp_path / "run", killed_run()), tmp_path / "goodput.svg"
    assert cli.main(["goodput", str(run), "--json", "-o", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"].keys() == set(Cause)
    assert sum(found["seconds"].values()) == pytest.approx(found["rank_seconds"]) == pytest.approx(70)
    assert found["nines"] == pytest.approx(0.59, abs=0.01)
    assert "useful step 40.0%" in picture.read_text()
    assert cli.main(["goodput", str(run)]) == 0
    table = capsys.readouterr().out
    assert "100.00%" in table and "MTTR (loss to the next step)       9.0 s" in table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["nowhere"], "no profile in nowhere"), (["x", "-o", "x.pdf"], "ends in .svg or .png")],
)
def test_bad_input(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["goodput", *arguments]) == 2
    assert says in capsys.readouterr().err
