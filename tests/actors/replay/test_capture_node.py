"""A host and its ranks record themselves: a log on request, the last seconds when they fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import uvloop
from programs import PROGRAMS

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.node_machine import LOCAL_JOBS
from zbmd.actors.cluster.jobs.reports import RunResult
from zbmd.actors.core.actor import Actor
from zbmd.actors.process.output import OutputLine
from zbmd.actors.replay.process_capture import CRASHES_KEPT_MAX, CaptureSettings, ProcessCapture
from zbmd.actors.supervision.machine import SUPERVISION
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import Outcome
from zbmd.transport.capture import (
    CaptureExists,
    Clocks,
    Detail,
    Ending,
    Identical,
    LogRecorder,
    Origin,
    ProcessLog,
    open_log,
    replay_log,
)
from zbmd.transport.capture.records import DeathSeen, FrameIn, FrameOut, NoteRecord, Record
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import OutOfMemory, PeerLost, UserError
from zbmd.transport.identity import Identity

COOKIE = bytes(32).hex()


class Quiet:
    """Takes the ranks' lines."""

    def __init__(self) -> None:
        self.text = ""

    async def write_line(self, line: OutputLine) -> None:
        self.text += line.text.decode(errors="replace") + "\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No setting of whoever runs the tests counts; crashes are written here."""
    cookie = tmp_path / "cookie"
    cookie.touch(0o600)
    cookie.write_text(COOKIE)
    for name in [name for name in os.environ if name.startswith("ZBMD_") and "TEST" not in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(cookie))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def run(behaviour: str, ranks: int = 2, **environment: str) -> RunResult:
    config = HostConfig(
        target=str(PROGRAMS / "actors/ends.py"),
        arguments=(behaviour,),
        world_size=ranks,
        max_restarts=1 if behaviour == "dies_once" else 0,
        arena_bytes=1 << 20,
        environment=environment,
    )
    return uvloop.run(Host(config, output=Quiet()).run())


def logs_of(directory: Path) -> dict[str, ProcessLog]:
    return {log.name: log for log in open_log(directory).processes}


def records(log: ProcessLog) -> list[Record]:
    return [entry.record for entry in log.entries()]


# ---- a log that was asked for


def test_every_process_writes_a_log_that_replays(place: Path) -> None:
    assert run("well", ZBMD_CAPTURE=str(place / "run.zlog")).outcome is Outcome.SUCCEEDED
    logs = logs_of(place / "run.zlog")
    assert list(logs) == ["node#1", "rank0#1", "rank1#1"]
    assert {log.ending for log in logs.values()} == {Ending.CLOSED}
    verdicts = list(replay_log(place / "run.zlog", secrets={"cookie": COOKIE.encode()}))
    assert [verdict for verdict in verdicts if not isinstance(verdict, Identical)] == []
    machines = {declared.machine for log in logs.values() for declared in log.streams.values()}
    assert {LOCAL_JOBS.name, "hello", "link"} <= machines
    assert not (place / "state").exists()


def test_each_frame_is_in_the_logs_of_both_ends(place: Path) -> None:
    run("well", ZBMD_CAPTURE=str(place / "run.zlog"))
    sent: set[bytes] = set()
    came: set[bytes] = set()
    for log in logs_of(place / "run.zlog").values():
        for record in records(log):
            if isinstance(record, FrameOut):
                sent.add(record.header + record.payload)
            elif isinstance(record, FrameIn):
                came.add(record.frame)
    assert came and came <= sent


def test_a_killed_rank_leaves_what_it_had_flushed(place: Path) -> None:
    assert run("dies_once", ZBMD_CAPTURE=str(place / "run.zlog")).outcome is Outcome.SUCCEEDED
    logs = logs_of(place / "run.zlog")
    assert list(logs) == ["node#1", "rank0#1", "rank1#1", "rank1#2"]
    assert logs["rank1#1"].ending in (Ending.CUT, Ending.TORN)
    notes = [r.text for r in records(logs["rank1#1"]) if isinstance(r, NoteRecord)]
    assert any("entered the view of epoch 1" in text for text in notes)
    for name in ("node#1", "rank0#1"):
        deaths = [r for r in records(logs[name]) if isinstance(r, DeathSeen)]
        assert ("rank1", 1, False) in [(d.process, d.incarnation, d.clean) for d in deaths], name


