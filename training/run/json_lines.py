"""Files of JSON lines that a run adds to as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from zbmd.transport.errors import UserError

LineT = TypeVar("LineT")


def read_json_lines(
    path: Path, decode: Callable[[bytes], LineT], *, bytes_max: int, what: str, advice: str
) -> Iterator[LineT]:
    """Each line, as `decode` makes it of its bytes. A last one that was cut off by a kill is left out.

    what, advice: of the errors' words, what such a file is and what to do. Raises `UserError` if the file
    cannot be read, is larger than `bytes_max`, or `decode` raises for a line.
    """
    try:
        if path.stat().st_size > bytes_max:
            raise UserError(f"{path} is larger than any {what} written: {advice}.")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line:
            continue
        try:
            yield decode(line)
        except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
            if not data.endswith(b"\n") and number == data.count(b"\n") + 1:
                return
            raise UserError(f"line {number} of {path} is damaged ({error}): {advice}.") from None
