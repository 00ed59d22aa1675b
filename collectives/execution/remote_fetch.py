"""Gets from members on other hosts: merged into longer runs, asked for ahead, waited for without the GIL.

The thread that waits moves the bytes itself: two wake-ups of sleeping threads are most of what a small
message costs. So it takes the turns of the data plane (`RemotePlane.drive`) for a while, then sleeps, and
leaves them to the plane's thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.execution.plan import Plan
from zbmd.collectives.native._remote_stepper import RemoteGroup
from zbmd.collectives.native._stepper import STATUS_ABORTED, STATUS_DONE, STATUS_LOST
from zbmd.transport.errors import LinkClosed, PeerLost
from zbmd.transport.memory.region import RemoteRegion
from zbmd.transport.memory.segment import Segment
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native import _native
from zbmd.transport.native._native import now_ns
from zbmd.transport.rdma.remote_memory import RemoteMemory, RemotePlane

SPIN_NS: Final = 50_000
"""The time for which a waiting thread spins before it sleeps."""
DRIVE_NS: Final = 500_000
"""The time for which it drives in vain if its data may come by another route: some wake-ups long."""
PARKED_NS: Final = 50_000_000
"""The time for which it drives in vain if its data can come by the plane alone."""


class Driver:
    """Drives the data plane for one thread at a time. plane: None if nothing passes it."""

    def __init__(self, plane: RemotePlane | None) -> None:
        self._plane = plane

    def driving(self) -> AbstractContextManager[None]:
        """For the time of an operation; see `RemotePlane.driving`."""
        return nullcontext() if self._plane is None else self._plane.driving()

    def wake(self) -> None:
        """Have the thread that sleeps in `until` look again; from any thread."""
        if self._plane is not None:
            self._plane.wake()

    def until(self, come: Callable[[], bool], *, far: bool, soon: bool = True) -> None:
        """Drive until `come`, or for a while in vain: then the plane's own thread takes over.

        far: only the plane can bring what `come` looks for, so the thread may sleep where the plane sleeps.
        It sees whatever else ends a wait `PARK_MS` later at most. soon: it is worth to spin for it first.
        """
        plane = self._plane
        if plane is None or come():
            return
        idle_ns, vain_ns = 0, PARKED_NS if far else DRIVE_NS
        spin_ns = SPIN_NS if soon else 0
        while True:
            moved = plane.drive()
            if come():
                return
            if moved:
                idle_ns = 0
                continue
            at_ns = now_ns()
            idle_ns = idle_ns or at_ns
            if at_ns - idle_ns >= vain_ns:
                plane.hand_over()
                return
            if far and at_ns - idle_ns >= spin_ns:
                plane.park()
            else:
                os.sched_yield()

    def leave(self) -> None:
        """Others may still need what this process lends: have the plane's thread see to it at once."""
        if self._plane is not None:
            self._plane.hand_over()


FETCH_BYTES: Final = 2 << 20
"""A get of what is to be reduced is no longer than this, or than one chunk: what came is reduced while more
is on its way."""
FETCH_DIRECT_BYTES: Final = 8 << 20
"""A get of what lands where it belongs is no longer than this."""
SOON_BYTES: Final = 64 << 10
"""A get that is no longer is here after a round trip."""
STAGING_BYTES_MAX: Final = 16 << 20
"""Received beside its destination at once, but for one chunk."""
_ALIGNMENT: Final = 64


class Ended(Exception):
    """The operation is over for this rank, with this STATUS. gone: the place of a member that is."""

    def __init__(self, status: int, gone: int | None = None) -> None:
        super().__init__(status, gone)
        self.status = status
        self.gone = gone


class Landings:
    """Lets a thread wait for transfers of ours as it waits for notifications, with all that ends such a wait.

    The data-plane thread counts them in the notify cell of our own slot, which nobody else writes.
    """

    def __init__(
        self, segment: Segment, group: RemoteGroup, driver: Driver, *, channel: int, epoch: int, spins: int
    ) -> None:
        self._segment = segment
        self._group = group
        self._driver = driver
        self._mapping = segment.mapping  # it may tell of the last one when the segment is closed
        self._channel = channel
        self._epoch = epoch
        self._lost_mask = group.lost_mask
        self._spins = spins
        self._lock = threading.Lock()
        self._count = 0

    def expect(self, transfer: Transfer) -> None:
        """Count the end of this one."""
        transfer.then(self._landed)

    def wait(self, transfer: Transfer, deadline_ns: int, *, soon: bool) -> int:
        """Until an expected transfer has ended, which comes soon, if it comes; returns a STATUS."""
        self._driver.until(lambda: transfer.done or self._group.over, far=True, soon=soon)
        while True:
            seen = self._count
            if transfer.done:
                return STATUS_DONE
            status = self._segment.wait(
                self._segment.slot,
                self._channel,
                self._epoch << 32 | seen + 1,
                group_mask=self._lost_mask,
                deadline_ns=deadline_ns,
                spins=self._spins,
            )
            if status != STATUS_DONE:
                return status

    def _landed(self) -> None:
        with self._lock:
            self._count += 1
            value = self._epoch << 32 | self._count
            _native.notify(self._mapping.address, self._segment.slot, self._channel, value)


