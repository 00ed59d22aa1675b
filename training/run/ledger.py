"""The commit log: what each committed step consisted of, and the audit that proves that no sample was lost.

The log is a stream of MessagePack objects that any msgpack tool can read: one header, then one record per
committed version, each followed by its length in bytes, a uint32, so that a long log is read from its end.
The lowest rank of an epoch appends; after its death the next one truncates a torn last record and continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
import msgspec

from zbmd.training.checkpoint.storage import folder_of
from zbmd.training.run.loop_steps import LoopStep
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.host.files import DISK_FULL_ERRNOS, DirectoryTaken, DiskFull, write_atomically

LOG_FORMAT = 2
RECORD_BYTES_MAX = 1 << 20
"""A larger record cannot be ours: reading stops there."""
DIGESTS_KEPT = 1024
"""Of the last versions of a log; those of earlier ones are looked up."""
_LENGTH = struct.Struct(">BI")
"""A MessagePack uint32."""
_UINT32 = 0xCE

LOG_NAME = "commits.zlog"
LOCK_NAME = "run.lock"
"""Locked, shared, for as long as a writer of the log lives."""


class LogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The run that the log belongs to; a log of another run is never appended to."""

    format: int
    run_id: str
    base_version: int
    plan: str
    """The determinants of the run's bits: model, data digest, shards, batch, reduction tree, optimizer."""
    seed: int


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One committed version: which rank computed which logical shard from which samples, and the results."""

    version: int
    epoch: int
    members: tuple[int, ...]
    shards: dict[int, tuple[int, ...]]
    """Logical shard → sample ids, as voted by the ranks that computed them."""
    losses: dict[int, float]
    rng_key: tuple[int, int]
    digest: str
    """xxh3-128 of weights and optimizer state, hex."""
    at_ns: int
    """CLOCK_MONOTONIC of the writer, ns."""
    held_out_loss: float | None = None
    """Nats per byte of the previous version on held-out text; None for steps that did not evaluate."""
    loop: LoopStep | None = None
    """Of a step of a PyTorch loop. Its shards are ranks; it has one loss, the mean that is called so, if any;
    the digest is of the state before the step, "" where ranks have not compared it."""


class LedgerBroken(ZbmdError):
    """The commit log contradicts what is being committed."""


class _Damaged(Exception):
    """An object of the log is invalid, and it is not a truncated last one."""

    def __init__(self, offset: int, why: object) -> None:
        super().__init__(f"it is damaged at byte {offset}: {why}")


_pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True).pack
_LIMITS: dict[str, Any] = {
    "raw": False,
    "strict_map_key": False,
    "max_str_len": RECORD_BYTES_MAX,
    "max_array_len": 65_536,
    "max_map_len": 65_536,
}
_UNREADABLE = (msgpack.UnpackException, ValueError, TypeError, RecursionError)


def _packed(value: LogHeader | CommitRecord) -> bytes:
    """An object of the log, with its length behind it."""
    data = _pack(msgspec.to_builtins(value, str_keys=False))
    return data + _LENGTH.pack(_UINT32, len(data))


def _objects(path: Path, start: int = 0) -> Generator[tuple[int, Any]]:
    """Yield the complete objects of a log from offset `start` on, with the offset after each.

    Stops at a torn end. Raises `_Damaged`.
    """
    end = start
    with path.open("rb") as file:
        file.seek(start)
        unpacker = msgpack.Unpacker(file, max_buffer_size=2 * RECORD_BYTES_MAX, **_LIMITS)
        while True:
            try:
                value, length = unpacker.unpack(), unpacker.unpack()
            except msgpack.OutOfData:
                return
            except _UNREADABLE as error:
                raise _Damaged(end, f"{type(error).__name__} {error}") from None
            begin, end = end, start + unpacker.tell()
            if length != end - begin - _LENGTH.size:
                raise _Damaged(begin, f"an object of {end - begin} bytes says that it has {length!r}")
            yield end, value


def _records_backwards(path: Path) -> Generator[CommitRecord]:
    """Yield the records of a log from its last one to its header. Raises `_Damaged`, at a torn end too."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            kind = length = 0
            if end >= _LENGTH.size:
                file.seek(end - _LENGTH.size)
                kind, length = _LENGTH.unpack(file.read(_LENGTH.size))
            begin = end - _LENGTH.size - length
            if kind != _UINT32 or length > RECORD_BYTES_MAX or begin < 0:
                raise _Damaged(end, "there is no object before it")
            if begin == 0:
                return
            file.seek(begin)
            try:
                yield msgspec.convert(msgpack.unpackb(file.read(length), **_LIMITS), CommitRecord)
            except (*_UNREADABLE, msgspec.ValidationError) as error:
                raise _Damaged(begin, f"{type(error).__name__} {error}") from None
            end = begin