def test_the_same_directory_is_not_used_twice(place: Path) -> None:
    run("well", ZBMD_CAPTURE=str(place / "run.zlog"))
    with pytest.raises(CaptureExists):
        run("well", ZBMD_CAPTURE=str(place / "run.zlog"))


def test_a_supervisor_is_recorded(place: Path) -> None:
    class Worker(Actor):
        """Does nothing."""

    async def supervise() -> None:
        clocks = Clocks(hybrid=HybridClock())
        recorder = LogRecorder(place, Origin(process="rank0", incarnation=1), clocks)
        system = ActorSystem("rank0", recorder=recorder)
        await system.supervise([ChildSpec(name=f"worker{n}", actor=Worker) for n in range(3)], name="top")
        await system.terminate(system.ref("worker1"))
        await system.stop()
        recorder.close()

    asyncio.run(supervise())
    (log,) = open_log(place).processes
    (declared,) = [d for d in log.streams.values() if d.machine == SUPERVISION.name]
    assert declared.name == "supervisor top#1"
    (verdict,) = replay_log(place)
    assert isinstance(verdict, Identical) and verdict.events >= 5


# ---- the last records of one that fails


def test_a_failed_run_says_where_its_last_records_are(place: Path) -> None:
    result = run("raises")
    assert result.outcome is Outcome.FAILED
    assert result.last_records is not None and result.last_records.is_relative_to(place / "state")
    logs = logs_of(result.last_records)
    assert {"node#1", "rank1#1"} <= logs.keys()
    notes = [r.text for r in records(logs["rank1#1"]) if isinstance(r, NoteRecord)]
    assert "dumped from memory: ValueError: a bug" in notes
    verdicts = list(replay_log(result.last_records, secrets={"cookie": COOKIE.encode()}))
    assert verdicts and all(isinstance(verdict, Identical) for verdict in verdicts)


def test_they_go_into_the_log_directory_if_there_is_one(place: Path) -> None:
    result = run("raises", ZBMD_LOG_DIR=str(place / "logs"))
    assert result.last_records is not None and result.last_records.parent == place / "logs"
    assert "rank1#1" in logs_of(result.last_records)


def test_a_run_that_ends_well_leaves_nothing(place: Path) -> None:
    assert run("well").last_records is None
    assert not (place / "state").exists()


def identity(job: int = 7) -> Identity:
    return Identity(name="rank0", pid=1, uid=1, incarnation=1, job=job)


def capture_of(environment: Mapping[str, str], job: int = 7) -> ProcessCapture:
    return ProcessCapture(identity(job), HybridClock(), CaptureSettings.read(environment, job=job))


@pytest.mark.parametrize("error", [UserError("no such file"), OutOfMemory("too large"), KeyboardInterrupt()])
def test_what_its_user_can_mend_needs_no_records(place: Path, error: BaseException) -> None:
    capture = capture_of(os.environ)
    capture.failed(error)
    capture.close("left")
    assert not (place / "state").exists()


def test_only_so_many_crashes_are_kept(place: Path) -> None:
    for job in range(1, CRASHES_KEPT_MAX + 5):
        capture = capture_of(os.environ, job)
        written = capture.dump("over")
        assert written is not None and written.exists()
        assert capture.dump("again") is None
        capture.close("left")
    assert len(list((place / "state" / "zbmd" / "crashes").iterdir())) == CRASHES_KEPT_MAX


def test_a_failure_is_noted_in_a_log(place: Path) -> None:
    capture = capture_of({"ZBMD_CAPTURE": str(place / "run.zlog"), "ZBMD_CAPTURE_BULK": "whole"})
    assert capture.bulk is Detail.WHOLE and capture.whole is capture.recorder
    capture.failed(PeerLost("rank1", "it died"))
    capture.close("left")
    (log,) = open_log(place / "run.zlog").processes
    assert any(isinstance(r, NoteRecord) and r.text.startswith("PeerLost: ") for r in records(log))


def test_an_unknown_way_to_capture_bulk_is_refused() -> None:
    with pytest.raises(UserError, match="digest or whole"):
        CaptureSettings.read({"ZBMD_CAPTURE_BULK": "half"}, job=1)
