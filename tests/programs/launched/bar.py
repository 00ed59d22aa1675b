"""A rank that draws a progress bar.

Arguments: steps in which it waits for the file `go` and their number, or "fails", if it fails at the end.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from support.processes.polling import until

rank = os.environ["RANK"]


async def main() -> None:
    for step in range(1, 11):
        sys.stderr.write(f"\r{step * 10:3}%|{'#' * step:10}| {step}/10 of {rank}")
        sys.stderr.flush()
        if str(step) in sys.argv[1:]:
            await until(Path(f"go{step}").exists)


asyncio.run(main())
if sys.argv[1:] == ["fails"]:
    raise ValueError("in the middle")
print(file=sys.stderr)
