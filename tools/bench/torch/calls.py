"""Calls of `torch.distributed`, made by the ranks of a job over zbmd and over gloo in turns.

`send` is half a round trip of `dist.send` and `dist.recv`; the others are called and waited for one after the
other. Sizes are those of the tensor that a rank gives.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from zbmd.tools.bench.stats import OURS, iterations_for, turns

ITERATIONS_MAX: Final = 300
ELEMENT_BYTES: Final = 4
WARM_CALLS: Final = 3
GLOO: Final = "gloo"


class Calls:
    """Make the timed calls of one process group, over tensors of `nbytes`."""

    def __init__(self, group: Any, nbytes: int) -> None:
        torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        self._group, self._rank, size = group, self._dist.get_rank(), self._dist.get_world_size()
        self._x = torch.zeros(max(1, nbytes // ELEMENT_BYTES))
        self._rows = torch.zeros(max(size, nbytes // ELEMENT_BYTES // size * size))
        self._received = torch.zeros_like(self._rows)
        self._gathered = torch.zeros(size * self._x.numel())
        self._part = torch.zeros(self._rows.numel() // size)

    def send(self) -> None:
        """A message to the next rank's pair, and its answer; the ranks beyond the second do nothing."""
        send, receive, group = self._dist.send, self._dist.recv, self._group
        if self._rank == 0:
            send(self._x, 1, group=group)
            receive(self._x, 1, group=group)
        elif self._rank == 1:
            receive(self._x, 0, group=group)
            send(self._x, 0, group=group)

    def all_reduce(self) -> None:
        """Reduce a tensor over all ranks."""
        self._dist.all_reduce(self._x, group=self._group)

    def broadcast(self) -> None:
        """Send the first rank's tensor to all."""
        self._dist.broadcast(self._x, 0, group=self._group)

    def reduce_scatter(self) -> None:
        """Reduce rows over all ranks; each keeps its own part."""
        self._dist.reduce_scatter_tensor(self._part, self._rows, group=self._group)

    def all_to_all(self) -> None:
        """Send each rank its rows."""
        self._dist.all_to_all_single(self._received, self._rows, group=self._group)

    def all_gather(self) -> None:
        """Collect the tensors of all ranks."""
        self._dist.all_gather_into_tensor(self._gathered, self._x, group=self._group)


CALLS: Final = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send")
ONE_WAY: Final = ("send",)
"""Timed as a round trip, of which half counts."""


def timed_ns(call: Callable[[], object], iterations: int) -> list[float]:
    """Nanoseconds of each call."""
    took: list[float] = []
    for _ in range(iterations):
        began = time.perf_counter_ns()
        call()
        took.append(float(time.perf_counter_ns() - began))
    return took


def time_calls(
    groups: Mapping[str, Any], call: str, sizes: Sequence[int], rounds: int
) -> Iterator[dict[str, Any]]:
    """Make a call in turns over the group of each contender; yield each turn. All ranks run this."""
    dist: Any = importlib.import_module("torch.distributed")
    peers = [who for who in groups if who != OURS]
    for nbytes in sizes:
        iterations = min(ITERATIONS_MAX, iterations_for(nbytes))
        made = {who: getattr(Calls(group, nbytes), call) for who, group in groups.items()}
        for each in made.values():
            timed_ns(each, WARM_CALLS)
        for order in turns(peers, rounds):
            for who in order:
                dist.barrier()
                ways = 2 if call in ONE_WAY else 1
                took = [each / ways for each in timed_ns(made[who], iterations)]
                yield {"case": call, "size": nbytes, "who": who, "ns": took}
