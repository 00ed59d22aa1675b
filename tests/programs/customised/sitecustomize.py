"""Makes a template's imports take for ever, and only those; loaded by every interpreter that starts.

The template is a fork of the launcher, and has another name.
"""

from __future__ import annotations

import importlib.abc
import signal
import sys
from pathlib import Path


class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, *_: object) -> None:
        if Path("/proc/self/comm").read_text() == "zbmd-template\n":
            print("importing", file=sys.stderr, flush=True)
            signal.pause()


sys.meta_path.insert(0, Slow())
