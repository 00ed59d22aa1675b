"""A training run that is killed or stopped as a whole: nothing is left, and the next run is as any other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.processes.launcher import assert_no_socket

if TYPE_CHECKING:
    from support.processes.launcher import Ended, Launcher, Running

RANKS = 4
HANG_AT = 8
OPTIONS = (
    *("--data", "text", "--steps", "12", "--context", "16", "--width", "16", "--heads", "2", "--layers", "1"),
    *("--sequences-per-shard", "1", "--checkpoint-every", "2"),
)


@pytest.fixture
def job(launcher: Launcher) -> tuple[str, ...]:
    """Arguments of the run that hangs."""
    text = "".join(f"line {i} of some text that is to be learnt\n" for i in range(2000))
    (launcher.directory / "text").write_text(text)
    return (
        "run",
        "-n",
        str(RANKS),
        "--stop-grace",
        "1s",
        str(PROGRAMS / "training/hangs.py"),
        str(HANG_AT),
        *OPTIONS,
        "--out",
        "killed",
    )


def until_in_the_middle(run_job: Running) -> str:
    """Wait until all but the step that hangs is committed; returns the node's address."""
    run_job.until(rf"^step {HANG_AT - 1} loss")
    found = run_job.processes()
    ours = {name: len(pids) for name, pids in found.items() if name != "sleep"}
    ranks = {f"zbmd-rank{rank}": 1 for rank in range(RANKS)}
    assert ours.pop("zbmd-reaper") == ours.pop("zbmd-template") == 1
    assert {name: ours.pop(name) for name in ranks} == ranks
    assert list(ours.values()) == [1], "and the host"
    assert len(found["sleep"]) == 2
    return run_job.until(r"address (\S+)")[0][1]


def pids_of(run_job: Running, *names: str) -> list[int]:
    """The pids of the run's processes of these names; "host" is the command itself, "rank" every rank."""
    pids = [run_job.pid] if "host" in names else []
    for name, found in run_job.processes().items():
        if name in names or ("rank" in names and re.fullmatch(r"zbmd-rank\d+", name)):
            pids += found
    return pids


def weights(ended: Ended) -> str:
    """The weights that a run has ended with."""
    assert ended.code == 0, ended
    found: str = json.loads(ended.out[-1].removeprefix("[rank0]: "))["weights_sha256"]
    return found


def assert_the_next_run_is_as_any_other(launcher: Launcher) -> None:
    """From the start and from the killed run's checkpoint: the same weights as without any of the stack."""
    module = ("-m", "zbmd", "train", *OPTIONS)
    fresh = launcher.run("run", "-n", str(RANKS), *module, "--out", "fresh")
    resumed = launcher.run("run", "-n", str(RANKS), *module, "--out", "resumed", "--resume", "killed")
    plain = launcher.run("run", "-n", "1", *module, "--plain", "on", "--out", "plain")
    assert weights(fresh) == weights(resumed) == weights(plain)


@pytest.mark.parametrize("victims", [
    ("host", "zbmd-template", "rank"),
    ("host",),
    ("zbmd-template",),
    ("zbmd-template", "rank"),
    ("host", "zbmd-reaper", "zbmd-template", "rank", "sleep"),
])  # fmt: skip
def test_whoever_is_killed_nothing_is_left(
    launcher: Launcher, job: tuple[str, ...], victims: tuple[str, ...]
) -> None:
    with launcher.start(*job) as run_job:
        address = until_in_the_middle(run_job)
        for pid in pids_of(run_job, *victims):
            with contextlib.suppress(ProcessLookupError):  # the first to be killed takes others with it
                os.kill(pid, signal.SIGKILL)
        code = run_job.end()
        launcher.assert_nothing_left(run_job.marker, run_job.text)
    assert_no_socket(address)
    if "host" in victims:
        assert code == -signal.SIGKILL
    else:
        assert code == 75
        told = run_job.text.splitlines()[-1]
        assert told.startswith("[zbmd]: the run failed: ")
        # The ranks' deaths may be noticed first.
        assert "rank" in victims or "the template process was killed by signal 9" in told
    if victims == ("host", "zbmd-template", "rank"):
        assert_the_next_run_is_as_any_other(launcher)


def test_without_its_reaper_a_run_ends(launcher: Launcher, job: tuple[str, ...]) -> None:
    with launcher.start(*job) as run_job:
        address = until_in_the_middle(run_job)
        (helper, apart) = pids_of(run_job, "sleep")
        (reaper,) = pids_of(run_job, "zbmd-reaper")
        os.kill(reaper, signal.SIGKILL)
        run_job.until(r"^\[zbmd\]: the run failed: the template process was killed by signal 9")
        # Nobody is left to know of what a rank had started.
        for pid in (helper, apart):
            os.kill(pid, signal.SIGKILL)
        assert run_job.end() == 75
    assert_no_socket(address)


def ctrl_c(run_job: Running) -> None:
    """As a terminal does it: to the whole foreground process group."""
    os.killpg(run_job.pid, signal.SIGINT)


def terminate(run_job: Running) -> None:
    """As `kill` does it."""
    os.kill(run_job.pid, signal.SIGTERM)


@pytest.mark.parametrize(("stop", "code", "name"), [
    (ctrl_c, 128 + signal.SIGINT, "SIGINT"),
    (terminate, 128 + signal.SIGTERM, "SIGTERM"),
])  # fmt: skip
def test_a_run_that_is_stopped_says_so_and_takes_everything_with_it(
    launcher: Launcher, job: tuple[str, ...], stop: Callable[[Running], None], code: int, name: str
) -> None:
    with launcher.start(*job) as run_job:
        address = until_in_the_middle(run_job)
        stop(run_job)
        assert run_job.end() == code
        launcher.assert_nothing_left(run_job.marker, run_job.text)
    told = rf"\[zbmd\]: stopped: {name} received; killed after --stop-grace: rank\d(, rank\d)*"
    assert re.fullmatch(told, run_job.text.splitlines()[-1]), "the others wait for a rank that hangs"
    assert "Traceback" not in run_job.text
    assert_no_socket(address)


def test_a_run_is_stopped_while_the_template_still_imports(
    launcher: Launcher, job: tuple[str, ...]
) -> None:  # fmt: skip
    with launcher.start(*job, PYTHONPATH=str(PROGRAMS / "customised"), fresh=True) as run_job:
        run_job.until("^importing$")
        ctrl_c(run_job)
        assert run_job.end() == 128 + signal.SIGINT
    # The template may be at its imports before the launcher has a loop that takes the signal.
    said = {
        "[zbmd]: stopped: SIGINT received before any rank had started",
        "zbmd-node: stopped: SIGINT received",
    }
    assert run_job.text.splitlines()[-1] in said
