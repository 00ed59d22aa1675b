"""Ranks one of which prints a hundred lines while another is in the midst of one."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from support.processes.polling import until

FOLDER = Path(os.environ.get("FOLDER", "."))
BEGUN, PASSED = FOLDER / "begun", FOLDER / "passed"
if os.environ["RANK"] == "0":
    sys.stdout.write("begun")
    sys.stdout.flush()
    asyncio.run(until(PASSED.exists))
    print(" and ended")
else:
    asyncio.run(until(BEGUN.exists))
    for number in range(100):
        print("line", number, flush=True)
    PASSED.touch()