def read_record(path: Path, version: int | None = None) -> CommitRecord | None:
    """Return the record of a version, by default of the last one; None if the log has none of it.

    Reads the log from its end. Raises as `read_log`.
    """
    with _errors_explained(path):
        try:
            for record in _records_backwards(path):
                if version is None or record.version <= version:
                    return record if version in (None, record.version) else None
        except _Damaged:  # or the last record is torn
            records = read_log(path)[1]
            return next((one for one in reversed(records) if version in (None, one.version)), None)
    return None


def read_log(path: Path) -> tuple[LogHeader, list[CommitRecord]]:
    """Return the header and all complete records of a commit log, up to where it is damaged.

    Raises `UserError` if the file is missing or is not a commit log of this format.
    """
    records: list[CommitRecord] = []
    with _errors_explained(path):
        objects = _objects(path)
        header = _header_of(path, objects)
        with contextlib.suppress(_Damaged):  # a rank that continues the log reports it
            for _, value in objects:
                records.append(msgspec.convert(value, CommitRecord))
    return header, records


def logged_in(path: Path, version: int) -> bool:
    """Return whether a log has `version`, or begins after it. One that cannot be read has nothing."""
    try:
        last = read_record(path)
        return version <= (read_header(path).base_version if last is None else last.version)
    except UserError:
        return False


def read_header(path: Path) -> LogHeader:
    """Return the header of a commit log without reading its records. Raises as `read_log`."""
    with _errors_explained(path), contextlib.closing(_objects(path)) as objects:
        return _header_of(path, objects)


def has_log(path: Path) -> bool:
    """Return whether a commit log has been begun at `path`.

    It has not where its writer ended, or is, between making the file and writing the header.
    """
    if not path.exists():
        return False
    with _errors_explained(path), contextlib.closing(_objects(path)) as objects:
        return next(objects, None) is not None


def _header_of(path: Path, objects: Iterator[tuple[int, Any]]) -> LogHeader:
    header = msgspec.convert(next(objects)[1], LogHeader)
    if header.format != LOG_FORMAT:
        raise UserError(f"{path} has format {header.format}; this version reads format {LOG_FORMAT}.")
    return header