class Staging:
    """Memory beside the destinations, kept from run to run."""

    def __init__(self) -> None:
        self._array = np.empty(0, np.uint8)

    def reserve(self, nbytes: int) -> int:
        """The address of so many bytes; what was reserved before is given up."""
        if self._array.nbytes < nbytes:
            self._array = np.empty(nbytes, np.uint8)
        return _native.address_of(self._array)

    def window(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of what is reserved, as a part of its array: a device that must know memory knows it."""
        at = address - _native.address_of(self._array)
        return self._array[at : at + nbytes]


@dataclass(slots=True)
class Fetch:
    """One get: `nbytes` at `offset` of a buffer of the member at `place`, into `address`."""

    place: int
    buffer: int
    offset: int
    nbytes: int
    address: int
    """0 until it has a place in the staging."""
    direct: bool
    """It is no part of the staging."""
    transfer: Transfer | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Bytes `at` of a fetch: an operand."""

    fetch: Fetch
    at: int

    @property
    def address(self) -> int:
        """The address that it is received at."""
        return self.fetch.address + self.at


class Fetcher:
    """The gets of one run of a plan."""

    def __init__(
        self,
        plan: Plan,
        group: RemoteGroup,
        remote: Mapping[int, RemoteMemory],
        landings: Landings,
        staging: Staging,
        deadline_ns: int,
    ) -> None:
        self.asked: dict[int, list[Transfer]] = {place: [] for place in remote}
        """All gets of the run, by place."""
        self._plan = plan
        self._group = group
        self._remote = remote
        self._landings = landings
        self._staging = staging
        self._deadline_ns = deadline_ns
        self._regions: dict[tuple[int, int, bool], RemoteRegion] = {}
        self._next: list[Fetch] = []
        """Not asked for yet."""
        self._last: dict[tuple[int, int], Fetch] = {}
        """Of `_next`, the last of each buffer."""
        self.staged_bytes = 0
        """Of `_next`, what needs staging."""

    def region(self, place: int, buffer: int, *, writable: bool) -> RemoteRegion:
        """Return the memory that the member at `place` lends of a buffer for this run."""
        key = place, buffer, writable
        found = self._regions.get(key)
        if found is None:
            offset, nbytes = self._group.extent(self._plan.native, place, buffer)
            found = self._regions[key] = self._remote[place].lent(offset, nbytes, writable=writable)
        return found

    def add(self, place: int, buffer: int, offset: int, nbytes: int, address: int = 0) -> Fetched:
        """Fetch these bytes to `address`, or (0) into the staging, once `ask` is called."""
        last = self._last.get((place, buffer))
        if not address:
            self.staged_bytes += nbytes
        most = FETCH_DIRECT_BYTES if address else FETCH_BYTES
        if last is not None and last.offset + last.nbytes == offset and last.nbytes + nbytes <= most:
            follows = last.address + last.nbytes == address if last.address else not address
            if follows:
                last.nbytes += nbytes
                return Fetched(last, last.nbytes - nbytes)
        fetch = Fetch(place, buffer, offset, nbytes, address, direct=address != 0)
        self._last[place, buffer] = fetch
        self._next.append(fetch)
        return Fetched(fetch, 0)

    def ask(self) -> list[Fetch]:
        """Ask for what was added. What was staged before is not needed any more."""
        asked, self._next = self._next, []
        self._last.clear()
        self.staged_bytes = 0
        staged = [fetch for fetch in asked if not fetch.direct]
        if staged:
            at = self._staging.reserve(sum(_aligned(fetch.nbytes) for fetch in staged))
            for fetch in staged:
                fetch.address, at = at, at + _aligned(fetch.nbytes)
        for fetch in asked:
            region = self.region(fetch.place, fetch.buffer, writable=False)
            within = self._group if fetch.direct else self._staging
            into = within.window(fetch.address, fetch.nbytes)
            try:
                fetch.transfer = region.get(into, fetch.offset)
            except (PeerLost, LinkClosed):
                raise Ended(STATUS_LOST, fetch.place) from None
            self.asked[fetch.place].append(fetch.transfer)
            self._landings.expect(fetch.transfer)
        return asked

    def is_here(self, fetch: Fetch) -> bool:
        """Whether waiting for it would take no time."""
        return fetch.transfer is not None and fetch.transfer.done

    def wait(self, fetches: Iterable[Fetch]) -> None:
        """Until all have come. Raises `Ended`."""
        for fetch in fetches:
            transfer = fetch.transfer
            assert transfer is not None, "it has been asked for"
            status = self._landings.wait(transfer, self._deadline_ns, soon=fetch.nbytes <= SOON_BYTES)
            if status != STATUS_DONE:
                raise Ended(status)
            if isinstance(transfer.error, PeerLost | LinkClosed):
                raise Ended(STATUS_LOST, fetch.place)
            if transfer.error is not None:
                raise Ended(STATUS_ABORTED)  # its owner has taken the memory back: it has given up


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
