"""`result.json`: the demo's result, kept beside the commit log, with the details of each death.

The commit log holds what was committed. When a rank died and how soon that was noticed is known only to the
process that killed it, so that is kept here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

RESULT_NAME = "result.json"
RESULT_BYTES_MAX = 1 << 20
"""A file larger than this is not ours."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one incarnation of a rank; times are None where they are not known."""

    rank: int
    incarnation: int
    step: int
    """The step that was under way."""
    epoch: int
    """The epoch that the death ended."""
    detection_ms: float | None = None
    """From the kill until the last survivor had noticed."""
    recovery_ms: float | None = None
    """From the kill to the next committed step."""


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run as its plot needs it; losses in nats per byte."""

    parameters: int | None = None
    heldout_loss_last: float | None = None
    heldout_loss_bigram: float | None = None
    steps_lost: int | None = None
    samples_skipped: int | None = None
    samples_repeated: int | None = None
    verified: bool | None = None
    """Whether an undisturbed run ended with the same weights, bit for bit; None if none was made."""
    deaths: tuple[Death, ...] = ()


def save_result(directory: Path, found: Mapping[str, object], deaths: Iterable[Death]) -> None:
    """Write `found` and `deaths` into the directory of the run. Raises `UserError`."""
    kept = {**found, "deaths": msgspec.to_builtins(list(deaths))}
    text = json.dumps(kept, indent=2) + "\n"
    write_atomically(directory / RESULT_NAME, lambda file: file.write(text.encode()))


def load_result(directory: Path) -> RunResult:
    """The result in the directory of a run; all unknown if there is none. Raises `UserError` if damaged."""
    path = directory / RESULT_NAME
    try:
        with path.open("rb") as file:
            data = file.read(RESULT_BYTES_MAX + 1)
    except FileNotFoundError:
        return RunResult()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    try:
        if len(data) > RESULT_BYTES_MAX:
            raise msgspec.ValidationError(f"it is larger than {RESULT_BYTES_MAX} bytes")
        return msgspec.json.decode(data, type=RunResult)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise UserError(
            f"{path} is not the result of a run ({error}): restore it, or remove it to do without."
        ) from None
