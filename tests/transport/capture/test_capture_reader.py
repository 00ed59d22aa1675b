"""The reading side: whole records up to the damage, a typed error there, and never anything else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.transport import capture
from zbmd.transport.capture import format as fmt
from zbmd.transport.capture import records as rec
from zbmd.transport.capture.files import DiskLimits, LogFiles
from zbmd.transport.capture.format import BlockInfo
from zbmd.transport.capture.reader import Filter, ProcessLog, filtered, merged, skews
from zbmd.transport.capture.records import RawRecord, RecordType
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.frames import FrameHeader, pack_header

ANCHOR = fmt.Anchor(wall_ns=1_000_000_000, monotonic_ns=1_000)


def marks(count: int, *, stream: int = 0, first: int = 0) -> list[RawRecord]:
    """MARK records of `count` steps, one a microsecond."""
    return [(int(RecordType.MARK), stream, 1_000 * i, i, i) for i in range(first, first + count)]


def write_log(
    directory: Path,
    records: list[RawRecord],
    *,
    process: str = "rank0",
    block: int = 50,
    segment_bytes: int = 1 << 20,
    anchor: fmt.Anchor = ANCHOR,
) -> ProcessLog:
    """A log of exactly these records, `block` in a block."""
    limits = DiskLimits(segment_bytes=segment_bytes, disk_bytes=1 << 30)
    files = LogFiles(directory, fmt.Origin(process=process, incarnation=1), limits, lambda: anchor)
    for start in range(0, len(records), block):
        files.write(records[start : start + block])
    files.close()
    found = {log.name: log for log in capture.open_log(directory).processes}
    return found[f"{process}#1"]


def steps_of(log: ProcessLog) -> tuple[list[int], capture.CaptureError | None]:
    """The steps that can be read, and what ended the reading."""
    steps: list[int] = []
    try:
        for entry in log.entries():
            if isinstance(entry.record, rec.Mark):
                steps.append(entry.record.step)
    except capture.CaptureError as error:
        return steps, error
    return steps, None


def test_numbers_and_times_belong_to_the_process(tmp_path: Path) -> None:
    log = write_log(tmp_path, marks(1000), segment_bytes=1 << 12)
    entries = list(log.entries())
    assert len(log.segments) > 1
    assert [entry.number for entry in entries] == list(range(1000))
    assert entries[0].wall_ns == 1_000_000_000 - 1_000
    assert log.ending is capture.Ending.CUT


@pytest.mark.parametrize("path", ["", "rank0#1", "rank0#1/000000.zlog"])
def test_a_capture_opens_by_any_of_its_paths(tmp_path: Path, path: str) -> None:
    write_log(tmp_path, marks(10))
    (log,) = capture.open_log(tmp_path / path).processes
    assert steps_of(log) == (list(range(10)), None)


def _foreign(data: bytes) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        (path / "000000.zlog").write_bytes(data)

    return plant


def _other_file(path: Path) -> None:
    (path / "other.txt").write_text("x")


@pytest.mark.parametrize(
    "plant",
    [
        _foreign(b""),
        _foreign(b"not a log at all, but some text of a fair length, longer than a header is"),
        _foreign(zstandard.compress(b"some other file in Zstandard's format" * 10)),
        lambda path: os.mkfifo(path / "000000.zlog"),
        lambda path: (path / "000000.zlog").mkdir(),
        _other_file,
    ],
    ids=["empty", "text", "zstd", "fifo", "directory", "nothing"],
)
def test_what_is_no_capture_is_called_so(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    directory = tmp_path / "rank0#1"
    directory.mkdir()
    plant(directory)
    with pytest.raises(capture.NotACapture, match="capture"):
        capture.open_log(tmp_path)


def test_a_missing_path_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(capture.NotACapture, match="There is no"):
        capture.open_log(tmp_path / "nowhere")


def test_a_log_of_another_format_names_it(tmp_path: Path) -> None:
    log = write_log(tmp_path, marks(10))
    path = log.path / "000000.zlog"
    data = bytearray(path.read_bytes())
    data[16] = 9
    path.write_bytes(data)
    with pytest.raises(capture.NotACapture, match="has format 9"):
        capture.open_log(tmp_path)


def test_one_unreadable_process_does_not_hide_the_others(tmp_path: Path) -> None:
    write_log(tmp_path, marks(10))
    write_log(tmp_path, marks(10), process="rank1")
    (tmp_path / "rank0#1" / "000000.zlog").write_bytes(b"x" * 100)
    opened = capture.open_log(tmp_path)
    assert [log.name for log in opened.processes] == ["rank1#1"]
    (problem,) = opened.problems
    assert "rank0#1" in str(problem)


def test_ranks_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("rank10", "rank2", "node"):
        write_log(tmp_path, marks(1), process=name)
    assert [log.origin.process for log in capture.open_log(tmp_path).processes] == ["node", "rank2", "rank10"]


# ---- damage


def test_a_torn_end_costs_nothing_before_it(tmp_path: Path) -> None:
    log = write_log(tmp_path, marks(200))
    path = log.path / "000000.zlog"
    last = log.segments[0].index.blocks[-1]
    path.write_bytes(path.read_bytes()[: last.end - 1])
    (log,) = capture.open_log(tmp_path).processes
    assert log.ending is capture.Ending.TORN
    assert steps_of(log) == (list(range(150)), None)
    assert log.find_step(149) is not None and log.find_step(150) is None  # the index of before does not fit


def test_damage_is_told_with_its_place(tmp_path: Path) -> None:
    log = write_log(tmp_path, marks(200))
    path = log.path / "000000.zlog"
    block = log.segments[0].index.blocks[2]
    data = bytearray(path.read_bytes())
    data[block.end - 3] ^= 1
    path.write_bytes(data)
    (log,) = capture.open_log(tmp_path).processes
    steps, error = steps_of(log)
    assert steps == list(range(100))
    assert isinstance(error, capture.CaptureDamaged)
    assert (error.path, error.offset) == (path, block.offset)
    assert "checksum" in str(error) and str(path) in str(error)


def test_a_missing_segment_ends_the_reading(tmp_path: Path) -> None:
    log = write_log(tmp_path, marks(2000), segment_bytes=1 << 12)
    assert len(log.segments) > 3
    (log.path / "000001.zlog").unlink()
    (log,) = capture.open_log(tmp_path).processes
    steps, error = steps_of(log)
    assert 0 < len(steps) < log.segments[1].header.records_before and steps == list(range(len(steps)))
    assert isinstance(error, capture.CaptureDamaged) and "should follow" in str(error)


def test_a_segment_of_another_process_is_not_taken_for_its_own(tmp_path: Path) -> None:
    one = write_log(tmp_path, marks(10))
    other = write_log(tmp_path, marks(10), process="rank1")
    shutil.copy(other.path / "000000.zlog", one.path / "000001.zlog")
    opened = capture.open_log(tmp_path)
    assert [log.name for log in opened.processes] == ["rank1#1"]
    assert isinstance(opened.problems[0], capture.CaptureDamaged)


def test_a_segment_that_was_just_begun_is_passed_over(tmp_path: Path) -> None:
    log = write_log(tmp_path, marks(10))
    (log.path / "000001.zlog").write_bytes(b"\x5a")
    (log,) = capture.open_log(tmp_path).processes
    assert steps_of(log) == (list(range(10)), None)


def test_a_block_that_would_grow_without_end_is_refused(tmp_path: Path) -> None:
    """Checksums are no proof of good will: here they are right, and the contents a bomb."""
    log = write_log(tmp_path, marks(10))
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    info = BlockInfo(0, 0, 0, 0, 10, 10, 0, 0, 0, 0)
    data, _ = fmt.pack_block(bomb, 5, info)
    with (log.path / "000000.zlog").open("ab") as file:
        file.write(data)
    (log,) = capture.open_log(tmp_path).processes
    steps, error = steps_of(log)
    assert steps == list(range(10))
    assert isinstance(error, capture.CaptureDamaged) and "another size" in str(error)


@pytest.mark.parametrize(
    "raw",
    [b"\x91" * 5000 + b"\x01", b"\x01", msgspec.msgpack.encode([99, 0, 0, 0]), b"\xdd\xff\xff\xff\xff", b""],
    ids=["deep", "no array", "unknown kind", "huge array", "nothing"],
)
def test_a_block_of_other_objects_is_refused(tmp_path: Path, raw: bytes) -> None:
    log = write_log(tmp_path, marks(10))
    data, _ = fmt.pack_block(
        fmt.new_compressor().compress(raw), len(raw), BlockInfo(0, 0, 0, 0, 1, 10, 0, 0, 0, 0)
    )
    with (log.path / "000000.zlog").open("ab") as file:
        file.write(data)
    (log,) = capture.open_log(tmp_path).processes
    steps, error = steps_of(log)
    assert steps == list(range(10)) and isinstance(error, capture.CaptureDamaged)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pristine")
    write_log(directory, marks(120), block=30)
    return directory


@st.composite
def edits(draw: st.DrawFn) -> tuple[str, Callable[[bytes], bytes]]:
    """One way of spoiling a file, and its name."""
    where = draw(st.floats(0, 1, exclude_max=True))
    how = draw(st.sampled_from(["flip", "cut", "insert", "remove", "repeat"]))
    mask = draw(st.integers(1, 255))
    some = draw(st.binary(min_size=1, max_size=40))

    def edit(data: bytes) -> bytes:
        at = int(where * len(data))
        match how:
            case "flip":
                return data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
            case "cut":
                return data[:at]
            case "insert":
                return data[:at] + some + data[at:]
            case "remove":
                return data[:at] + data[at + len(some) :]
            case _:
                return data[:at] + data[at - mask : at] + data[at:]

    return how, edit


@settings(max_examples=200)
@given(edit=edits(), name=st.sampled_from(["000000.zlog", "000000.zidx"]))
def test_whatever_is_spoilt_gives_a_prefix_or_a_typed_error(
    pristine: Path,
    tmp_path_factory: pytest.TempPathFactory,
    edit: tuple[str, Callable[[bytes], bytes]],
    name: str,
) -> None:
    how, spoil = edit
    directory = tmp_path_factory.mktemp("spoilt")
    shutil.copytree(pristine, directory, dirs_exist_ok=True)
    path = directory / "rank0#1" / name
    path.write_bytes(spoil(path.read_bytes()))
    try:
        (log,) = capture.open_log(directory).processes
    except capture.CaptureError:
        return
    steps, error = steps_of(log)
    assert steps == list(range(len(steps)))
    whole = name.endswith(".zidx")
    assert not whole or (len(steps) == 120 and error is None)
    assert len(steps) == 120 or error is not None or how != "flip"
    for step in (0, 45, 119):
        try:
            place = log.find_step(step)
        except capture.CaptureDamaged:
            continue
        assert place is None or place.number == step
        assert place is not None or not whole


# ---- finding and filtering


@pytest.mark.parametrize("spoil", ["kept", "missing", "damaged"])
def test_steps_are_found_with_and_without_the_index(tmp_path: Path, spoil: str) -> None:
    log = write_log(tmp_path, marks(3000), segment_bytes=1 << 12)
    for path in list(log.path.glob("*.zidx")):
        match spoil:
            case "missing":
                path.unlink()
            case "damaged":
                path.write_bytes(path.read_bytes()[:-1] + b"\0\0")
            case _:
                pass
    (log,) = capture.open_log(tmp_path).processes
    assert log.steps == (0, 2999)
    for step in (0, 1, 1499, 2999):
        place = log.find_step(step)
        assert place is not None and place.number == step
        first = next(entry for entry in log.entries(place) if entry.number == place.number)
        assert isinstance(first.record, rec.Mark) and first.record.step == step
    assert log.find_step(3000) is None


def test_a_step_that_was_run_again_is_found_where_it_began_first(tmp_path: Path) -> None:
    again = [*marks(10), *marks(5, first=7), *marks(3, stream=2)]
    log = write_log(tmp_path, [(*record[:3], i, record[4]) for i, record in enumerate(again)], block=4)
    first, other = log.find_step(8), log.find_step(1, stream=2)
    assert first is not None and first.number == 8
    assert other is not None and other.number == 16
    found = filtered(log, Filter(steps=(7, 8)))
    assert [entry.number for entry in found] == [7, 8]


def test_filters_choose_processes_times_and_kinds(tmp_path: Path) -> None:
    note: RawRecord = (int(RecordType.NOTE), 0, 50_500, 51, "x")
    records = [*marks(51), note, *marks(49, first=51)]
    log = write_log(tmp_path, records, block=10)
    base_ns = ANCHOR.wall_ns - ANCHOR.monotonic_ns
    chosen = Filter(since_ns=base_ns + 50_000, until_ns=base_ns + 52_000)
    assert [entry.number for entry in filtered(log, chosen)] == [50, 51, 52]
    assert [entry.number for entry in filtered(log, Filter(kinds=frozenset({RecordType.NOTE})))] == [51]
    assert len(list(filtered(log, Filter(processes=frozenset({"rank0"}))))) == 101
    assert len(list(filtered(log, Filter(processes=frozenset({"rank0#1"}))))) == 101
    assert list(filtered(log, Filter(processes=frozenset({"rank0#2", "rank1"})))) == []
    assert list(filtered(log, Filter(steps=(500, 600)))) == []


# ---- many processes


def frame(sender: str, number: int, clock: HybridClock, wall_ns: int) -> bytes:
    """A frame of three bytes, sent at `wall_ns` of the sender's clock."""
    stamp = clock.tick(wall_ns)
    return (
        pack_header(FrameHeader(payload_bytes=3, job=1, incarnation=1, hlc=stamp, trace_id=number)) + b"abc"
    )