@contextlib.contextmanager
def _errors_explained(path: Path) -> Generator[None]:
    """Raise what goes wrong in the block as `UserError`."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"no commit log at {path}: give the directory of a run.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Give the directory of a run.") from error
    except StopIteration:
        empty = f"{path} is not a commit log, or none yet: it has no header, and so no step is committed"
        raise UserError(f"{empty}. Give the directory of a run.") from None
    except (msgspec.ValidationError, _Damaged) as error:
        raise UserError(f"{path} is not a commit log ({error}): give the directory of a run.") from None


class CommitLog:
    """Appends to the log. There is one regular writer at a time: the lowest rank of the epoch.

    A member that saw a commit which the writer did not live to log appends it too, at the change of epochs.
    So each record is written under the file's lock, after reading what was appended in the meantime. The lock
    is held for that record only: a writer on a host that was cut off may live on for a while, and nobody
    waits for its end.
    """

    def __init__(self, path: Path, header: LogHeader) -> None:
        self.path = path
        self.header = header
        self._file: int | None = None
        self._lock: int | None = None
        self._digests: dict[int, str] = {}
        self._last = header.base_version
        """The highest version that is known to be in the log."""
        self._read = (0, 0)
        """The inode of the file that was read, and the offset up to which it was; earlier bytes never
        change."""

    def last_version(self) -> int:
        """Return the highest version in the log on disk, or the header's base version if there is no log yet.

        Raises `UserError` if the log belongs to another run.
        """
        if not has_log(self.path):
            return self.header.base_version
        header = read_header(self.path)
        self._check(header)
        last = read_record(self.path)
        return header.base_version if last is None else last.version

    def append(self, record: CommitRecord) -> None:
        """Write `record`, unless its version is already in the log.

        Raises `LedgerBroken` if the log has the version with another digest or a gap before it, and
        `UserError` if the disk is full.
        """
        file = self._open()
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            self._append(file, record)
            fcntl.flock(file, fcntl.LOCK_UN)
        except BaseException:
            self.close()  # and the lock with it
            raise

    def _open(self) -> int:
        if self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_APPEND
            self._file = os.open(self.path, flags, 0o644)
            self._lock = locked(self.path.parent / LOCK_NAME, fcntl.LOCK_SH)
        return self._file

    def take_back(self, version: int) -> None:
        """Cut off the record of `version`, the last one: its writer was lost, and nobody else saw the commit.

        Raises `LedgerBroken` if another one is the last.
        """
        file = self._open()
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._catch_up(file)
            if self._last != version:
                raise LedgerBroken(f"version {version} is not the last in {self.path}, {self._last} is")
            inode, end = self._read
            length: int = _LENGTH.unpack(os.pread(file, _LENGTH.size, end - _LENGTH.size))[1]
            end -= length + _LENGTH.size
            os.ftruncate(file, end)
            self._digests.pop(version, None)
            self._last, self._read = version - 1, (inode, end)
            fcntl.flock(file, fcntl.LOCK_UN)
        except BaseException:
            self.close()
            raise

    def _append(self, file: int, record: CommitRecord) -> None:
        known = self._digest_of(record.version)
        if known is not None and known != record.digest:
            raise LedgerBroken(f"version {record.version} is in {self.path} as {known}, now {record.digest}")
        if known is not None:
            return
        if record.version != self._last + 1:
            raise LedgerBroken(f"version {record.version} cannot follow {self._last} in {self.path}")
        self._write(file, _packed(record))
        self._know(record)

    def _digest_of(self, version: int) -> str | None:
        if version in self._digests or not self.header.base_version < version <= self._last:
            return self._digests.get(version)
        try:
            found = next((one for one in _records_backwards(self.path) if one.version == version), None)
        except _Damaged as error:
            raise self._damaged(error) from None
        return None if found is None else found.digest

    def _know(self, record: CommitRecord) -> None:
        self._digests[record.version] = record.digest
        self._last = max(self._last, record.version)
        if len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    def close(self) -> None:
        """Close the file; `append` opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _catch_up(self, file: int) -> None:
        """Read what is new in the log, whose lock is held, and truncate it after its last complete record."""
        status = os.fstat(file)
        if status.st_size and self._read == (status.st_ino, status.st_size):
            return
        end = self._read_known(status)
        os.ftruncate(file, end)  # a record torn by the last writer's death
        if end == 0:
            self._write(file, _packed(self.header))

    def _write(self, file: int, data: bytes) -> None:
        _write(file, data, self.path)
        self._read = self._read[0], self._read[1] + len(data)

    def _read_known(self, status: os.stat_result) -> int:
        """Read what is new in the log; return the offset after its last complete record.

        Only a truncated record is left out. Damage raises, because records of the run may follow it.
        """
        inode, end = self._read
        if inode != status.st_ino or end > status.st_size:
            self._digests.clear()
            self._last = self.header.base_version
            end = self._read_end(status)
        begin = end
        try:
            for offset, value in _objects(self.path, begin):
                if end == 0:
                    self._check(msgspec.convert(value, LogHeader))
                else:
                    record = msgspec.convert(value, CommitRecord)
                    self._know(record)
                end = offset
        except (msgspec.ValidationError, _Damaged) as error:
            raise self._damaged(error) from None
        self._read = (status.st_ino, end)
        return end

    def _read_end(self, status: os.stat_result) -> int:
        """Read the last record of a log that another process wrote; return the offset after it.

        0 if the end cannot be read: it is torn, there is no record yet, or it is no log of ours.
        """
        try:
            last = next(_records_backwards(self.path), None)
        except _Damaged:
            return 0
        if last is None:
            return 0
        self._check(read_header(self.path))
        self._know(last)
        return status.st_size

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{self.path} is not a commit log, or is damaged ({error}): restore it, or give this run a "
            "directory of its own."
        )

    def _check(self, header: LogHeader) -> None:
        if header != self.header:
            raise _of_another_run(self.path, header)


