"""Send small puts and notifications on one stripe as bytes, while nothing else is in flight.

A shortcut past records, stripe streams and machine for what these would do in dozens of calls. The bytes are
the same, so a peer cannot tell. Sans-I/O: whoever has the socket moves them. It takes over from the machine
(`BulkMachine.rest`) and gives back with `bulk_events.QuickMoved`. Of what comes it does what is beyond doubt:
the very next record, whole, with the right tags, for memory that peers may write. All else it leaves as it
came, for the machine to judge: so it raises nothing about what a peer sends.
"""

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.secure.protection import Seal

QUICK_BYTES_MAX: int
"""A longer put is for the machine."""

class _Versions(Protocol):
    @property
    def version(self) -> int:
        """Another number whenever memory is not peers' any more."""
        ...

class QuickPuts:
    """One stripe's. For one thread at a time.

    seal_sent, seal_come: make the tags of either direction (`RecordMac.seal`); None on a stripe without.
    resolve: the bytes that peers may write of the region (slot, incarnation, offset, nbytes), writable, or
    None; asked again when `versions.version` has changed. own: address of our segment, whose cells of `slot`,
    the peer's, are set.
    """

    sent_records: int
    """Records of either direction since the stripe was opened."""
    come_records: int
    acked: int
    """Puts of ours that the peer has published."""
    published: int
    """The peer's puts that are."""
    told: int
    """Of those, how many have been acknowledged to the peer."""

    def __init__(
        self,
        *,
        seal_sent: Seal | None,
        seal_come: Seal | None,
        resolve: Callable[[int, int, int, int], memoryview | None],
        versions: _Versions,
        own: int,
        slot: int,
    ) -> None: ...
    def begin(
        self,
        sent_records: int,
        come_records: int,
        puts: int,
        acked: int,
        awaited: int,
        published: int,
        told: int,
    ) -> None:
        """Go on from where the machine and the stripe are; see `bulk_machine.Rest`."""

    def end(self) -> bytes:
        """Return the bytes that have arrived and are left to the stripe. `begin` comes next."""

    @property
    def new_puts(self) -> int:
        """Puts and notifications sent since `begin`."""

    def acknowledge(self) -> memoryview:
        """Return the acknowledgement of what is published and not yet acknowledged, or empty. See `put`."""

    def put(
        self,
        handle: RegionHandle,
        data: memoryview | NDArray[Any],
        at: int,
        channel: int,
        value: int,
    ) -> tuple[memoryview, ...] | None:
        """The bytes that put `data`, flat, at `at` of the peer's region, with what is to be acknowledged.

        They are in up to three pieces, one of which is `data` itself unless it is short, and hold until the
        next call. None if it is empty, too long, or too many are not acknowledged. What is asked for must
        have been checked (`CheckedRegion`).
        """

    def notify(self, channel: int, value: int) -> memoryview | None:
        """The bytes that notify, in one piece; as `put`."""

    @property
    def room(self) -> tuple[memoryview, ...]:
        """The buffers for the next bytes of the stripe, one behind the other.

        A long payload is received straight into its region, the first of two. Empty only after `came` was
        False.
        """

    def came(self, nbytes: int) -> bool:
        """`nbytes` of `room` are filled: do what is whole. False if something there is the machine's."""
