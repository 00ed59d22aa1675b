"""A rank that prints a line whose end comes when a file is there."""

from __future__ import annotations

import asyncio
import os
import sys

from support.processes.polling import until_done

sys.stdout.write("Loading of " + os.environ["RANK"] + " ...")
sys.stdout.flush()
asyncio.run(until_done())
print(" done")
