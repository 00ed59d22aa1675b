"""Records of a run: JSON lines, a line for people, and files for TensorBoard."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from zbmd.training.profiler.lines import StepLine
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"
TAIL_BYTES = 1 << 20
"""Of the end of a file of records are read, to know what has been noted."""


def keep_until(directory: Path, last: int) -> None:
    """Leave out what was noted of steps after `last`, and damaged lines: a run goes on from there."""
    path = directory / METRICS_NAME
    if not path.exists():
        return
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= last]
    if len(kept) < len(lines):
        write_atomically(path, lambda file: file.writelines(kept))


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for one that is damaged."""
    step = (_noted_in(line) or {}).get("step")
    return math.inf if step is None else step


def _noted_in(line: bytes) -> dict[str, float | None] | None:
    """Return the values of a line, None for one that is not finite; None for a line that is damaged."""
    try:
        return msgspec.json.decode(line, type=dict[str, float | None])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class Records:
    """The records of a run in `directory`, added to what is there. Raises `UserError`.

    Steps grow; what is noted again behind a loss is not written twice. first: the version that the run begins
    with. again: the last lines there are of this run, by a rank that was lost.
    """

    def __init__(self, directory: Path, *, tensorboard: bool, first: int = 0, again: bool = False) -> None:
        self._board: Any = None
        if tensorboard:
            purge_step = first + 1 if first and not again else None
            self._board = _board_library().SummaryWriter(
                str(directory / TENSORBOARD_NAME), purge_step=purge_step
            )
        self._path = directory / METRICS_NAME
        self._noted: dict[str, int] = {}
        try:
            if again:
                self.read_again()
            self._lines = self._path.open("ab")
        except OSError as error:
            raise UserError(f"cannot write {self._path}: {error.strerror}.") from error

    def read_again(self) -> None:
        """Know what another rank has noted: it may have been the writer meanwhile, and be lost."""
        self._noted = last_steps(self._path)

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def last_step(self, kind: str) -> int:
        """The last step of this run of which such values are noted; 0 for none."""
        return self._noted.get(kind, 0)

    def put(self, step: int, **values: float) -> bool:
        """Note `values` of `step`; whether they were new."""
        kind = next(iter(values))
        if step <= self._noted.get(kind, -1):
            return False
        self._noted[kind] = step
        self._lines.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        self._lines.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)
        return True

    def put_profile(self, line: StepLine, *, mfu: float | None) -> None:
        """Note for TensorBoard what a step of this rank spent its time on, as the profile has it."""
        if self._board is None:
            return
        for name, ns in line.ns.items():
            self._board.add_scalar(f"step_ms/{name}", ns / 1e6, line.step)
        if line.overlap is not None and line.overlap.under_way_ns:
            self._board.add_scalar("overlap", line.overlap.hidden_ns / line.overlap.under_way_ns, line.step)
        if mfu is not None:
            self._board.add_scalar("mfu", mfu, line.step)

    @staticmethod
    def tell(step: int, **values: float) -> None:
        """Say it on stderr, as a line for people."""
        words = " ".join(f"{name} {value:,.4g}" for name, value in values.items())
        print(f"step {step} {words}", file=sys.stderr, flush=True)


def require_board() -> None:
    """Raise `UserError` if there is nothing that writes for TensorBoard."""
    _board_library()


def _board_library() -> Any:
    try:
        return importlib.import_module("tensorboardX")
    except ImportError as error:
        raise UserError('files for TensorBoard need tensorboardX: pip install "zbmd[train]".') from error


def _tail_of(file: BinaryIO) -> tuple[int, bytes, bytes]:
    """Return the size of a file, its end, and the lines of that which are whole."""
    size = file.seek(0, 2)
    file.seek(max(0, size - TAIL_BYTES))
    tail = file.read()
    return size, tail, tail[: tail.rfind(b"\n") + 1]


def last_values(path: Path, kind: str, *, until: int | None = None) -> dict[str, float]:
    """Return the last line of a kind near the file's end, of a step up to `until`; empty if there is none.

    Values that are not finite are left out.
    """
    try:
        with path.open("rb") as file:
            _, _, whole = _tail_of(file)
    except OSError:
        return {}
    for line in reversed(whole.splitlines()):
        noted = _noted_in(line) or {}
        values = {name: value for name, value in noted.items() if value is not None and math.isfinite(value)}
        if kind in values and "step" in values and (until is None or values["step"] <= until):
            return values
    return {}


def last_steps(path: Path) -> dict[str, int]:
    """The last step of which each kind of line was noted, from the file's end; a torn line is cut off."""
    if not path.exists():
        return {}
    with path.open("r+b") as file:
        size, tail, whole = _tail_of(file)
        file.truncate(size - len(tail) + len(whole))
    found: dict[str, int] = {}
    for line in whole.splitlines():
        noted = _noted_in(line) or {}  # the first of the tail may be cut
        kind = next((name for name in noted if name != "step"), None)
        step = noted.get("step")
        if kind is not None and step is not None and math.isfinite(step):
            found[kind] = int(step)
    return found
