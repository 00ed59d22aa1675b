"""Run a command's `main`: Ctrl-C while modules are imported, and the fork that becomes a template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def ended_by_ctrl_c() -> Generator[None]:
    """While modules are imported: that takes a few tenths of a second, in which a KeyboardInterrupt would
    surface as a traceback out of the middle of some library."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not so where it is to be ignored
    )
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def run(main: Callable[[], int]) -> int:
    """Run a command; in the fork that it has made for a job's ranks, go on as their template."""
    from zbmd.actors.process.early_template import TemplateBegins

    try:
        return main()
    except TemplateBegins as begins:
        begun = begins.with_traceback(None)  # and so without the frames of the launcher
    return begun.run()
