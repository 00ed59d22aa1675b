"""The writing side: what is recorded is on disk, within bounds, whatever befalls the process or the disk."""

from __future__ import annotations

import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import pytest
import zstandard
from programs import PROGRAMS

from zbmd.transport import capture
from zbmd.transport.capture import records as rec
from zbmd.transport.capture.files import DiskLimits
from zbmd.transport.capture.log import LogLimits, LogRecorder, Overflow
from zbmd.transport.capture.records import RawRecord
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.frames import FrameHeader, pack_header
from zbmd.transport.identity import Identity

ORIGIN = capture.Origin(process="rank0", incarnation=1, job=7, contracts={"a/1": "f"}, hosts=("here",))
HEADER = pack_header(FrameHeader(payload_bytes=3, job=7, incarnation=1, hlc=5))


def recorder(directory: Path, **limits: Any) -> LogRecorder:
    return LogRecorder(
        directory,
        ORIGIN,
        capture.Clocks(hybrid=HybridClock()),
        limits=LogLimits(**limits) if limits else None,
    )


def read(directory: Path) -> list[rec.Record]:
    (log,) = capture.open_log(directory).processes
    return [entry.record for entry in log.entries()]


def small_disk(*, segments: int = 2, segment_bytes: int = 1 << 12) -> DiskLimits:
    return DiskLimits(segment_bytes=segment_bytes, disk_bytes=segments * segment_bytes)


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    log = LogRecorder(tmp_path, ORIGIN, capture.Clocks(hybrid=HybridClock()), bulk=capture.Detail.WHOLE)
    link = log.link("rank1", 2)
    log.frame_out(link, HEADER, b"abc", 5)
    log.frame_in(link, HEADER + b"xyz", 6)
    log.timer("beat", 10)
    log.death("rank1", 2, clean=False, reason="killed")
    log.seed("job", b"\x01")
    log.clock(123)
    log.note("hello")
    log.bulk(link, "grad", b"\0" * 8)
    log.mark(link, 4)
    log.lost(3, "why")
    log.end_stream(link, "left")
    log.close("done")
    found = read(tmp_path)
    assert [record.kind for record in found] == [
        capture.RecordType.STREAM,
        capture.RecordType.FRAME_OUT,
        capture.RecordType.FRAME_IN,
        capture.RecordType.TIMER,
        capture.RecordType.DEATH,
        capture.RecordType.SEED,
        capture.RecordType.CLOCK,
        capture.RecordType.NOTE,
        capture.RecordType.BULK,
        capture.RecordType.MARK,
        capture.RecordType.LOST,
        capture.RecordType.END,
        capture.RecordType.END,
    ]
    declared, sent, came, *_ = found
    assert isinstance(declared, rec.StreamDeclared) and declared.name == "rank1#2"
    assert isinstance(sent, rec.FrameOut) and (sent.header, sent.payload, sent.hlc) == (HEADER, b"abc", 5)
    assert isinstance(came, rec.FrameIn) and came.frame == HEADER + b"xyz"
    bulk, ended = found[8], found[-1]
    assert isinstance(bulk, rec.Bulk) and bulk.data == bytes(8) and bulk.payload_bytes == 8
    assert isinstance(ended, rec.EndRecord) and (ended.stream, ended.reason) == (0, "done")
    assert all(capture.describe(record) for record in found)


def test_the_header_says_whose_log_it_is(tmp_path: Path) -> None:
    identity = Identity(name="node", pid=1, uid=2, incarnation=9, job=4, contracts={"x/1": "y"})
    origin = capture.origin_of(identity, hosts=["a", "b"])
    LogRecorder(tmp_path, origin, capture.Clocks(hybrid=HybridClock())).close()
    (log,) = capture.open_log(tmp_path).processes
    assert log.origin == origin
    assert (log.name, log.origin.hosts, log.origin.contracts) == ("node#9", ("a", "b"), {"x/1": "y"})
    assert log.path.name == "node#9"


