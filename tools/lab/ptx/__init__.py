"""Interpret compiled PTX with numpy, all threads of a grid at once, and check what the threads do.

`program` parses PTX; `machine` runs a kernel: `launch(parse(ptx)["entry"], grid=…, block=…, arguments=…)`.
Every access is checked for bounds, alignment, initialisation and data races (`shadow`, `clocks`); `counters`
counts bank conflicts and memory sectors. `arithmetic`, `transfers`, `barriers` and `tensor_cores` hold the
instructions. What is unknown is an error. A tool for development: of transport it imports errors and the
layout of tensor maps.
"""

from __future__ import annotations

from zbmd.tools.lab.ptx.errors import (
    Deadlock,
    DivergentThreads,
    MemoryFault,
    PtxError,
    PtxSyntaxError,
    RaceFound,
    UninitialisedRead,
)
from zbmd.tools.lab.ptx.machine import Launch, launch
from zbmd.tools.lab.ptx.memory import Buffer, Tiles
from zbmd.tools.lab.ptx.program import Kernel, parse

__all__ = [
    "Buffer",
    "Deadlock",
    "DivergentThreads",
    "Kernel",
    "Launch",
    "MemoryFault",
    "PtxError",
    "PtxSyntaxError",
    "RaceFound",
    "Tiles",
    "UninitialisedRead",
    "launch",
    "parse",
]