def exchange(tmp_path: Path, *, offset_ns: int, there_ns: int, back_ns: int) -> list[ProcessLog]:
    """Two processes on two hosts that exchange 20 frames; rank1's wall clock is `offset_ns` ahead."""
    clocks = {"rank0": HybridClock(), "rank1": HybridClock()}
    ahead = {"rank0": 0, "rank1": offset_ns}
    records: dict[str, list[RawRecord]] = {
        name: [(int(RecordType.STREAM), 1, 0, 0, f"{peer}#1", "link", 0, "", msgspec.Raw(b"\x80"), False)]
        for name, peer in (("rank0", "rank1"), ("rank1", "rank0"))
    }
    now_ns = 1_000_000_000
    for number in range(20):
        sender, receiver = ("rank0", "rank1") if number % 2 == 0 else ("rank1", "rank0")
        sent = frame(sender, number, clocks[sender], now_ns + ahead[sender])
        header, payload = sent[:48], sent[48:]
        stamp = clocks[sender].last
        records[sender].append((int(RecordType.FRAME_OUT), 1, now_ns, stamp, header, payload))
        now_ns += (there_ns if sender == "rank0" else back_ns) + (number * 37) % 11 * 100
        received = clocks[receiver].merge(stamp, now_ns + ahead[receiver])
        records[receiver].append((int(RecordType.FRAME_IN), 1, now_ns, received, sent))
    for name, kept in records.items():
        write_log(tmp_path, kept, process=name, anchor=fmt.Anchor(wall_ns=ahead[name], monotonic_ns=0))
    return list(capture.open_log(tmp_path).processes)


