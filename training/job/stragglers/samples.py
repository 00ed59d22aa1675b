"""Samples of a rank's steps, as numbers that travel with its losses: phases, and evidence of causes.

Phases are sums of the profiler's spans, so they cost nothing more. Evidence comes from counters of the
kernel: the run delay of the training thread and the processor time of all threads each step; what the
hypervisor and the cgroup took, and round trips of connections, four times a second.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from zbmd.training.profiler.lines import StepLine
from zbmd.transport.tcp.sockets import smoothed_round_trip

Sample = npt.NDArray[np.float64]
"""(`SAMPLE_NUMBERS`,)."""


class Field(IntEnum):
    """The numbers of a sample; ns of a step unless noted."""

    KNOWN = 0
    """1 if a whole step was measured, else all others are 0."""
    PASSES = 1
    """Forward, backward and recomputation: in proportion to the rank's logical shards."""
    UPDATE = 2
    """Optimizer, norm and digest: the same for any number of shards."""
    DATA = 3
    COLLECTOR = 4
    """Garbage collection, in any thread."""
    CHECKPOINT = 5
    WAIT = 6
    """For other ranks."""
    ROUND_TRIP = 7
    """The least of this rank's TCP connections to other hosts, in us; 0 without one."""
    DELAY = 8
    """In passes and updates, the training thread could run, and another process or thread had its
    processor."""
    STEAL = 9
    """The hypervisor ran something else, mean over processors."""
    THROTTLED = 10
    """The quota of the cgroup was used up."""
    OTHERS = 11
    """Processor time of this process's other threads."""
    INCARNATION = 12
    """Number."""
    LONGEST_TRIP = 13
    """As `ROUND_TRIP`, to the host that it is longest to."""
    OWN_END = 14
    PEER_END = 15
    """The addresses of that connection as numbers: this rank's, and the other host's."""


SAMPLE_NUMBERS: Final = len(Field)
RATES_EVERY_NS: Final = 250_000_000
FILES_MAX: Final = 1 << 12
BUSY_PART: Final = 0.01
"""A connection is busy that has sent so much of what the busiest one has sent."""
_READ_BYTES: Final = 1 << 12
_PHASES: Final = {
    Field.PASSES: ("forward", "backward", "recompute"),
    Field.UPDATE: ("optimizer", "grad_clip", "digest"),
    Field.DATA: ("data", "transfer"),
    Field.CHECKPOINT: ("checkpoint",),
    Field.WAIT: ("comm", "bubble"),
}


class HostTrips(NamedTuple):
    """The least round trip of this rank's connections, us, the longest one, and the ends of that one."""

    least_us: float
    most_us: float
    own: float
    peer: float


NO_TRIPS: Final = HostTrips(0.0, 0.0, 0.0, 0.0)
NO_TRIP: Final = (0, 0, "", "")


def no_sample() -> Sample:
    """Return the sample of a rank that has not measured a whole step of this view."""
    return np.zeros(SAMPLE_NUMBERS)


