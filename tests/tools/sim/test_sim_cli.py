"""`zbmd sim`: what it prints, its exit codes, and that its workers leave nothing behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes.children import children_of
from support.processes.polling import wait_until

from zbmd.tools.entry.zbmd import main
from zbmd.tools.sim.hunt import Hunt, Quarry
from zbmd.tools.sim.scenarios import SCENARIOS, run_once, scenario_named
from zbmd.transport.sim import Options, RunOutcome, parse_plan

PATIENCE_S = 180


def sim(line: str) -> int:
    return main(["sim", *line.split()])


def test_list_tells_all_scenarios(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCENARIOS)
    assert set(SCENARIOS) >= {
        "commit",
        "training",
        "collectives",
        "repair",
        "supervision",
        "links",
        "membership",
        "jobs",
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_run_is_told_by_its_seed_and_repeated_by_its_command(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sim(f"run {name} --seed 77 --ranks 2 --length 2 --faults 2") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"{name}: seed 77, 2 ranks, length 2"
    again = next(line for line in told if line.startswith("again: zbmd ")).removeprefix("again: zbmd ")
    assert len(parse_plan(again.partition("--faults ")[2].strip("'"))) == 2
    assert main([word.strip("'") for word in again.split(" ")]) == 0
    assert capsys.readouterr().out.splitlines() == told, "the same, down to the digest of the history"


def test_a_trace_tells_all_that_happened(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("run commit --seed 1 --ranks 2 --length 1 --faults 0 --trace") == 0
    told = capsys.readouterr().out.splitlines()
    assert sum(" rank1#1 " in line for line in told) > 5
    assert sum("Commit" in line for line in told) == 2
    events = re.search(r"^(\d+) events, ", told[-1])
    assert events is not None and len(told) > int(events[1])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run nothing --seed 1", "there is no scenario"),
        ("run commit --seed 1 --ranks 0", "ranks"),
        ("run commit --seed 1 --faults crash:process=rank9,at=1ms,for=0ns", "no simulated process rank9"),
        ("run commit --seed 1 --faults disk-full:process=rank0,at=1ms,for=1ms", "nothing for disk-full"),
        (
            "run membership --seed 1 --ranks 3 --faults crash:process=node0,at=1ms,for=1ms",
            "promises nothing under this plan",
        ),
        ("run commit --seed 1 --faults quake:at=1ms", "no kind of fault"),
        ("hunt --scenario nothing", "there is no scenario"),
        ("hunt --jobs 0", "jobs"),
        ("hunt --seconds 0", "minutes"),
        ("hunt --ranks 0", "ranks"),
    ],
)
def test_bad_input_is_told_in_a_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sim(line) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and words in told and "Traceback" not in told


def test_a_hunt_is_named_by_its_first_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sim("hunt --scenario commit collectives --seed 5 --runs 12 --jobs 3") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "hunting from seed 5: commit, collectives; 120 s, 3 processes"
    assert told[-1] == "12 runs, nothing found"
    quarry = Quarry(names=("commit", "collectives"), first_seed=5)
    assert [quarry.name(run) for run in range(3)] == ["commit", "collectives", "commit"]
    assert quarry.try_run(3) == quarry.try_run(3), "a run is a function of the seed alone"
    assert quarry.try_run(3).seed == 8


def test_a_first_seed_is_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    seeds: set[str] = set()
    for _ in range(2):
        assert sim("hunt --scenario commit --runs 1 --jobs 1") == 0
        found = re.match(r"hunting from seed (\d+): ", capsys.readouterr().out)
        assert found is not None
        seeds.add(found[1])
    assert len(seeds) == 2


def test_small_runs_are_tried_most() -> None:
    for entry in SCENARIOS.values():
        drawn = [entry.draw(seed) for seed in range(200)]
        assert sum(options.ranks <= 3 for options in drawn) > 100
        assert len({options.length for options in drawn}) > 2
        assert {0, 1, 2, 3, 6} == {options.faults for options in drawn}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_can_shrink_to_one_rank(name: str) -> None:
    report = run_once(scenario_named(name), 3, Options(ranks=1, length=1, faults=1))
    assert report.outcome is RunOutcome.OK, report


def test_leaving_a_hunt_ends_its_workers() -> None:
    """That nothing is left is checked after every test."""
    quarry = Quarry(names=("commit",), first_seed=1)
    with pytest.raises(KeyError), Hunt(quarry, jobs=3, runs_max=10**6):
        raise KeyError("whatever happens in between")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_hunt_leaves_no_process(number: signal.Signals) -> None:
    """Of the processes that carry this hunt's mark none is left, whichever way it ended."""
    mark = f"ZBMD_TEST_HUNT={os.getpid()}-{number.name}"
    key, _, value = mark.partition("=")
    # What runs in the background of a shell has SIGINT ignored, and passes that on.
    listen = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    hunt_on = "from zbmd.tools.entry.zbmd import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", f"{listen}; {hunt_on}"]
    command += ["sim", "hunt", "--scenario", "commit", "--jobs", "2"]
    with subprocess.Popen(
        command,
        env={**os.environ, key: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as hunt:
        assert hunt.stdout is not None
        assert hunt.stdout.readline().startswith("hunting from seed ")
        watched = wait_for_workers(hunt.pid, 2)
        try:
            hunt.send_signal(number)
            code = hunt.wait(PATIENCE_S)
            assert all(map(has_ended, watched))
        finally:
            hunt.kill()
            for pidfd in watched:
                os.close(pidfd)
    assert code == (130 if number is signal.SIGINT else -number)
    assert not carriers(mark.encode())


def wait_for_workers(pid: int, count: int) -> list[int]:
    """A pidfd of each worker, once there are so many; the command says nothing of them."""
    wait_until(lambda: len(children_of(pid)) >= count)
    return [os.pidfd_open(child) for child in children_of(pid)]


def has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(PATIENCE_S * 1000))


def carriers(mark: bytes) -> list[str]:
    """Processes that have the mark in their environment."""
    found: list[str] = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes().split(b"\0"):
                found.append(environment.parent.name)
        except OSError:
            continue
    return found


def test_on_a_terminal_there_is_a_bar() -> None:
    """Run on a real pseudo-terminal; what it shows goes to standard error."""
    master, slave = os.openpty()
    command = [
        sys.executable,
        "-m",
        "zbmd.tools.entry.zbmd",
        "sim",
        "hunt",
        "--scenario",
        "commit",
        "--seconds",
        "0.5",
    ]
    try:
        hunt = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=slave, env={**os.environ, "TERM": "xterm"}
        )
        os.close(slave)
        shown = bytearray()
        while True:
            try:
                data = os.read(master, 4096)
            except OSError:  # the other end is closed
                break
            shown += data
        assert hunt.stdout is not None
        told = hunt.stdout.read().decode()
        hunt.stdout.close()
        assert hunt.wait(PATIENCE_S) == 0, told
    finally:
        os.close(master)
    assert b"runs/s" in shown and b"%" in shown
    assert "nothing found" in told and "\x1b" not in told
