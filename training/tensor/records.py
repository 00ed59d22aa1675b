"""What a run tells of itself: JSON lines, a line for people, and files for TensorBoard."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from zbmd.transport.errors import UserError

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_NAME = "tensorboard"


class Records:
    """The records of a run in `directory`, added to what is there. Raises `UserError`."""

    def __init__(self, directory: Path, *, tensorboard: bool) -> None:
        self._board: Any = None
        if tensorboard:
            self._board = _board_library().SummaryWriter(str(directory / TENSORBOARD_NAME))
        try:
            self._lines = (directory / METRICS_NAME).open("ab")
        except OSError as error:
            raise UserError(f"cannot write {directory / METRICS_NAME}: {error.strerror}.") from error

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        if self._board is not None:
            self._board.close()

    def put(self, step: int, **values: float) -> None:
        """Note `values` of `step`."""
        self._lines.write(msgspec.json.encode({"step": step, **values}) + b"\n")
        self._lines.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)

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
