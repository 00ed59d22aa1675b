"""The span file of a rank: a ring of its latest spans in mapped memory, which survives a kill."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.actors.view import RANKS_MAX
from zbmd.training.autograd._spans import CATEGORIES, RECORD_BYTES, TRACK_OP, TRACK_OPERATION, TRACK_STEP
from zbmd.training.profiler.lines import PROFILE_DIRECTORY, Count, Name, Rank, RunLine
from zbmd.transport.errors import UserError

MAGIC: Final = b"zbmdspn1"
RING_AT: Final = 1 << 20
RECORDS_MAX: Final = 1 << 16
RING_BYTES: Final = 8 + RECORDS_MAX * RECORD_BYTES
FILE_BYTES: Final = RING_AT + RING_BYTES
RECORD: Final = np.dtype(
    [
        ("begin_ns", "<u8"),
        ("end_ns", "<u8"),
        ("amount", "<u8"),
        ("step", "<u4"),
        ("sequence", "<u4"),
        ("unit", "<i2"),
        ("group", "<u2"),
        ("category", "u1"),
        ("track", "u1"),
        ("depth", "u1"),
        ("spare", "u1"),
    ]
)
"""As `_spans.pyx` writes it."""
assert RECORD.itemsize == RECORD_BYTES

RINGS_KEPT: Final = 4
"""Lives of a rank whose spans are kept."""

_LENGTH = struct.Struct("<Q")
_TEXT_AT = len(MAGIC) + _LENGTH.size


class GroupLine(msgspec.Struct, frozen=True, kw_only=True, tag="group", tag_field="kind"):
    """Defines the next group number; `members` are ranks."""

    channel: Count
    epoch: Count
    members: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=RANKS_MAX)]


class OperationLine(msgspec.Struct, frozen=True, kw_only=True, tag="operation", tag_field="kind"):
    """Defines the next operation number."""

    name: Name


_decoder: msgspec.json.Decoder[RunLine | GroupLine | OperationLine] = msgspec.json.Decoder(
    RunLine | GroupLine | OperationLine
)

Records = npt.NDArray[np.void]
"""(count,) of `RECORD`."""


@dataclass(frozen=True, slots=True)
class Spans:
    """The content of a ring; records in the order in which they ended."""

    run: RunLine
    groups: tuple[GroupLine, ...]
    operations: tuple[str, ...]
    records: Records


def ring_path(directory: Path, rank: int, incarnation: int) -> Path:
    """Return the span file of an incarnation of a rank of the run in `directory`."""
    return directory / PROFILE_DIRECTORY / f"rank{rank}-{incarnation}.spans"


def forget_rings(directory: Path, rank: int, incarnation: int) -> None:
    """Delete the files of a rank's incarnations before the last `RINGS_KEPT`. Raises `OSError`."""
    for old in range(1, incarnation - RINGS_KEPT + 1):
        ring_path(directory, rank, old).unlink(missing_ok=True)


def _new_file(path: Path) -> int:
    """Return a file that replaces any existing one, which another run may still have mapped."""
    while True:
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):  # another rank's, made meanwhile
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


class RingFile:
    """A new file at `path`, fully allocated. Raises `OSError`."""

    def __init__(self, path: Path) -> None:
        descriptor = _new_file(path)
        try:
            os.posix_fallocate(descriptor, 0, FILE_BYTES)  # a full disk shows now, and not by SIGBUS
            self._map = mmap.mmap(descriptor, FILE_BYTES)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(descriptor)
        self._whole = memoryview(self._map)
        self.ring = self._whole[RING_AT:]
        self._map[: len(MAGIC)] = MAGIC
        self._text_bytes = 0

    def put(self, line: RunLine | GroupLine | OperationLine) -> bool:
        """Add a line; return False if it does not fit."""
        data = msgspec.json.encode(line) + b"\n"
        at = _TEXT_AT + self._text_bytes
        if at + len(data) > RING_AT:
            return False
        self._map[at : at + len(data)] = data
        self._text_bytes += len(data)
        _LENGTH.pack_into(self._map, len(MAGIC), self._text_bytes)
        return True

    def close(self) -> None:
        """Release the memory, once nobody else holds `ring`."""
        self.ring.release()
        self._whole.release()
        self._map.close()


def read_ring(path: Path) -> Spans:
    """Return the content of the file, of an incarnation that has ended or still runs. Raises `UserError`."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    return decode_ring(data, str(path))


def decode_ring(data: bytes, path: str) -> Spans:
    """Return the content of a file's bytes; `path` is for the error. Raises `UserError`."""
    if len(data) != FILE_BYTES or not data.startswith(MAGIC):
        raise UserError(f"{path} is not a span file of this version: delete it.")
    (text_bytes,) = _LENGTH.unpack_from(data, len(MAGIC))
    if text_bytes > RING_AT - _TEXT_AT:
        raise UserError(f"{path} is damaged: its header claims {text_bytes} bytes of text. Delete it.")
    groups: list[GroupLine] = []
    operations: list[str] = []
    run: RunLine | None = None
    try:
        for line in data[_TEXT_AT : _TEXT_AT + text_bytes].splitlines():
            match _decoder.decode(line):
                case RunLine() as found:
                    run = found
                case GroupLine() as group:
                    groups.append(group)
                case OperationLine(name=name):
                    operations.append(name)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}): delete it.") from None
    if run is None:
        raise UserError(f"{path} has no run line: delete it.")
    return Spans(
        run, tuple(groups), tuple(operations), _records(data, path, run, len(groups), len(operations))
    )


def _records(data: bytes, path: str, run: RunLine, groups: int, operations: int) -> Records:
    (written,) = _LENGTH.unpack_from(data, RING_AT)
    ring = np.frombuffer(data, RECORD, RECORDS_MAX, RING_AT + _LENGTH.size)
    if written <= RECORDS_MAX:
        found = ring[:written]
    else:  # the oldest one may be overwritten just now
        place = written % RECORDS_MAX
        found = np.concatenate([ring[place + 1 :], ring[:place]])
    is_step, is_operation = found["track"] == TRACK_STEP, found["track"] == TRACK_OPERATION
    good = is_step | is_operation | (found["track"] == TRACK_OP)
    good &= found["begin_ns"] <= found["end_ns"]
    good &= found["end_ns"] < 1 << 63
    good &= (found["unit"] >= -1) & (found["unit"] < max(1, len(run.units)))
    good &= ~is_step | (found["category"] < len(CATEGORIES))
    good &= ~is_operation | (found["group"] < groups)
    if not good.all():
        raise UserError(f"{path} is damaged: {int((~good).sum())} invalid spans. Delete it.")
    return found
