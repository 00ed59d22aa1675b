"""The commit log: it survives a torn end and a change of writers, and the audit finds every deviation."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from zbmd.training.run import ledger
from zbmd.training.run.audit import Audit, audit
from zbmd.training.run.ledger import (
    LOG_FORMAT,
    LOG_NAME,
    CommitLog,
    CommitRecord,
    LedgerBroken,
    LogHeader,
    RunLog,
    has_log,
    read_log,
)
from zbmd.transport.errors import UserError

HEADER = LogHeader(format=LOG_FORMAT, run_id="run", base_version=0, plan="{}", seed=1)


def expected(version: int) -> list[int]:
    return [2 * version, 2 * version + 1]


def record(version: int, *, digest: str | None = None, samples: list[int] | None = None) -> CommitRecord:
    first, second = samples or expected(version)
    return CommitRecord(
        version=version,
        epoch=1,
        members=(0, 1),
        shards={0: (first,), 1: (second,)},
        losses={0: 1.0, 1: 2.0},
        rng_key=(1, version - 1),
        digest=digest or f"{version:032x}",
        at_ns=version,
    )


def written(path: Path, *versions: int) -> CommitLog:
    log = CommitLog(path, HEADER)
    for version in versions:
        log.append(record(version))
    log.close()
    return log


def test_records_are_read_back(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 1, 2, 3)
    assert read_log(tmp_path / "log") == (HEADER, [record(v) for v in (1, 2, 3)])
    assert log.last_version() == 3


def test_the_next_writer_cuts_off_a_torn_record_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "log"
    written(path, 1, 2)
    whole = path.stat().st_size
    written(path, 3)
    data = path.read_bytes()
    for end in range(whole, len(data)):
        path.write_bytes(data[:end])
        assert CommitLog(path, HEADER).last_version() == 2
        written(path, 3, 4)
        assert [r.version for r in read_log(path)[1]] == [1, 2, 3, 4]


def test_who_goes_on_with_a_long_log_reads_its_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, count = tmp_path / LOG_NAME, 2 * ledger.DIGESTS_KEPT
    written(path, *range(1, count + 1))
    read: list[tuple[int, Any]] = []
    objects = ledger._objects

    def counted(path: Path, start: int = 0) -> Iterator[tuple[int, Any]]:
        for found in objects(path, start):
            read.append(found)
            yield found

    monkeypatch.setattr(ledger, "_objects", counted)
    run = RunLog(tmp_path, run_id="run", first=0, plan="{}", seed=1, may_begin=False)
    with closing(run):
        assert run.last_version() == count
        assert run.record(count - 3) == record(count - 3)
        run.append(record(count))  # again
        run.append(record(count + 1))
        run.append(record(7))  # again, of long ago
        assert all(isinstance(value, dict) and "run_id" in value for _, value in read), "headers"
        with pytest.raises(LedgerBroken, match=f"version 7 is in .* as {7:032x}"):
            run.append(record(7, digest="another"))
        with pytest.raises(LedgerBroken, match="is not in"):
            run.record(count + 9)
    assert [one.version for one in read_log(path)[1]] == list(range(1, count + 2))


def test_a_log_whose_writer_ended_before_its_header_was_whole_is_none_yet(tmp_path: Path) -> None:
    header = msgspec.msgpack.encode(HEADER)
    for end in range(len(header)):
        (tmp_path / LOG_NAME).write_bytes(header[:end])
        assert not has_log(tmp_path / LOG_NAME)
        options: dict[str, Any] = {"run_id": "another", "first": 0, "plan": "p", "seed": 3}
        found = [RunLog(tmp_path, may_begin=may_begin, **options) for may_begin in (True, False)]
        assert [log.last_version() for log in found] == [0, 0]
        with closing(found[1]) as log:
            log.append(record(1))
        assert found[0].last_version() == 1
    assert has_log(tmp_path / LOG_NAME)


def test_a_version_is_written_once_and_only_with_one_digest(tmp_path: Path) -> None:
    written(tmp_path / "log", 1, 2)
    second = written(tmp_path / "log", 2, 3)
    assert [r.version for r in read_log(tmp_path / "log")[1]] == [1, 2, 3]
    with pytest.raises(LedgerBroken, match="version 3 is in"), closing(second):
        second.append(record(3, digest="other"))


def test_a_writer_that_lives_on_holds_up_nobody(tmp_path: Path) -> None:
    """As one whose host was cut off: the others log without it, and what it has still to log is known."""
    path = tmp_path / "log"
    with closing(CommitLog(path, HEADER)) as cut_off, closing(CommitLog(path, HEADER)) as other:
        cut_off.append(record(1))
        other.append(record(1))
        other.append(record(2))
        cut_off.append(record(2))
        cut_off.append(record(3))
        other.append(record(4))
    assert [one.version for one in read_log(path)[1]] == [1, 2, 3, 4]


def test_a_gap_is_refused(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 1)
    with pytest.raises(LedgerBroken, match="cannot follow"), closing(log):
        log.append(record(3))


def test_another_runs_log_is_not_continued(tmp_path: Path) -> None:
    written(tmp_path / "log", 1)
    other = LogHeader(format=LOG_FORMAT, run_id="other", base_version=0, plan="{}", seed=1)
    with pytest.raises(UserError, match="another run"):
        CommitLog(tmp_path / "log", other).append(record(2))
    with pytest.raises(UserError, match="another run"):
        CommitLog(tmp_path / "log", other).last_version()


def test_a_damaged_log_is_read_up_to_the_damage_and_never_cut_there(tmp_path: Path) -> None:
    """Data behind the damage may be the run's: only a record that was cut short is cut off."""
    path = tmp_path / "log"
    written(path, 1, 2)
    whole = path.stat().st_size
    written(path, 3, 4)
    data = bytearray(path.read_bytes())
    data[whole] = 0xC1  # the one byte that MessagePack never has
    path.write_bytes(data)
    assert [r.version for r in read_log(path)[1]] == [1, 2]
    with pytest.raises(UserError, match=f"damaged at byte {whole}"):
        written(path, 3)
    assert path.read_bytes() == data


