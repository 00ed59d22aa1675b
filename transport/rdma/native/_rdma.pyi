from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.transfer import Transfer
from zbmd.transport.native._native import Mapping
from zbmd.transport.rdma.native._rdma_device import Device, Path, Registration

INLINE_BYTES: Final[int]
ENDS_MAX: Final[int]
SENDS_MAX: Final[int]
CREDITS: Final[int]
SOME: Final[int]
ATTENTION: Final[int]
NEVER_NS: Final[int]
PUT: Final[int]
GET: Final[int]
MALFORMED: Final[int]
ACCESS_REFUSED: Final[int]

class Plane:
    """A completion queue for all peers of one device, and the memory that is registered for good.

    ends_max: queue pairs at once, 1 to ENDS_MAX; their completions have room, as far as the device allows.
    """

    @property
    def spin_ns(self) -> int:
        """Time that a thread of ours polls before it sleeps: three times the cost of a wake-up here."""
    def __init__(self, device: Device, ends_max: int = ENDS_MAX) -> None: ...
    def keep(self, registration: Registration) -> None:
        """Use this registration for what lies in it."""
    def run(self, spin_ns: int, until_ns: int) -> bool:
        """Take completions until Python has something to do, or it is `until_ns`; False if it was stopped.

        It looks for `spin_ns` after each, and then sleeps until the next.
        """
    def poll(self) -> int:
        """Take what has completed: bits of SOME and ATTENTION."""
    def doze(self, timeout_ms: int) -> None:
        """Sleep until something completes, or somebody wakes the plane."""
    def wake(self) -> None:
        """Have `run` return."""
    def stop(self) -> None:
        """Have `run` return False, now and later."""
    def enter(self) -> None:
        """The calling thread polls from now on: `run` stands by."""
    def leave(self) -> None:
        """Not any more."""
    def wait(
        self,
        mapping: Mapping,
        slot: int,
        channel: int,
        value: int,
        *,
        group_mask: int = 0,
        deadline_ns: int = 0,
    ) -> int:
        """As `Segment.wait`; this thread takes completions itself for a while."""
    def close(self) -> None:
        """The ends are closed and nobody runs or waits. It lets go of the device. Idempotent."""

Lend = Callable[[object, int, int], tuple[Registration, bool]]

class End:
    """A queue pair, and the transfers over it."""

    def __init__(
        self,
        plane: Plane,
        mapping: Mapping,
        slot: int,
        message_bytes_max: int,
        transfers_max: int,
        lend: Lend,
    ) -> None:
        """mapping: of our segment, whose cells of `slot` tell of the peer; lend: registers other memory.

        Raises UserError if the device gives no queue pair.
        """
    @property
    def number(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    @property
    def status(self) -> int:
        """Why it failed: an ibv_wc_status, or MALFORMED."""
    @property
    def goodbye(self) -> bool:
        """Whether the peer has said it."""
    @property
    def error(self) -> ZbmdError | None:
        """The error of new transfers."""
    @property
    def in_segment(self) -> int:
        """Transfers whose memory is in our segment, which was registered when the plane was opened."""
    @property
    def reused(self) -> int:
        """Those of other memory, which was registered already."""
    @property
    def registered(self) -> int:
        """Those whose memory was not."""
    @property
    def inlined(self) -> int:
        """Puts whose bytes were taken along, as they are few."""
    @property
    def copied(self) -> int:
        """Those of them that were copied, as they had to wait for room."""
    def connect(self, path: Path) -> None:
        """Ready to receive and to send. Raises UserError."""
    def submit(
        self, kind: int, view: memoryview, owner: object, remote: int, key: int, channel: int, value: int
    ) -> Transfer:
        """Put or get the flat bytes `view` of `owner` at the peer's address `remote`.

        Raises `error`, LinkFull, and UserError if memory cannot be registered.
        """
    def ping(
        self,
        view: memoryview,
        owner: object,
        remote: int,
        key: int,
        channel: int,
        value: int,
        *,
        first: bool,
        rounds: int,
        deadline_ns: int,
    ) -> tuple[int, NDArray[np.uint64]]:
        """See `RdmaRegion.ping`; how it ended, as `_native.WAIT_*`, and nanoseconds."""
    def wait_for(self, number: int, deadline_ns: int) -> None:
        """Poll natively until so many work requests are done, but not for ever."""
    def ask(self) -> None:
        """Somebody waits for what is under way, and does not poll."""
    def settled(self) -> Transfer:
        """Done once all that was asked for before is."""
    def say_goodbye(self) -> Transfer:
        """Behind everything that was asked for; done once it has arrived."""
    def settle(self) -> None:
        """Finish what is done, and post what waits, as far as there is room."""
    def refuse_new(self, error: ZbmdError) -> None:
        """Raise this from now on."""
    def close(self, error: ZbmdError) -> None:
        """End the queue pair, so that nothing is touched any more; what was under way ends with `error`."""
