"""A resilient loop over DDP whose steps take a rank milliseconds. argv: directory, passes, on_straggler."""

from __future__ import annotations

import sys
from pathlib import Path

from zbmd.tools.chaos.soak_stragglers import loop

out, passes, on_straggler = sys.argv[1:]
loop(Path(out), 0.0, passes=int(passes), on_straggler=on_straggler)
