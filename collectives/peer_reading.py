"""Whether the ranks of a host can read each other's ordinary memory: tried once, when a group is made.

Arrays in the arena are mapped by all. Of others the kernel copies straight to where they are wanted
(`process_vm_readv`), if it lets one process look at another: both of one user, in one process namespace, and
neither a seccomp filter nor Yama against it. Where Yama lets a process be looked at by its ancestors alone, a
rank names its parent as one who may, and with it what descends from that: the ranks that a launcher started,
and nobody else (prctl(2), PR_SET_PTRACER). Where one member cannot read another, arrays are copied through
the arena.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import numpy as np

from zbmd.collectives._stepper import let_siblings_read, read_memory
from zbmd.collectives.arrays import Array
from zbmd.transport._native import address_of

NONCE_BYTES = 16
PID_MAX = 1 << 22
"""Linux gives no process a greater number (PID_MAX_LIMIT)."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
YAMA_DESCENDANTS_ONLY = "1"


class Asked(Protocol):
    """What the trial needs of a communicator."""

    size: int
    place: int

    def all_gather(self, x: Array, *, algorithm: str = ..., deadline_ns: int = ...) -> Array: ...


def agree_on_reading(c: Asked, deadline_ns: int) -> list[int]:
    """The members' process numbers, in their order, if each can read all others' memory; else [].

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
    return [int(row[0]) for row in told] if verdicts.all() else []


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
