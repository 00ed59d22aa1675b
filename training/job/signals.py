"""The signals that a run takes, and what each asks all ranks for."""

from __future__ import annotations

import signal
import threading
from typing import Final

from zbmd.training.redundancy.interface import Wish

SIGNALS: Final = {signal.SIGTERM: Wish.STOP | Wish.SAVE, signal.SIGUSR1: Wish.SAVE}
"""A run that is stopped can be resumed."""


def signals_taken() -> list[signal.Signals]:
    """Return the signals that this process may take: one that is ignored stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
