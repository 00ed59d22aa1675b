"""Trials of a new group: the members time their link, and find out whether they can read each other.

The link is measured once: the numbers of the first member that knows such a group are everybody's.

Arrays in the arena are mapped by all. Of others the kernel copies straight to where they are wanted
(`process_vm_readv`), if it lets one process look at another: both of one user, in one process namespace, and
neither a seccomp filter nor Yama against it. Where Yama lets a process be looked at by its ancestors alone, a
rank names its parent as one that may, and with it what descends from that: the ranks that a launcher started,
and nobody else (prctl(2), PR_SET_PTRACER). Where one member cannot read another, arrays are copied through
the arena.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from zbmd.collectives.communicator.cost_model import ASKING_NS, Model, is_far
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.native._stepper import let_siblings_read, read_memory
from zbmd.transport.native._native import address_of

BARRIERS = 40
MOVED_BYTES = 256 << 10
ROUNDS = 5
"""With these a group of four on two cores takes some 10 ms."""

NONCE_BYTES = 16
NUMBER_BYTES = 6
PID_MAX = 1 << 22
"""Linux gives no process a greater number (PID_MAX_LIMIT)."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
YAMA_DESCENDANTS_ONLY = "1"

_known: dict[tuple[int, tuple[int, ...]], tuple[float, float, float]] = {}
"""The measurements of this process, by size and hosts of the group: a later epoch does not repeat them."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of a trial. number: of the trial, the same on all members, and of no other; 0: of none.

    pids: the process of each member, by rank, if all can read all others' memory; else empty.
    """

    number: int
    pids: Mapping[int, int]


NOT_TRIED: Final = Reading(0, {})


class Members(Protocol):
    """The part of a communicator that the trials need."""

    size: int
    place: int
    members: tuple[int, ...]
    hosts: tuple[int, ...]

    def broadcast(self, x: Array, root: int, *, algorithm: str = ..., deadline_ns: int = ...) -> Array: ...
    def all_gather(
        self, x: Array, out: Array | None = ..., *, algorithm: str = ..., deadline_ns: int = ...
    ) -> Array: ...
    def barrier(self, *, deadline_ns: int = ...) -> None: ...


def agree_on_model(c: Members, deadline_ns: int) -> Model:
    """The model of the group, the same on all members; all must call this. Raises as their operations do.

    The numbers are those of the first member that has measured such a group before; else all measure now. So
    they stay while one of them lives, and with them the algorithms, and the order of sums between hosts.
    """
    key = (c.size, c.hosts)
    known = c.all_gather(np.array(_known.get(key, (0.0, 0.0, 0.0))), deadline_ns=deadline_ns)
    numbers = next((row for row in known.reshape(-1, 3) if row[0]), np.zeros(3)).copy()
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


def _measure(c: Members, deadline_ns: int) -> tuple[float, float, float]:
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


def agree_on_reading(c: Members, deadline_ns: int) -> Reading:
    """Whether each member can read all others' memory.

    The same on all members, all of whom must call this. Raises as their operations do.
    """
    if _yama_asks():
        let_siblings_read()  # an error shows in the trial
    nonce = np.frombuffer(bytearray(os.urandom(NONCE_BYTES)), np.uint64)
    mine = np.concatenate([np.array([os.getpid(), address_of(nonce)], np.uint64), nonce])
    told = c.all_gather(mine, deadline_ns=deadline_ns)
    able = all(_can_read(told[place]) for place in range(c.size) if place != c.place)
    # Nobody's nonce goes away before all have looked for it: that ends here.
    verdicts = c.all_gather(np.array([able]), deadline_ns=deadline_ns)
    pids = {rank: int(row[0]) for rank, row in zip(c.members, told, strict=True)}
    number = int.from_bytes(blake2b(told.tobytes(), digest_size=NUMBER_BYTES).digest(), "little")
    return Reading(number or 1, pids if verdicts.all() else {})


def _can_read(told: Array) -> bool:
    pid, address, *nonce = (int(word) for word in told)
    if not 0 < pid <= PID_MAX:
        return False
    try:
        return read_memory(pid, address, NONCE_BYTES) == np.array(nonce, np.uint64).tobytes()
    except OSError:
        return False


def _yama_asks() -> bool:
    try:
        return YAMA.read_text(encoding="ascii").strip() == YAMA_DESCENDANTS_ONLY
    except OSError:
        return False
