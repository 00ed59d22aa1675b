"""Makes a laboratory of two hosts and stays; argv: shaped or bridged."""

from __future__ import annotations

import signal
import sys

from zbmd.tools.lab.hosts.netns import Lab

with Lab(2, shaped=sys.argv[1] == "shaped") as lab:
    print("made", flush=True)
    signal.pause()
