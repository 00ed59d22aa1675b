"""Measures a group's link once, and agrees on it: the first member's numbers are everybody's for an epoch."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from zbmd.collectives.communicator.cost_model import ASKING_NS, Model, is_far
from zbmd.collectives.device.arrays_in import Array

BARRIERS = 40
MOVED_BYTES = 256 << 10
ROUNDS = 5
"""With these a group of four on two cores takes some 10 ms."""

_known: dict[tuple[int, tuple[int, ...]], tuple[float, float, float]] = {}
"""What this process has measured, by size and hosts of the group: a later epoch does not measure again."""


class Measured(Protocol):
    """What tuning needs of a communicator."""

    size: int
    place: int
    hosts: tuple[int, ...]

    def broadcast(self, x: Array, root: int, *, algorithm: str = ..., deadline_ns: int = ...) -> Array: ...
    def all_gather(self, x: Array, out: Array, *, algorithm: str = ..., deadline_ns: int = ...) -> Array: ...
    def barrier(self, *, deadline_ns: int = ...) -> None: ...


def agree_on_model(c: Measured, deadline_ns: int) -> Model:
    """The model of the group, the same on all members; all must call this. Raises as their operations do.

    The first member's numbers are taken if it has measured such a group before; else all measure now.
    """
    key = (c.size, c.hosts)
    numbers = np.array(_known.get(key, (0.0, 0.0, 0.0)))
    c.broadcast(numbers, 0, deadline_ns=deadline_ns)
    if not numbers[0] and c.size > 1:
        numbers[:] = _measure(c, deadline_ns)
        c.broadcast(numbers, 0, deadline_ns=deadline_ns)
    if not numbers[0]:
        return Model(cores=_cores())
    alpha_ns, beta, gamma = (float(number) for number in numbers)
    _known[key] = (alpha_ns, beta, gamma)
    cores = np.array([_cores()], np.int64)
    c.broadcast(cores, 0, deadline_ns=deadline_ns)
    return Model(
        alpha_ns=alpha_ns, beta_ns_per_byte=beta, gamma_ns_per_byte=gamma, cores=max(1, int(cores[0]))
    )


def _measure(c: Measured, deadline_ns: int) -> tuple[float, float, float]:
    """α by barriers of ceil(log2 n) rounds, β by all-gathers, γ by adding up in this process alone.

    The machine may be busy with other things just then: one barrier that had to wait for a processor says
    nothing of all later ones.
    """
    block = np.ones(MOVED_BYTES // 4, np.float32)
    total = np.empty_like(block)
    gathered = np.ones((c.size, *block.shape), block.dtype)  # its pages are there: links are measured
    c.barrier(deadline_ns=deadline_ns)
    meetings = _times_ns(BARRIERS, lambda: c.barrier(deadline_ns=deadline_ns))
    alpha_ns = statistics.median(meetings) / (1 + (c.size - 1).bit_length())
    moves = _times_ns(
        ROUNDS, lambda: c.all_gather(block, gathered, algorithm="direct", deadline_ns=deadline_ns)
    )
    adds = _times_ns(ROUNDS, lambda: np.add(block, total, out=total))
    asking_ns = ASKING_NS * (c.size - 1) if is_far(c.hosts) else 0.0
    beta = max(1e-3, (min(moves) - 3 * alpha_ns - asking_ns) / (c.size * MOVED_BYTES))
    return max(1.0, alpha_ns), beta, max(1e-3, min(adds) / MOVED_BYTES)


def _times_ns(rounds: int, run: Callable[[], object]) -> list[int]:
    found: list[int] = []
    for _ in range(rounds):
        began_ns = time.perf_counter_ns()
        run()
        found.append(time.perf_counter_ns() - began_ns)
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0))
