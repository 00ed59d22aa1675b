"""The file of a sweep of kills: one line for each kill, so that an interrupted sweep can resume."""

from __future__ import annotations

from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from zbmd.transport.errors import UserError

LineT = TypeVar("LineT")


class KillLines(Generic[LineT]):
    """JSON lines, in the file at `path` or, without one, nowhere. The last may be cut off: it is left out.

    Raises `UserError` for a line that `decoder` does not take.
    """

    def __init__(self, path: Path | None, decoder: msgspec.json.Decoder[LineT]) -> None:
        self.path = path
        self.found: list[LineT] = []
        """The lines that the file held."""
        if path is None or not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                self.found.append(decoder.decode(line))
            except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
                raise UserError(
                    f"line {number} of {path} is not of a ledger of kills, or damaged ({error}): begin "
                    "another ledger."
                ) from None
        if len(whole) < len(data):
            path.write_bytes(whole)

    def add(self, line: LineT) -> None:
        """Add one."""
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
