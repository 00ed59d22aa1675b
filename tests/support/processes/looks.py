"""One look at live processes, by a command of `zbmd-node`."""

from __future__ import annotations

import re
import time

from support.processes.launcher import TIMEOUT_S, Launcher

SILENT = re.compile(r'no answer: |does not answer|"silent":\["')


def answered(launcher: Launcher, *arguments: str) -> str:
    """Return what a command shows in the first look that all processes answer.

    One that gets no turn of a processor for a second is shown as silent, on a busy machine as well.
    """
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        ended = launcher.run(*arguments, COLUMNS="240")
        assert ended.code == 0, ended
        shown = "\n".join(ended.out)
        if not SILENT.search(shown):
            return shown
        assert time.monotonic() < end_s, f"a process never answered:\n{shown}"
