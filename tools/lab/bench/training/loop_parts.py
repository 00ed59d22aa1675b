"""Measure the parts of a resilient step: calls, time, CPU time and bytes of each, in one rank.

A part is a method of the loop that is wrapped in the benchmark's process. Parts on a thread pass beside the
next forward and backward pass; what they take of it is not their time, if cores are idle meanwhile.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

WORD: Final = "part"
"""It begins a line of a rank with a part."""


@dataclass(frozen=True, slots=True)
class Part:
    """A method of a class, below `zbmd.training.torch`. nbytes: that a call moves, of its arguments."""

    name: str
    module: str
    of: str
    method: str
    nbytes: Callable[..., int] = lambda *_, **__: 0


PARTS: Final = (
    Part("begin a step", "run", "Run", "begin"),
    Part("before the update: all", "run", "Run", "_before_update"),
    Part("  fill the letter", "fsdp.shards", "Letter", "fill"),
    Part("  send gradients", "fsdp.shards", "Shards", "deliver", lambda self, *_: self._out.data.nbytes),
    Part("  exchange votes", "exchange", "Exchange", "gather", lambda _, data: len(data)),
    Part("  judge stragglers", "durable.slow_ranks", "SlowLoopRanks", "voted"),
    Part("  wait for threads", "durable.memory", "LoopMemory", "staged"),
    Part("after the update: all", "run", "Run", "_after_update"),
    Part("end a step", "run", "Run", "end"),
    Part("  begin the copy", "durable.memory", "LoopMemory", "keep"),
    Part(
        "on a thread: the ward's update",
        "fsdp.replica",
        "Replica",
        "replay",
        lambda self, *_: 7 * sum(each.nbytes for each in self.updated),
    ),
    Part(
        "on a thread: copy of the state",
        "durable.memory",
        "LoopMemory",
        "_write",
        lambda _, __, prepared, *___: 2 * prepared.nbytes,
    ),
)


class Parts:
    """Those of this process. Methods stay wrapped; what they take counts between `reset` and `lines`."""

    def __init__(self) -> None:
        self._found: dict[str, list[int]] = {}
        for part in PARTS:
            module = importlib.import_module(f"zbmd.training.torch.{part.module}")
            self._wrap(part, getattr(module, part.of))

    def _wrap(self, part: Part, owner: Any) -> None:
        call, row = getattr(owner, part.method), self._found.setdefault(part.name, [0, 0, 0, 0])

        def measured(*args: Any, **kwargs: Any) -> Any:
            began, used = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent = time.perf_counter_ns() - began, time.thread_time_ns() - used
                for at, more in enumerate((1, *spent, part.nbytes(*args, **kwargs))):
                    row[at] += more

        setattr(owner, part.method, measured)

    def reset(self) -> None:
        """Count from now on."""
        for row in self._found.values():
            row[:] = [0] * len(row)

    def lines(self, steps: int) -> list[str]:
        """Return a line for each part, of one step of so many."""
        return [
            f"{WORD} {calls / steps} {wall / steps / 1e6} {cpu / steps / 1e6} {moved / steps} {name}"
            for name, (calls, wall, cpu, moved) in self._found.items()
            if calls
        ]


def table(lines: Sequence[str]) -> list[str]:
    """Return what is printed of the lines of all ranks: means over ranks."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for line in lines:
        if line.startswith(f"{WORD} "):
            _, *numbers, name = line.split(" ", 5)
            found.setdefault(name, []).append(tuple(map(float, numbers)))
    return [
        f"  {name:32}{wall:7.2f} ms; CPU {cpu:6.2f} ms; {moved / 1e6:7.1f} MB"
        for name, rows in found.items()
        for _, wall, cpu, moved in [map(statistics.mean, zip(*rows, strict=True))]
    ]
