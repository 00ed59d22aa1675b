"""A rank that draws a progress bar. Arguments: pauses of a step, and "fails", if it fails at the end."""

from __future__ import annotations

import asyncio
import os
import sys

from support.processes.polling import pause

rank = os.environ["RANK"]


async def main() -> None:
    for step in range(1, 11):
        sys.stderr.write(f"\r{step * 10:3}%|{'#' * step:10}| {step}/10 of {rank}")
        sys.stderr.flush()
        for _ in range(int(sys.argv[1])):
            await pause()


asyncio.run(main())
if sys.argv[2:] == ["fails"]:
    raise ValueError("in the middle")
print(file=sys.stderr)
