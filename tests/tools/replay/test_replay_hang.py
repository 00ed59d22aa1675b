"""A job that hangs for real is captured, ended, and `zbmd replay --until hang` says who waits for whom."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from programs import PROGRAMS

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.process.output import OutputLine
from zbmd.actors.view import Outcome
from zbmd.tools.chaos.small_job import small_recipe, write_text
from zbmd.tools.entry import zbmd as cli
from zbmd.transport.capture import CaptureError, Record, open_log
from zbmd.transport.capture.records import EventTaken, FrameIn, FrameOut, Mark

TIMEOUT_S = 180.0
LOOK_S = 0.02
STEPS = 100_000
"""More than are made until the job is stopped, however late this process is to stop a rank."""
SETTLED_NS = 300_000_000
"""A machine that has not moved for so long, over several flushes of the log, hangs."""


class Output:
    """Keeps what the ranks print, to tell it if the test fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def write_line(self, line: OutputLine) -> None:
        self.lines.append(f"[rank{line.rank}]: {line.text.decode(errors='replace')}")


def records(capture: Path, process: str) -> list[Record]:
    """Return what has been written of a process so far."""
    try:
        return [e.record for log in open_log(capture).processes for e in log.entries() if log.name == process]
    except CaptureError:
        return []  # it has not begun


async def run_until(config: HostConfig, hangs: Callable[[], bool], hosts: list[Host]) -> None:
    """Run a job until `hangs` says that it does, and end it as a user would. hosts: gets its host."""
    output = Output()
    host = Host(config, output=output)
    hosts.append(host)
    running = asyncio.ensure_future(host.run())
    end_s = time.monotonic() + TIMEOUT_S
    while not hangs():
        assert time.monotonic() < end_s and not running.done(), "\n".join(output.lines)
        await asyncio.wait([running], timeout=LOOK_S)
    host.stop("it hangs", kill=True)
    assert (await running).outcome is Outcome.STOPPED


def training(tmp_path: Path) -> HostConfig:
    recipe = small_recipe(tmp_path / "out", write_text(tmp_path / "text"), steps=STEPS)
    return HostConfig(
        target="zbmd.training.sharded",
        is_module=True,
        arguments=(recipe.encode(),),
        world_size=3,
        environment={"ZBMD_CAPTURE": str(tmp_path / "run.zlog")},
        preload=("zbmd.training.sharded.run",),
    )


def until_hang(capture: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    assert cli.main(["replay", str(capture), "--until", "hang"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["replay", str(capture), "--until", "hang", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["hang"], text


def begun(capture: Path, process: str) -> int:
    """The last step that a process began."""
    return max((r.step for r in records(capture, process) if isinstance(r, Mark)), default=0)


def test_a_stopped_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture, hosts, stopped = tmp_path / "run.zlog", list[Host](), list[int]()
    from_step = 2

    def hangs() -> bool:
        """Stop the rank once it is under way; then the others come to where they need it.

        Not in the middle of an operation that all have begun: then each waits for the others alike.
        """
        nonlocal from_step
        if stopped:
            if not all(waits_for(capture, process, "rank1#1") for process in ("rank0#1", "rank2#1")):
                return False
            if not in_operation(capture, "rank1#1"):
                return True
            from_step = stopped.pop() + 1
            hosts[0].send_signal(1, signal.SIGCONT)
        elif begun(capture, "rank1#1") >= from_step:
            stopped.append(begun(capture, "rank1#1"))
            hosts[0].send_signal(1, signal.SIGSTOP)
        return False

    config = training(tmp_path)
    uvloop.run(run_until(config, hangs, hosts))
    hang, text = until_hang(capture, capsys)
    whom = {w["process"]: w["whom"] for w in hang["waits"] if w["process"] != "rank1"}
    assert whom.keys() == {"rank0", "rank2"}, text
    assert "rank1" in whom["rank0"] or "rank1" in whom["rank2"], text
    assert hang["steps"]["rank0"] >= stopped[0]
    assert text.splitlines()[-1].startswith("look first at rank1: "), text


def in_operation(capture: Path, process: str) -> bool:
    return operations(capture, process)[-1:] == ["OperationBegan"]


def waits_for(capture: Path, process: str, other: str) -> bool:
    """Whether it waits for this one, at least: not in an operation with which that is done."""
    mine, theirs = operations(capture, process), operations(capture, other)
    ended = theirs.count("OperationEnded")
    is_in_one = mine[-1:] == ["OperationBegan"]
    return waits_for_peers(capture, process) and not (is_in_one and mine.count("OperationBegan") <= ended)


def operations(capture: Path, process: str) -> list[str]:
    events = [r.tag for r in records(capture, process) if isinstance(r, EventTaken)]
    return [tag for tag in events if tag.startswith("Operation")]


def waits_for_peers(capture: Path, process: str) -> bool:
    """Whether a process has come to an end of what it can do alone, some time ago."""
    events = [r for r in records(capture, process) if isinstance(r, EventTaken)]
    if not events or time.monotonic_ns() - max(r.at_ns for r in events) < SETTLED_NS:
        return False
    operations = [r.tag for r in events if r.tag.startswith("Operation")]
    return operations[-1:] == ["OperationBegan"]


def test_an_actor_that_never_answers_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture, script = tmp_path / "run.zlog", PROGRAMS / "actors/never_answers.py"

    def hangs() -> bool:
        """The last that rank 1 wrote is its question, some time ago, and rank 0 has noted that it came.

        So it has not been refused.
        """
        written = records(capture, "rank1#1")
        last = written[-1] if written else None
        asked = isinstance(last, FrameOut) and b"test.question" in last.payload
        if last is None or not asked or time.monotonic_ns() - last.at_ns < SETTLED_NS:
            return False
        heard = [r.frame for r in records(capture, "rank0#1") if isinstance(r, FrameIn)]
        return any(b"test.question" in frame for frame in heard)

    config = HostConfig(
        target=str(script), world_size=2, environment={"ZBMD_CAPTURE": str(capture), "ZBMD_ARENA": "1MiB"}
    )
    uvloop.run(run_until(config, hangs, []))
    hang, text = until_hang(capture, capsys)
    (wait,) = [wait for wait in hang["waits"] if wait["process"] == "rank1"]
    assert (wait["what"], wait["whom"]) == ("the answer to test.question/1(7)", ["rank0"])
    assert "it came to rank0/mute at" in wait["hint"]
    assert text.splitlines()[-1].startswith("look first at rank0: rank1 waits for the answer")
