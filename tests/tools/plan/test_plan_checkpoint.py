"""`zbmd plan checkpoint`: text, JSON and pictures, by the real command; advice; bad input in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import matplotlib.image
import msgspec
import numpy as np
import pytest

from zbmd.tools.entry.zbmd import main
from zbmd.tools.plan.checkpoint_plan import CheckpointInputs, CheckpointPlan, plan_checkpoint
from zbmd.training.checkpoint.intervals import best

SMALL = ("--accelerators", "1", "--mtbf", "8h", "--write", "4min")
LARGE = ("--accelerators", "16384", "--mtbf", "200h", "--state", "2TiB", "--bandwidth", "400GiB/s")


pytestmark = pytest.mark.usefixtures("fonts")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "checkpoint", *arguments]) == 0
    return capsys.readouterr().out


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> CheckpointPlan:
    return msgspec.json.decode(run(capsys, *arguments, "--json"), type=CheckpointPlan)


def zbmd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "zbmd", "plan", "checkpoint", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_prints_the_plan_in_a_process_of_its_own() -> None:
    done = zbmd(*SMALL, "--interval", "30min", "--step", "5s")
    assert (done.returncode, done.stderr) == (0, "")
    assert "61.97min by Young" in done.stdout
    assert "planned      every 61.92min (743 steps): overhead 6.5%, rework 7.7%" in done.stdout
    assert "yours        every 30min (360 steps): overhead 13.3%" in done.stdout
    assert "within the budget of 20.0%" in done.stdout


def test_json_has_all_intervals(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, *LARGE)
    assert plan.mtbf_s == pytest.approx(43.945, abs=1e-3)
    assert plan.stall_s == plan.write_s == plan.restart_s == pytest.approx(5.12)
    assert (plan.young_s, plan.daly_s) == (pytest.approx(21.2, abs=0.05), pytest.approx(17.94, abs=0.01))
    assert plan.formula == "Daly, higher order"
    assert plan.best.interval_s == plan.optimum_s == plan.daly_s
    assert plan.best.expected_s == pytest.approx(720 * 3600 * (1 + plan.best.total))
    assert plan.exceeded and len(plan.advice) >= 3


def test_an_asynchronous_write_is_never_begun_before_the_last_one_is_complete(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned(capsys, *LARGE, "--async")
    assert plan.optimum_s == pytest.approx(3.0, abs=0.01)
    assert plan.best.interval_s == plan.floor_s == pytest.approx(5.12 * 0.98)
    plan = planned(capsys, *LARGE, "--async", "--step", "2s")
    assert plan.best.steps == 3 and plan.best.interval_s == 6.0
    assert "one write ends before the next begins: at least 5.018s" in run(capsys, *LARGE, "--async")
    early = run(capsys, *LARGE, "--async", "--interval", "3s")
    assert "one write is not complete when the next begins" in early


def test_the_state_follows_from_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--mtbf", "8h", "--parameters", "70B", "--bandwidth", "800Gbit/s")
    assert plan.write_s == pytest.approx(70e9 * 12 / 100e9)


def test_following_an_advice_meets_the_budget() -> None:
    inputs = CheckpointInputs(accelerators=4_096, mtbf_s=2_000 * 3_600.0, write_s=120.0, budget=0.2)
    plan = plan_checkpoint(inputs)
    assert plan.exceeded and plan.best.total > 0.2
    changes = {one.change.split(" ")[0]: one for one in plan.advice}
    assert {"write", "restart", "accelerators", "at"} >= set(changes)
    fewer = next(one.change for one in plan.advice if one.change.startswith("at most"))
    count = int(fewer.split()[2].replace(",", ""))
    for number, fits in ((count, True), (count + count // 50, False)):
        again = CheckpointInputs(accelerators=number, mtbf_s=2_000 * 3_600.0, write_s=120.0)
        assert (best(again.failing) <= 0.2) == fits
    asynchronous = next(one for one in plan.advice if "--async" in one.change)
    assert asynchronous.total < plan.best.total


def test_a_bad_interval_of_the_user_is_the_first_thing_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = planned(capsys, *SMALL, "--interval", "6h")
    assert plan.exceeded and plan.yours is not None and plan.yours.total > 0.2 > plan.best.total
    assert [one.change for one in plan.advice] == ["write every 61.97min, as planned"]


LEVELS = (
    *("--accelerators", "1024", "--mtbf", "20000h", "--step", "5s"),
    *("--level", "memory,0.2s,80%,2s", "--level", "disk,3s,15%,20s", "--level", "store,40s,5%,3min"),
)


def test_levels_have_intervals_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, *LEVELS)
    assert [level.name for level in plan.levels] == ["memory", "disk", "store"]
    assert [level.every for level in plan.levels] == [1, 9, 54]
    assert plan.best.interval_s == plan.levels[0].interval_s == 190.0
    assert plan.best.total == pytest.approx(
        sum(level.overhead + level.rework + level.restart for level in plan.levels)
    )
    text = run(capsys, *LEVELS, "--simulate", "--trials", "20")
    assert "simulated    exponential, 20 trials" in text and "together     every 3.167min (38 steps)" in text
    tight = planned(capsys, *LEVELS, "--budget", "0.1%")
    assert "costs most" in tight.advice[0].change and tight.advice[1].change == "level store alone"


def test_a_simulation_confirms_the_plan_in_a_process_of_its_own() -> None:
    done = zbmd(*SMALL, "--simulate", "--trials", "100", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    simulated = plan["simulated"]
    assert simulated["optimum_s"] == pytest.approx(plan["exact_s"], rel=0.05)
    assert simulated["lost"] == pytest.approx(plan["best"]["total"], rel=0.05)


def test_pictures_show_the_curves_and_both_intervals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, png = tmp_path / "plan.svg", tmp_path / "plan.png"
    run(capsys, *SMALL, "--interval", "30min", "--plot", str(svg))
    text = svg.read_text()
    ElementTree.fromstring(text)
    for words in ("planned: 61.97min, 15.1% lost", "yours: 30min, 18.4% lost", "budget 20%", "rework after"):
        assert words in text, words
    run(capsys, *SMALL, "--interval", "30min", "--plot", str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == text
    run(capsys, *LARGE, "--async", "--plot", str(png))
    pixels = np.asarray(matplotlib.image.imread(png))
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 50, "the picture is blank"


BAD = [
    ((), "--mtbf: expected the MTBF of one accelerator"),
    (("--mtbf", "8h"), "give --write TIME, or --bandwidth SIZE/s"),
    (("--mtbf", "8h", "--bandwidth", "1GB/s"), "--state and --parameters"),
    (("--mtbf", "8h", "--state", "1GB"), "give --write TIME, or --bandwidth"),
    (("--mtbf", "8h", "--state", "1GB", "--parameters", "1B", "--bandwidth", "1GB/s"), "with one of"),
    (("--mtbf", "8h", "--write", "1s", "--state", "1GB"), "--write: expected no --state"),
    (("--mtbf", "0h", "--write", "1s"), "--mtbf: a duration of 0h is out of range"),
    (("--mtbf", "8 parsec", "--write", "1s"), "--mtbf: '8 parsec' is not a duration"),
    (("--mtbf", "99999999999h", "--write", "1s"), "at most 365,000 days"),
    (("--mtbf", "nan", "--write", "1s"), "--mtbf: 'nan' is not a duration"),
    (("--mtbf", "8h", "--write=-1s"), "--write: '-1s' is not a duration"),
    (("--mtbf", "8h", "--state", "0", "--bandwidth", "1GB/s"), "--state: expected a size above 0"),
    (("--mtbf", "8h", "--state", "1GB", "--bandwidth", "1GB"), "--bandwidth: expected a bandwidth such as"),
    (("--mtbf", "8h", "--state", "1GB", "--bandwidth", "0GB/s"), "--bandwidth: expected a bandwidth such as"),
    (("--mtbf", "8h", "--parameters", "many", "--bandwidth", "1GB/s"), "--parameters: expected a number"),
    (
        ("--mtbf", "8h", "--parameters", "0", "--bandwidth", "1GB/s"),
        "--parameters: expected a number of at least 1",
    ),
    ((*SMALL, "--accelerators", "0"), "--accelerators: expected at least 1, got 0"),
    ((*SMALL, "--stall", "2%"), "--stall: expected --async with it"),
    ((*SMALL, "--async", "--stall", "200%"), "--stall: expected a fraction above 0 and at most 1"),
    ((*SMALL, "--budget", "x"), "--budget: expected a fraction"),
    ((*SMALL, "--budget", "nan"), "--budget: expected a fraction"),
    (
        (*SMALL, "--step", "1min", "--interval", "30s"),
        "--interval: expected at least one step (1min), got 30s",
    ),
    ((*SMALL, "--simulate", "--weibull", "0"), "--weibull: expected a shape of 0.2 to 10, got 0"),
    ((*SMALL, "--simulate", "--weibull", "nan"), "--weibull: expected a shape of 0.2 to 10, got nan"),
    ((*SMALL, "--simulate", "--trials", "1"), "--trials: expected 2 to 100000, got 1"),
    ((*SMALL, "--simulate", "--seed", "-1"), "--seed: expected at least 0"),
    ((*SMALL, "--plot", "plan.pdf"), "--plot: expected a file name that ends in .svg or .png"),
    ((*SMALL, "--level", "disk,1s,100%,1s"), "--level: expected no --write"),
    (("--mtbf", "8h", "--level", "disk,1s,90%,1s"), "shares of failures that add up to 100%, got 90.0%"),
    (("--mtbf", "8h", "--level", "disk,1s"), "--level: expected NAME,COST,SHARE,RESTART"),
    (("--mtbf", "8h", "--level", "disk,1,100%,1s"), "--level disk: '1' is not a duration"),
    (("--mtbf", "8h", "--level", "disk,1s,0%,1s"), "--level disk: expected a fraction"),
    (
        ("--mtbf", "8h", "--level", "disk,1s,100%,1s", "--interval", "1h"),
        "--interval: expected a plan of one level",
    ),
    (
        ("--mtbf", "8h", "--level", "disk,1s,100%,1s", "--plot", "a.svg"),
        "--plot: expected a plan of one level",
    ),
    (("--mtbf", "1s", "--write", "1h", "--simulate", "--trials", "2"), "without an end"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(case[0]) for case in BAD])
def test_bad_input_of_a_plan_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "checkpoint", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out
    assert told.err.count("\n") == 1


def test_bad_input_ends_a_process_with_2() -> None:
    done = zbmd("--mtbf", "8h")
    assert done.returncode == 2
    assert done.stderr.startswith("error: the cost of a checkpoint is not known")
    assert os.linesep not in done.stderr.rstrip("\n")
