"""What a rank's process does once its script has ended, before the interpreter shuts down.

Later it is too late: no executor takes work any more.
"""

from __future__ import annotations

from collections.abc import Callable

from zbmd.transport.errors import LocalProtocolError

CALLBACKS_MAX = 16

OnEnd = Callable[[bool], None]
"""Takes whether the script has failed."""

_callbacks: list[OnEnd] = []


def at_script_end(callback: OnEnd) -> None:
    """Have `callback` called on the main thread, the latest first. Raises `LocalProtocolError`."""
    if len(_callbacks) >= CALLBACKS_MAX:
        raise LocalProtocolError(f"{CALLBACKS_MAX} callbacks for the script's end are registered already")
    _callbacks.append(callback)


def script_ended(*, failed: bool) -> None:
    """Call them all, once."""
    while _callbacks:
        _callbacks.pop()(failed)