def test_a_file_that_is_no_log_is_not_emptied(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xc1 somebody's notes")
    with pytest.raises(UserError, match="not a commit log"):
        written(path, 1)
    assert path.read_bytes() == b"\xc1 somebody's notes"


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_log(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"plain text", b"\xdd\xff\xff\xff\xff"])
def test_a_foreign_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "log").write_bytes(data)
    with pytest.raises(UserError, match="not a commit log"):
        read_log(tmp_path / "log")
    with pytest.raises(UserError, match="no commit log"):
        read_log(tmp_path / "missing")


def test_a_disk_that_takes_no_more_is_said_and_the_log_stays_whole(tmp_path: Path) -> None:
    log = written(tmp_path / "log", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "log").stat().st_size + 10, hard))
    try:
        with pytest.raises(UserError, match="cannot write the commit log"), closing(log):
            log.append(record(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    written(tmp_path / "log", 2)
    assert [r.version for r in read_log(tmp_path / "log")[1]] == [1, 2]


@pytest.mark.parametrize(
    ("records", "skipped", "repeated", "lost"),
    [
        ([record(1), record(2), record(3)], 0, 0, 0),
        ([record(1), record(3)], 2, 0, 1),
        ([record(1), record(2, samples=[4, 4]), record(3)], 1, 1, 0),
        ([record(1), record(2, samples=[4, 99]), record(3)], 1, 1, 0),
        ([record(1), record(2), record(2), record(3)], 0, 2, 0),
    ],
)
def test_the_audit_counts_every_deviation(
    records: list[CommitRecord], skipped: int, repeated: int, lost: int
) -> None:
    found = audit(records, expected, base_version=0, steps=3)
    assert found == Audit(
        steps=3 - lost, steps_lost=lost, samples=6, samples_skipped=skipped, samples_repeated=repeated
    )


def test_a_state_whose_log_was_removed_names_what_to_do(tmp_path: Path) -> None:
    """A snapshot process holds the state of a run whose directory is gone, and no file can be made there."""
    run = RunLog(tmp_path / "gone", run_id="0" * 16, first=0, plan="{}", seed=1, may_begin=True)
    with pytest.raises(UserError, match=r"is at step 7: .* found none\. Restore .* --job 0{16} --drop"):
        run.append(record(7))
    run = RunLog(tmp_path, run_id="0" * 16, first=0, plan="{}", seed=1, may_begin=True)
    run.append(record(1))
    with pytest.raises(ledger.LedgerBroken):
        run.append(record(7))
    run.close()
