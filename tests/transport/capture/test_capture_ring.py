"""The ring: bounded, always ready to be written down, and written down when its process crashes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS

from zbmd.transport import capture
from zbmd.transport.capture import records as rec
from zbmd.transport.capture.log import RING_PARTS
from zbmd.transport.capture.native._recording import PACKED_FRAME_BYTES_MAX, PackedFrames
from zbmd.transport.capture.recorder import RECORD_WEIGHT_BYTES
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.memory.scattered import Scattered

ORIGIN = capture.Origin(process="rank0", incarnation=1)
RING_BYTES = RING_PARTS * RECORD_WEIGHT_BYTES * 4


def ring(ring_bytes: int = RING_BYTES) -> capture.RingRecorder:
    return capture.RingRecorder(ORIGIN, capture.Clocks(hybrid=HybridClock()), ring_bytes=ring_bytes)


def held(recorder: capture.RingRecorder) -> int:
    return sum(map(len, recorder._parts))


def dumped(directory: Path) -> list[capture.Entry]:
    (log,) = capture.open_log(directory).processes
    return list(log.entries())


def test_the_last_records_are_kept_and_the_bound_holds(tmp_path: Path) -> None:
    recorder = ring()
    for i in range(10_000):
        recorder.mark(0, i)
        assert held(recorder) * RECORD_WEIGHT_BYTES <= RING_BYTES + RECORD_WEIGHT_BYTES
    path = recorder.dump(tmp_path, "to see")
    entries = dumped(tmp_path)
    marks = [entry.record.step for entry in entries if isinstance(entry.record, rec.Mark)]
    assert marks == list(range(10_000 - len(marks), 10_000)) and len(marks) >= 200
    assert entries[0].number == recorder.forgotten == 10_000 - len(marks)
    assert path == tmp_path / "rank0#1"
    note, end = entries[-2].record, entries[-1].record
    assert isinstance(note, rec.NoteRecord) and "to see" in note.text
    assert isinstance(end, rec.EndRecord)


def test_large_payloads_count(tmp_path: Path) -> None:
    recorder = ring(1 << 20)
    link = recorder.link("rank1", 1)
    for nbytes in (10_000, 300_000, 100):
        for i in range(300):
            recorder.frame_in(link, bytes(nbytes), i)
            taken = [one for part in recorder._parts for one in part if isinstance(one, tuple)]
            assert sum(len(record[-1]) for record in taken if record[0] == 4) <= (1 << 20) + nbytes


def test_streams_of_what_is_left_are_still_declared(tmp_path: Path) -> None:
    recorder = ring()
    early, gone = recorder.link("early", 1), recorder.link("gone", 1)
    recorder.end_stream(gone, "left")
    for i in range(1000):
        recorder.mark(early, i)
    late, short = recorder.link("late", 1), recorder.link("short", 1)
    recorder.end_stream(short, "left")
    recorder.mark(late, 5000)
    recorder.dump(tmp_path, "x")
    (log,) = capture.open_log(tmp_path).processes
    declared = {stream.name: stream.continued for stream in log.streams.values()}
    assert declared == {"early#1": True, "late#1": False, "short#1": False}
    place = log.find_step(5000, stream=late)
    assert place is not None


def test_a_stream_that_ended_is_declared_as_long_as_its_records_last(tmp_path: Path) -> None:
    recorder = ring()
    link = recorder.link("peer", 1)
    for i in range(300):
        recorder.mark(0, i)
    recorder.note("of the peer", stream=link)
    recorder.end_stream(link, "left")
    assert recorder.forgotten > 1
    recorder.dump(tmp_path / "soon", "x")
    (log,) = capture.open_log(tmp_path / "soon").processes
    assert [stream.name for stream in log.streams.values()] == ["peer#1"]
    for i in range(1000):
        recorder.mark(0, i)
    recorder.dump(tmp_path / "later", "x")
    (log,) = capture.open_log(tmp_path / "later").processes
    assert not log.streams


def test_a_ring_is_dumped_once_into_a_directory(tmp_path: Path) -> None:
    recorder = ring()
    recorder.close()
    recorder.note("late")
    recorder.dump(tmp_path, "x")
    assert [entry.record.kind for entry in dumped(tmp_path)] == [
        capture.RecordType.NOTE,
        capture.RecordType.END,
    ]
    with pytest.raises(capture.CaptureExists):
        recorder.dump(tmp_path, "again")
    with pytest.raises(LocalProtocolError):
        ring(1000)


def test_frames_are_packed_and_told_in_their_order(tmp_path: Path) -> None:
    """Small ones, long ones, ones in pieces, and other records between them."""
    recorder = ring(1 << 20)
    link = recorder.link("rank1", 1)
    header, wanted = bytes(range(48)), []
    for i in range(600):
        frame = header + i.to_bytes(4) * (1 + i % 7)
        if i % 50 == 7:
            frame += bytes(PACKED_FRAME_BYTES_MAX)
        if i % 100 == 3:
            recorder.long_frame_in(link, header, Scattered(b"a", frame, b"z"), i)
            wanted.append(("FrameIn", header + b"a" + frame + b"z"))
        elif i % 3:
            recorder.frame_in(link, frame, i)
            wanted.append(("FrameIn", frame))
        else:
            pieces = i % 2
            recorder.frame_out(link, header, Scattered(b"b", frame, b"") if pieces else frame, i)
            wanted.append(("FrameOut", header + b"b" * pieces + frame))
        if i % 41 == 0:
            recorder.mark(link, i)
            wanted.append(("Mark", i))
    packed = [one for part in recorder._parts for one in part if isinstance(one, PackedFrames)]
    assert packed and sum(map(len, packed)) > 400, "they are not kept one by one"
    recorder.dump(tmp_path, "x")
    told = [told_of(entry.record) for entry in dumped(tmp_path)]
    assert [one for one in told if one is not None] == wanted


def told_of(record: rec.Record) -> tuple[str, object] | None:
    if isinstance(record, rec.FrameIn):
        return "FrameIn", record.frame
    if isinstance(record, rec.FrameOut):
        return "FrameOut", record.header + record.payload
    return ("Mark", record.step) if isinstance(record, rec.Mark) else None


def test_packed_frames_are_forgotten_by_their_number(tmp_path: Path) -> None:
    recorder = ring()
    link = recorder.link("rank1", 1)
    for i in range(5000):
        recorder.frame_in(link, bytes(48), i)
    recorder.dump(tmp_path, "x")
    entries = dumped(tmp_path)
    frames = [entry for entry in entries if isinstance(entry.record, rec.FrameIn)]
    again = 1  # the link is declared again
    assert len(frames) >= 100 and frames[0].number == recorder.forgotten + again
    assert recorder.forgotten == 5001 - len(frames)
    recorder.close()
    recorder.frame_in(link, bytes(48), 1)
    recorder.dump(tmp_path / "closed", "x")
    last = [entry.record for entry in dumped(tmp_path / "closed") if isinstance(entry.record, rec.FrameIn)]
    assert len(last) == len(frames), "what comes later is ignored"


CHILD = str(PROGRAMS / "transport" / "crashes_with_ring.py")


def child(directory: Path, case: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, CHILD, str(directory), case]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.parametrize(
    ("case", "code", "reason"),
    [
        ("exception", 1, "ValueError: odd"),
        ("abort", -signal.SIGABRT, "ended by SIGABRT"),
        ("quits", -signal.SIGQUIT, "ended by SIGQUIT"),
        ("thread", 0, "ZeroDivisionError in worker: division by zero"),
    ],
)
def test_a_crash_writes_the_ring_down(tmp_path: Path, case: str, code: int, reason: str) -> None:
    run = child(tmp_path, case)
    assert run.returncode == code, run.stderr
    texts = [entry.record.text for entry in dumped(tmp_path) if isinstance(entry.record, rec.NoteRecord)]
    assert texts == ["before the crash", f"dumped from memory: {reason}"]
    assert "written" in run.stdout + run.stderr
    if code == 1:
        assert "Traceback" in run.stderr  # what was there before still runs


@pytest.mark.parametrize("case", ["sigkill", "ends", "undone", "forked_child"])
def test_nothing_is_written_otherwise(tmp_path: Path, case: str) -> None:
    child(tmp_path, case)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_without_a_disk_is_still_that_crash(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    run = child(tmp_path / "file", "exception")
    assert run.returncode == 1
    assert "ValueError: odd" in run.stderr and "cannot be written" in run.stdout + run.stderr
