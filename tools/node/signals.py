"""Signals of a launcher: those that end its run, those that go on to its ranks, those that are not for it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final, TypeAlias

STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FORWARDED_SIGNALS: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""They go to the ranks that have a handler for them, and end nothing: SIGUSR1 has a training run save."""
NOTED_SIGNALS: Final = (signal.SIGQUIT,)
"""They end nothing, either; a rank would take this one for a crash."""

OnSignal: TypeAlias = Callable[[signal.Signals], None]


@contextmanager
def handling(
    stop: OnSignal, forward: OnSignal | None = None, *, more: Sequence[str] | None = None
) -> Generator[None]:
    """Have the running loop call `stop` and `forward` for the signals of each kind.

    more: names of signals to forward beside the usual ones. Those that end the run still end it.
    A signal that was ignored when the process started stays ignored: `nohup` has SIGHUP so, and a shell
    without job control has SIGINT and SIGQUIT so for what it starts in the background.
    """
    loop = asyncio.get_running_loop()
    takers: dict[signal.Signals, OnSignal] = {}
    if forward is not None:
        named = [signal.Signals[name] for name in more or ()]
        takers |= dict.fromkeys((*FORWARDED_SIGNALS, *NOTED_SIGNALS, *named), forward)
    takers |= dict.fromkeys(STOP_SIGNALS, stop)
    heard = [number for number in takers if signal.getsignal(number) is not signal.SIG_IGN]
    for number in heard:
        loop.add_signal_handler(number, takers[number], number)
    try:
        yield
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def forwarded(
    number: signal.Signals, send: Callable[[signal.Signals], int], *, more: Sequence[str] | None = None
) -> str:
    """Send a signal to the ranks that take it; return what is to be said of it, if anything.

    send: returns the number of ranks that took it; more: as `handling` has it.
    """
    if number in NOTED_SIGNALS and number.name not in (more or ()):
        return f"{number.name} received: nothing is done. To see where the ranks stand: zbmd-node dump"
    if send(number):
        return ""
    return f"{number.name} received: no rank has a handler for it, and nothing is done"
