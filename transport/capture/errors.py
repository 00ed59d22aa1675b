"""Errors of captures; each message says what to do."""

from __future__ import annotations

from pathlib import Path

from zbmd.transport.errors import UserError


class CaptureError(UserError):
    """A capture cannot be written or read."""


class NotACapture(CaptureError):
    """The path holds no capture that this release can read."""


class CaptureExists(CaptureError):
    """The directory holds a capture of this very process incarnation already."""


class CaptureDamaged(CaptureError):
    """A file of a capture is damaged at `offset`, bytes; everything before it has been read.

    path: the file; offset: where the damaged part begins; what: what is wrong there.
    """

    def __init__(self, path: Path, offset: int, what: str) -> None:
        super().__init__(
            f"{path} is damaged at byte {offset}: {what}. All before it is whole and was read; "
            "copy the file again if you have another copy, else go on with what there is."
        )
        self.path = path
        self.offset = offset
        self.what = what


class CaptureMismatch(CaptureError):
    """A recorded machine, event or action does not fit the code that is to read it."""