@pytest.mark.parametrize(("process", "safe"), [("..", "%2E."), ("a/b", "a%2Fb"), ("a#b", "a%23b")])
def test_a_process_name_cannot_lead_out_of_the_directory(tmp_path: Path, process: str, safe: str) -> None:
    origin = capture.Origin(process=process, incarnation=3)
    log = LogRecorder(tmp_path, origin, capture.Clocks(hybrid=HybridClock()))
    log.close()
    assert log.path == tmp_path / f"{safe}#3"


def test_any_tool_can_read_a_segment(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    for i in range(2000):
        log.note(f"note {i}")
    log.close()
    data = (log.path / "000000.zlog").read_bytes()
    stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
    objects: list[Any] = list(msgpack.Unpacker(stream))
    assert len(objects) == 2001
    assert [item[4] for item in objects[:2]] == ["note 0", "note 1"]


def test_mutable_payloads_are_copied(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    link = log.link("rank1", 1)
    payload = bytearray(b"abc")
    log.frame_out(link, HEADER, payload, 1)
    payload[:] = b"xyz"
    log.close()
    sent = read(tmp_path)[1]
    assert isinstance(sent, rec.FrameOut) and sent.payload == b"abc"


def test_a_record_that_cannot_be_written_is_told_in_its_place(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    for i in range(600):
        log.note("\udc80" if i == 300 else str(i))
    log.close()
    found = read(tmp_path)
    assert len(found) == 601
    lost = found[300]
    assert isinstance(lost, rec.Lost) and lost.records == 1 and "kind 10" in lost.reason
    after = found[301]
    assert isinstance(after, rec.NoteRecord) and after.text == "301"


def test_large_records_take_blocks_of_their_own(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    link = log.link("rank1", 1)
    sizes = [1 << 20, 1 << 20, 3 << 20, 5 << 20, 1 << 20]
    for nbytes in sizes:
        log.frame_out(link, HEADER, bytes(nbytes), 1)
    log.close()
    found = read(tmp_path)[1:-1]
    assert [len(r.payload) if isinstance(r, rec.FrameOut) else r.kind for r in found] == [
        1 << 20,
        1 << 20,
        3 << 20,
        capture.RecordType.LOST,  # over the bound of a block
        1 << 20,
    ]


def test_a_directory_holds_one_log_of_an_incarnation(tmp_path: Path) -> None:
    recorder(tmp_path).close()
    with pytest.raises(capture.CaptureExists):
        recorder(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(capture.CaptureError):
        recorder(tmp_path / "file")


def test_after_close_nothing_is_recorded(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    log.close()
    log.note("late")
    log.frame_in(1, b"", 1)
    log.close()
    assert log.flush()
    assert [record.kind for record in read(tmp_path)] == [capture.RecordType.END]


def test_old_segments_make_room_for_new_ones(tmp_path: Path) -> None:
    disk = small_disk(segments=4)
    log = recorder(tmp_path, disk=disk)
    link = log.link("rank1", 1)
    count = 0
    for _ in range(40):
        for _ in range(20):
            log.note(os.urandom(100).hex())
            log.mark(link, count)
            count += 1
        assert log.flush()
        nbytes = sum(path.stat().st_size for path in log.path.iterdir())
        assert nbytes <= disk.disk_bytes + (1 << 14)  # one block
    log.close()
    (process,) = capture.open_log(tmp_path).processes
    entries = list(process.entries())
    notes = [entry.record for entry in entries if isinstance(entry.record, rec.Mark)]
    assert process.segments[0].number > 0
    assert process.records_before == entries[0].number > 0
    assert [note.step for note in notes] == list(range(count - len(notes), count))
    again = [entry.record for entry in entries if isinstance(entry.record, rec.StreamDeclared)]
    assert len(again) == len(process.segments)
    assert all(record.continued and record.name == "rank1#1" for record in again)
    index = process.segments[-1].index
    assert (index.oldest_segment, index.oldest_record) == (process.segments[0].number, process.records_before)


def test_a_segment_also_ends_by_age(tmp_path: Path) -> None:
    now_ns = [1_000]
    clocks = capture.Clocks(monotonic_ns=lambda: now_ns[0], hybrid=HybridClock())
    disk = DiskLimits(segment_age_ns=50)
    log = LogRecorder(tmp_path, ORIGIN, clocks, limits=LogLimits(disk=disk))
    for _ in range(3):
        log.note("x")
        assert log.flush()
        now_ns[0] += 100
    log.close()
    (process,) = capture.open_log(tmp_path).processes
    assert [segment.number for segment in process.segments] == [0, 1, 2, 3]
    assert len(list(process.entries())) == 4


class SlowDisk:
    """Holds the writing thread up before each write until it is let go."""

    def __init__(self, log: LogRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held = threading.Event()
        self.go = threading.Event()
        write = log._files.write

        def slow(records: Sequence[RawRecord]) -> None:
            self.held.set()
            self.go.wait()
            write(records)

        monkeypatch.setattr(log._files, "write", slow)


def test_a_full_buffer_drops_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorder(tmp_path, buffer_bytes=100 * 256, overflow=Overflow.DROP)
    disk = SlowDisk(log, monkeypatch)
    log.note("first")
    disk.held.wait()
    for i in range(500):
        log.mark(0, i)
    assert len(log._buffer) <= 100
    disk.go.set()
    assert log.flush()
    log.mark(0, 1000)
    log.close()
    found = read(tmp_path)
    lost = [record for record in found if isinstance(record, rec.Lost)]
    marks = [record.step for record in found if isinstance(record, rec.Mark)]
    assert len(lost) == 1 and len(marks) + lost[0].records == 501
    place = found.index(lost[0])
    before = found[place - 1]
    assert isinstance(before, rec.Mark) and before.step == len(marks) - 2  # the gap is where it is recorded
    assert marks == [*range(len(marks) - 1), 1000]


def test_a_full_buffer_holds_the_recording_thread_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = recorder(tmp_path, buffer_bytes=100 * 256, overflow=Overflow.WAIT)
    disk = SlowDisk(log, monkeypatch)
    log.note("first")
    disk.held.wait()

    def record() -> None:
        for i in range(500):
            log.mark(0, i)

    thread = threading.Thread(target=record)
    thread.start()
    disk.go.set()
    thread.join()
    log.close()
    assert [r.step for r in read(tmp_path) if isinstance(r, rec.Mark)] == list(range(500))


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(LocalProtocolError):
        LogLimits(buffer_bytes=100)
    with pytest.raises(LocalProtocolError):
        DiskLimits(segment_bytes=1 << 20, disk_bytes=1 << 20)
    with pytest.raises(LocalProtocolError):
        DiskLimits(segment_age_ns=0)


CHILD = str(PROGRAMS / "transport" / "records_capture.py")


def child(directory: Path, case: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHILD, str(directory), case],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        **options,
    )


def test_what_was_flushed_survives_a_sigkill(tmp_path: Path) -> None:
    run = child(tmp_path, "killed")
    assert run.returncode == -signal.SIGKILL
    (process,) = capture.open_log(tmp_path).processes
    assert [r.step for r in read(tmp_path) if isinstance(r, rec.Mark)] == list(range(1000))
    assert process.ending is capture.Ending.CUT
    place = process.find_step(700)  # no index was written
    assert place is not None and place.number == 700


def test_an_ordinary_exit_loses_nothing(tmp_path: Path) -> None:
    run = child(tmp_path, "ends")
    assert (run.returncode, run.stderr) == (0, "")
    (process,) = capture.open_log(tmp_path).processes
    assert process.ending is capture.Ending.CLOSED
    assert len(read(tmp_path)) == 1001


def test_a_forked_child_leaves_the_log_alone(tmp_path: Path) -> None:
    run = child(tmp_path, "forks")
    assert (run.returncode, run.stderr) == (0, "")
    texts = [record.text for record in read(tmp_path) if isinstance(record, rec.NoteRecord)]
    assert texts == ["before", "after"]


def test_a_full_disk_ends_the_capture_and_not_the_job(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    run = child(tmp_path, "fills_its_disk", preexec_fn=limit)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "the job goes on"
    assert (run.stdout + run.stderr).count("the capture has stopped") == 1
    found = read(tmp_path)  # whole up to where the disk was full
    assert len(found) > 10
    (process,) = capture.open_log(tmp_path).processes
    assert process.ending is capture.Ending.CUT
