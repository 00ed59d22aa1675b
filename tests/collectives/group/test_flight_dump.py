"""The flight recorder written down and drawn."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbmd
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import Desynchronised
from zbmd.collectives.flight.recorder import FLIGHT_RECORDS_MAX, FlightLog, FlightState
from zbmd.collectives.group.flight_dump import (
    DIRECTORY_VARIABLE,
    FILES_MAX,
    FLIGHTS,
    FlightRecorder,
    dump_path,
    read_dump,
)
from zbmd.tools.node.status import collect_dumps, listens
from zbmd.tools.runs.flights import read_dumps, text, trace
from zbmd.transport.errors import UserError

RunRanks = Callable[..., list[Any]]
WAIT_S_MAX = 60.0


def test_a_log_keeps_the_latest_and_tells_them_oldest_first() -> None:
    log = FlightLog(3)
    call = log.ring.number("all_reduce", "eager")
    assert log.ring.number("all_reduce", "eager") == call
    for number in range(1, 6):
        log.ring.begin(call, number, 8 * number, 10 * number)
        if number < 5:
            log.ring.end(2 if number == 4 else 1, 0, 10 * number + 5, "it broke" if number == 4 else "")
    assert [record.sequence for record in log] == [3, 4, 5] and len(log) == 3
    assert log[-1].state is FlightState.RUNNING and log[0].state is FlightState.COMPLETE
    assert (log[1].state, log[1].error, log[1].end_ns) == (FlightState.FAILED, "it broke", 45)
    with pytest.raises(IndexError):
        log[3]
    assert FlightLog().maxlen == FLIGHT_RECORDS_MAX


async def test_a_signal_and_the_tool_have_a_process_write_its_flights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    assert not listens(os.getpid())
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        assert listens(os.getpid())
        await group.all_reduce(np.ones(3, np.float32))
        dumps, silent = await collect_dumps([os.getpid(), 2**22 + 1], tmp_path)
        assert silent == [2**22 + 1] and len(dumps) == 1
        (dump,) = dumps
        assert dump.pid == os.getpid() and dump.reason == "SIGUSR2"
        last = dump.groups[-1].operations[-1]
        assert not dump.groups[-1].closed
        assert (last.operation, last.algorithm, last.nbytes, last.state) == (
            "all_reduce",
            "eager",
            12,
            "complete",
        )
        with FLIGHTS.lasting():
            threads = {t for t in threading.enumerate() if t.name == "zbmd-flight"}
            await group.close()
            assert listens(os.getpid()) and threads <= set(threading.enumerate()), "for the next group"
        assert not listens(os.getpid())
        os.kill(os.getpid(), signal.SIGUSR2)  # ignored by now
        assert "zbmd-flight" not in {thread.name for thread in threading.enumerate()}


def test_an_error_that_is_to_be_mended_is_written_and_drawn(run_ranks: RunRanks, tmp_path: Path) -> None:
    def body(p: Any) -> str:
        c: Communicator = p.communicator()
        recorder = FlightRecorder(lambda: tmp_path)
        close = recorder.add(f"rank{p.rank}", c)
        x = p.segment.arena.from_array(np.ones(50_000, np.float32))
        c.all_reduce(x, deadline_ns=p.soon())
        with pytest.raises(Desynchronised):
            c.all_reduce(np.ones(1 + p.rank), deadline_ns=p.soon())
        close()
        return str(dump_path(tmp_path, os.getpid()))

    paths = [Path(path) for path in run_ranks(2, body)]
    dumps = read_dumps([tmp_path])
    assert sorted(paths) == sorted(tmp_path.iterdir()) and [dump.name for dump in dumps] == ["rank0", "rank1"]
    assert all(
        "Desynchronised" not in dump.reason and "every rank must make" in dump.reason for dump in dumps
    )
    lines = text(dumps, last=5)
    assert any("#1 all_reduce by swap, 200000 bytes" in line for line in lines)
    assert sum("failed" in line and "x" in line for line in lines) == 2
    events = json.loads(trace(dumps))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} == {"all_reduce #1", "all_reduce #2", "wait", "move"}
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    assert {event["args"]["name"].split()[0] for event in events if event["name"] == "process_name"} == {
        "rank0",
        "rank1",
    }


def test_who_never_entered_is_named(run_ranks: RunRanks, tmp_path: Path) -> None:
    """A rank that waits is written down by its own thread, while the operation runs."""

    def body(p: Any) -> str:
        c: Communicator = p.communicator()
        recorder = FlightRecorder(lambda: tmp_path)
        close = recorder.add(f"rank{p.rank}", c)
        c.barrier(deadline_ns=p.soon())
        if p.rank == 0:
            waits = threading.Thread(target=lambda: c.all_reduce(np.ones(4), deadline_ns=p.soon()))
            waits.start()
            while c.sequence < 2:
                os.sched_yield()
            recorder.dump("asked")
            second: Communicator = p.communicator(channel=1)
            second.barrier(deadline_ns=p.soon())
            waits.join()
        else:
            second = p.communicator(channel=1)
            second.barrier(deadline_ns=p.soon())
            recorder.dump("asked")
            c.all_reduce(np.ones(4), deadline_ns=p.soon())
        close()
        return "done"

    assert run_ranks(2, body) == ["done"] * 2
    lines = text(read_dumps([tmp_path]), last=5)
    assert any("running" in line and ">" in line for line in lines)
    assert "    never entered by rank 1" in lines


def test_old_dumps_go_and_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    for number in range(FILES_MAX + 5):
        path = dump_path(tmp_path, 10_000_000 + number)
        path.write_text("{}")
        os.utime(path, (number, number))
    recorder = FlightRecorder(lambda: tmp_path)
    written = recorder.dump("asked")
    assert written is not None and read_dump(written.read_bytes(), "it").groups == ()
    assert len(list(tmp_path.iterdir())) == FILES_MAX and not dump_path(tmp_path, 10_000_000).exists()
    with pytest.raises(UserError, match="no dump of a flight recorder"):
        read_dumps([tmp_path])
    with pytest.raises(UserError, match="zbmd-node dump"):
        read_dumps([])
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert FlightRecorder(lambda: blocked / "below").dump("asked") is None