class Sampler:
    """Measures the steps of this process. Make it, and call it, on the thread that trains; close it there.

    incarnation: of this rank. root: of the files of the kernel. links: whether it has other hosts.
    """

    def __init__(self, incarnation: int, *, root: Path = Path("/"), links: bool = True) -> None:
        self._incarnation = incarnation
        self._collected_ns = self._collecting_ns = 0
        thread = threading.get_native_id()
        self._delays = _opened(root / f"proc/self/task/{thread}/schedstat")
        self._rates = _Rates(root, links)
        self._last = self._counters()
        gc.callbacks.append(self._collecting)

    def close(self) -> None:
        """Measure no longer. Idempotent."""
        with contextlib.suppress(ValueError):
            gc.callbacks.remove(self._collecting)
        if self._delays is not None:
            os.close(self._delays)
            self._delays = None
        self._rates.close()

    def restart(self) -> None:
        """Leave out what has passed since the last sample."""
        self._last = self._counters()

    def sample(self, line: StepLine) -> Sample:
        """Return the sample of the step that has just ended, since the last call or `restart`."""
        now, made = self._counters(), no_sample()
        delay_ns, process_ns, thread_ns, collected_ns = (a - b for a, b in zip(now, self._last, strict=True))
        self._last = now
        for field, names in _PHASES.items():
            made[field] = sum(line.ns.get(name, 0) for name in names)
        made[Field.KNOWN], made[Field.INCARNATION] = 1.0, self._incarnation
        made[Field.COLLECTOR] = collected_ns
        waited_ns = self._delay_in_passes(made, delay_ns, thread_ns)
        # Most of it is in the passes, whose operations make the objects that are collected.
        made[Field.PASSES] = max(0.0, made[Field.PASSES] - collected_ns)
        made[Field.DELAY], made[Field.OTHERS] = waited_ns, max(0, process_ns - thread_ns)
        rates = self._rates.read()
        made[Field.STEAL], made[Field.THROTTLED] = rates.steal * line.wall_ns, rates.throttled * line.wall_ns
        made[Field.ROUND_TRIP] = rates.trips.least_us
        made[Field.LONGEST_TRIP] = rates.trips.most_us
        made[Field.OWN_END], made[Field.PEER_END] = rates.trips.own, rates.trips.peer
        return made

    @staticmethod
    def _delay_in_passes(made: Sample, delay_ns: int, thread_ns: int) -> float:
        """Return how much of the thread's run delay can have been in passes and updates.

        On a busy machine the end of each wait for other ranks is delayed too, and that slows none of them.
        """
        passes_ns = made[Field.PASSES] + made[Field.UPDATE]
        computed_ns = max(0.0, thread_ns - made[Field.DATA] - made[Field.CHECKPOINT])
        return float(min(delay_ns, max(0.0, passes_ns - computed_ns)))

    def _counters(self) -> tuple[int, int, int, int]:
        delay = 0 if self._delays is None else int(os.pread(self._delays, _READ_BYTES, 0).split()[1])
        return delay, time.process_time_ns(), time.thread_time_ns(), self._collected_ns

    def _collecting(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._collecting_ns = time.monotonic_ns()
        elif self._collecting_ns:
            self._collected_ns += time.monotonic_ns() - self._collecting_ns


class _Rates:
    """Counters that are expensive to read, four times a second. steal, throttled: of the time."""

    def __init__(self, root: Path, links: bool = True) -> None:
        self._links = links
        self.steal = self.throttled = 0.0
        self.trips = NO_TRIPS
        self._stat = _opened(root / "proc/stat")
        self._quota, self._unit_ns, self._key = _opened_quota(root)
        self._at_ns = time.monotonic_ns()
        self._counted = self._counts()

    def read(self) -> _Rates:
        now = time.monotonic_ns()
        passed_ns = now - self._at_ns
        if passed_ns >= RATES_EVERY_NS:
            counted = self._counts()
            steal_ns, throttled_ns = (a - b for a, b in zip(counted, self._counted, strict=True))
            self.steal = steal_ns / (os.cpu_count() or 1) / passed_ns
            self.throttled = throttled_ns / passed_ns
            self.trips = _measured_trips() if self._links else NO_TRIPS
            self._at_ns, self._counted = now, counted
        return self

    def _counts(self) -> tuple[float, float]:
        """Return what was stolen of all processors together, and how long the cgroup was throttled, ns."""
        steal = throttled = 0.0
        if self._stat is not None:
            words = os.pread(self._stat, _READ_BYTES, 0).split(b"\n", 1)[0].split()
            steal = int(words[8]) * 1e9 / os.sysconf("SC_CLK_TCK") if len(words) > 8 else 0.0
        if self._quota is not None:
            words = os.pread(self._quota, _READ_BYTES, 0).split()
            found = dict(zip(words[::2], words[1::2], strict=False))
            throttled = int(found.get(self._key, b"0")) * self._unit_ns
        return steal, throttled

    def close(self) -> None:
        for file in (self._stat, self._quota):
            if file is not None:
                os.close(file)
        self._stat = self._quota = None


def _opened(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None  # a kernel without it: there is one kind of evidence less


def _opened_quota(root: Path) -> tuple[int | None, float, bytes]:
    """Return `cpu.stat` of this process's cgroup, the unit of its throttled time in ns, and that one's
    key."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, 0.0, b""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return _opened(root / f"sys/fs/cgroup/cpu/{path.lstrip('/')}/cpu.stat"), 1.0, b"throttled_time"
    path = lines[-1].split(":", 2)[2].lstrip("/") if lines else ""
    return _opened(root / f"sys/fs/cgroup/{path}/cpu.stat"), 1e3, b"throttled_usec"


def _measured_trips() -> HostTrips:
    """Return the smoothed round trips of this process's TCP connections to other hosts.

    Behind a slow cable all of a rank's connections are slow; its peers have faster ones too. Of the
    connections to one address the fastest counts. Those that are idle beside others count not: their round
    trip is that of their handshake.
    """
    found: list[tuple[int, int, str, str]] = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd")[:FILES_MAX]:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    found.append(_round_trip_of(int(name)))
    busy = BUSY_PART * max((segments for _, segments, _, _ in found), default=0)
    by_host: dict[tuple[str, str], int] = {}
    for us, segments, own, peer in found:
        if us and segments >= busy:
            by_host[own, peer] = min(us, by_host.get((own, peer), us))
    if not by_host:
        return NO_TRIPS
    own, peer = max(by_host, key=lambda ends: (by_host[ends], ends))
    least, most = min(by_host.values()), by_host[own, peer]
    return HostTrips(float(least), float(most), address_number(own), address_number(peer))


def address_number(address: str) -> float:
    """Return a number for an address of a host, which is exact as a float and the same on all hosts."""
    plain = address.partition("%")[0].removeprefix("::ffff:")
    return float(int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=6).digest()))


def _round_trip_of(file: int) -> tuple[int, int, str, str]:
    """Return the round trip of a connection to another host, the segments that it has sent, and the addresses
    of both ends; 0 and no address else.
    """
    with socket.socket(fileno=os.dup(file)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return NO_TRIP
        us, segments = smoothed_round_trip(one)
        if not us:
            return NO_TRIP
        own, peer = str(one.getsockname()[0]), str(one.getpeername()[0])
        return NO_TRIP if own == peer else (us, segments, own, peer)
