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
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.native._stepper import let_siblings_read, read_memory
from zbmd.transport.native._native import address_of

NONCE_BYTES = 16
NUMBER_BYTES = 6
PID_MAX = 1 << 22
"""Linux gives no process a greater number (PID_MAX_LIMIT)."""
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
YAMA_DESCENDANTS_ONLY = "1"


@dataclass(frozen=True, slots=True)
class Reading:
    """What members have found. number: of their trial, the same on all of them, and of no other; 0: of none.

    pids: the process of each, by rank, if all can read all others' memory; else none.
    """

    number: int
    pids: Mapping[int, int]


NOT_TRIED: Final = Reading(0, {})


class Asked(Protocol):
    """What the trial needs of a communicator."""

    size: int
    place: int
    members: tuple[int, ...]

    def all_gather(self, x: Array, *, algorithm: str = ..., deadline_ns: int = ...) -> Array: ...


def agree_on_reading(c: Asked, deadline_ns: int) -> Reading:
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