class RunLog:
    """The commit log of a run, as each of its ranks sees it. Only the lowest one appends.

    first: the version that this rank can begin with. may_begin: whether this rank takes the directory over
    for the run; `resumed`: the checkpoint that it goes on from. If that lies in the same directory, the log
    there goes on, too. goes_back: it begins at `first` even if the log is this run's, all of whose ranks were
    lost. on_begin: called before the directory is taken over.

    Raises `UserError` if the log in the directory is another run's.
    """

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        first: int,
        plan: str,
        seed: int,
        resumed: Path | None = None,
        may_begin: bool,
        goes_back: bool = False,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.first = directory / LOG_NAME, first
        self._header = LogHeader(format=LOG_FORMAT, run_id=run_id, base_version=first, plan=plan, seed=seed)
        self._log: CommitLog | None = None
        if may_begin and (goes_back or not self._is_ours()):
            begin_log(directory, resumed)
            on_begin()
            if has_log(self.path):
                _continue(self.path, self._header)

    def _is_ours(self) -> bool:
        return has_log(self.path) and read_header(self.path).run_id == self._header.run_id

    def last_version(self) -> int:
        """Return the highest version that this run has logged, or `first`."""
        return max(self.first, self._opened().last_version()) if self._is_ours() else self.first

    def record(self, version: int) -> CommitRecord:
        """Return the record of a version that is in the log."""
        found = read_record(self.path, version)
        if found is None:
            raise LedgerBroken(f"version {version} is not in {self.path}, which has the versions after it")
        return found

    def append(self, record: CommitRecord) -> None:
        """Log a version; see `CommitLog.append`. Raises `UserError` if the log of those before it is gone."""
        if self._log is None and record.version > self.first + 1 and not self._is_ours():
            raise log_is_gone(self.path, self._header.run_id, step=record.version)
        self._opened().append(record)

    def _opened(self) -> CommitLog:
        if self._log is None:  # the run may have begun before this rank, or in a log that it goes on with
            base = read_header(self.path).base_version if self._is_ours() else self.first
            self._log = CommitLog(self.path, msgspec.structs.replace(self._header, base_version=base))
        return self._log

    def take_back(self, version: int) -> None:
        """Cut off the last record; see `CommitLog.take_back`."""
        self._opened().take_back(version)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._log is not None:
            self._log.close()


def locked(path: Path, kind: int) -> int | None:
    """Return a descriptor that holds the lock in a file, which is made; None if another one prevents it.

    A file system without locks prevents nothing. Raises `OSError`.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        return lock
    return lock


def under_way(directory: Path) -> UserError:
    """Return the error of a run in a directory that another one has."""
    return DirectoryTaken(
        f"a run is under way in {directory}, so it is not overwritten: stop it first, or give this run a "
        "directory of its own with --out."
    )


@contextlib.contextmanager
def nobody_writes(directory: Path) -> Generator[None]:
    """Let the block change the log of a run in `directory`. Raises `UserError` if a rank writes it."""
    lock = locked(directory / LOCK_NAME, fcntl.LOCK_EX)
    if lock is None:
        raise under_way(directory)
    try:
        yield
    finally:
        os.close(lock)


def log_is_gone(path: Path, run_id: str, *, step: int = 0) -> UserError:
    """Return the error of a state of a run in memory whose log is missing. step: of the state; 0: unknown."""
    where = f" is at step {step}" if step else " has steps"
    return UserError(
        f"the state of this run that memory has held{where}: expected a commit log of the steps before it at "
        f"{path}, found none. Restore the run's directory, or free the memory with `zbmd snapshots --job "
        f"{run_id} --drop` and begin again."
    )


def begin_log(directory: Path, resumed: Path | None) -> None:
    """Raise `UserError` if a run that goes on from `resumed` must not log in `directory`: one is there."""
    path = directory / LOG_NAME
    inside = None if resumed is None else folder_of(resumed)
    if (inside is None or inside.resolve() != directory.resolve()) and has_log(path):
        raise _of_another_run(path, read_log(path)[0])


def _continue(path: Path, header: LogHeader) -> None:
    """Go on with a log in which `header.base_version` is the last version that counts."""
    old, records = read_log(path)
    kept = {record.version: record for record in records if record.version <= header.base_version}
    if list(kept) == list(range(old.base_version + 1, header.base_version + 1)):
        header = msgspec.structs.replace(header, base_version=old.base_version)
    else:  # it misses some: what is left is proved from the checkpoint on
        kept = {}
    parts = [_packed(header), *map(_packed, kept.values())]
    write_atomically(path, lambda file: file.write(b"".join(parts)))


def _of_another_run(path: Path, header: LogHeader) -> UserError:
    return DirectoryTaken(
        f"{path} belongs to another run ({header.run_id}, seed {header.seed}). Give this run a directory of "
        "its own with --out, continue that run with --resume, or remove its files with --overwrite on."
    )


def _write(file: int, data: bytes, path: Path) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(file, view) :]
        except OSError as error:
            kind = DiskFull if error.errno in DISK_FULL_ERRNOS else UserError
            raise kind(
                f"cannot write the commit log {path}: {error.strerror}. Free some space there, or choose "
                "another directory with --out."
            ) from error


def loss_of(record: CommitRecord) -> float:
    """Return the training loss of a step, nats per byte: its shards' losses added in their order."""
    return sum(record.losses[shard] for shard in sorted(record.losses))