@pytest.mark.parametrize("offset_ns", [0, 5_000_000, -300_000])
def test_logs_merge_by_causality_whatever_the_clocks_say(tmp_path: Path, offset_ns: int) -> None:
    logs = exchange(tmp_path, offset_ns=offset_ns, there_ns=20_000, back_ns=20_000)
    seen: set[bytes] = set()
    story = list(merged(logs))
    for entry in story:
        if isinstance(entry.record, rec.FrameOut):
            seen.add(entry.record.header)
        if isinstance(entry.record, rec.FrameIn):
            assert entry.record.frame[:48] in seen, "a frame stands before its own sending"
    assert len(story) == 42


@pytest.mark.parametrize("offset_ns", [0, 5_000_000, -300_000])
def test_the_skew_of_two_clocks_is_found_within_its_stated_error(tmp_path: Path, offset_ns: int) -> None:
    logs = exchange(tmp_path, offset_ns=offset_ns, there_ns=20_000, back_ns=60_000)
    reference, other = skews(logs)
    assert (reference.process, reference.offset_ns, reference.error_ns) == ("rank0#1", 0, 0)
    assert (other.process, other.via, other.frames) == ("rank1#1", "rank0#1", 20)
    assert abs(other.offset_ns - offset_ns) <= other.error_ns
    assert other.error_ns <= 41_000  # half the round trip


def test_processes_that_never_spoke_have_no_skew(tmp_path: Path) -> None:
    write_log(tmp_path, marks(3))
    write_log(tmp_path, marks(3), process="rank1")
    assert [skew.process for skew in skews(capture.open_log(tmp_path).processes)] == ["rank0#1"]


def test_a_shared_monotonic_clock_needs_no_estimate(tmp_path: Path) -> None:
    for index, name in enumerate(("rank0", "rank1")):
        origin = fmt.Origin(process=name, incarnation=1, boot_id="one boot")
        anchor = fmt.Anchor(wall_ns=10_000 + index * 70, monotonic_ns=1_000)
        LogFiles(tmp_path, origin, DiskLimits(), lambda anchor=anchor: anchor).close()
    _, other = skews(capture.open_log(tmp_path).processes)
    assert (other.offset_ns, other.error_ns) == (70, 0)
