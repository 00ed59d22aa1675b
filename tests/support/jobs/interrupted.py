"""Things that a test has the ranks of a loop do in the middle of a step, by variables."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Final

POLL_S: Final = 0.01
AT: Final = 3
"""Steps that are committed by then."""


def interrupted(steps: int) -> None:
    """Wait until the file AWAITS is there, then stop this process, if it is rank STOPS for the first time."""
    if steps != AT:
        return
    awaited = os.environ.get("AWAITS")
    while awaited is not None and not Path(awaited).exists():
        threading.Event().wait(POLL_S)
    if (os.environ.get("STOPS"), os.environ["ZBMD_INCARNATION"]) == (os.environ["RANK"], "1"):
        os.kill(os.getpid(), signal.SIGSTOP)
