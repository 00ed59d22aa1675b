from collections.abc import Callable
from typing import Any, Final

from numpy.typing import NDArray

SLOTS_MAX: Final[int]
"""Messages of one member to another that are not received yet: one more waits with its sender."""
MEMBER_BYTES: Final[int]
"""Memory for what one member sends to another, in the receiver's inbox."""
LABEL_BYTES_MAX: Final[int]
"""A longer label is cut."""
COPIED_BYTES_MAX: Final[int]
"""A message of so many bytes is copied as it is sent. A longer one must not change before it is received,
unless its send is over at once."""
STAGED_BYTES_MAX: Final[int]
"""A message of so many bytes goes through a block of memory that both map, while one is free."""
STAGE_BYTES: Final[int]
"""Memory for all blocks of a member."""
LOST: Final[int]
LEFT: Final[int]
ABORTED: Final[int]
DEADLINE: Final[int]
MISMATCH: Final[int]
GIVEN_UP: Final[int]
UNREADABLE: Final[int]

class Request:
    """A send or a receive. Members are named by their places in the group."""

    error: BaseException | None
    """For its maker to keep the error that it has made of `failure`."""

    @property
    def sends(self) -> bool:
        """Whether it is a send."""
    @property
    def peer(self) -> int:
        """The member that it names; -1: any."""
    @property
    def source(self) -> int:
        """The member that sent what was received, or whose end failed it; else -1."""
    @property
    def tag(self) -> int: ...
    @property
    def label(self) -> bytes:
        """Its array, as its caller names it: `float32[4,3]`."""
    @property
    def theirs(self) -> bytes | None:
        """The label of a message that does not fit (`MISMATCH`)."""
    @property
    def timeout_ns(self) -> int: ...
    @property
    def deadline_ns(self) -> int: ...
    @property
    def failure(self) -> int:
        """Why it failed; 0 if it did not."""
    @property
    def is_over(self) -> bool:
        """Whether it has ended, in either way."""
    def when_over(self, call: Callable[[], object]) -> None:
        """Call this once it is over, on the thread that ends it; it must be quick, and raise nothing."""

class MessageSlots:
    """One rank's end of the messages among the members of a group, who share a host.

    Each member has, in its inbox, slots for what each member sends to it. A sender fills the next slot of
    the receiver and rings. A small message is in the slot; one of up to 1 MiB is copied into a block of the
    sender's segment while the receiver copies it out (`messages.h`); for any other the slot says where it
    lies, and the receiver has the kernel copy it (`peers.h`). Messages of one member to another stay in
    order; a receive takes the first message that has come and fits, and receives are served in the order of
    their calls (MPI's non-overtaking rule), by whichever thread of the process waits or calls `progress`.

    A message is received if it came before its sender closed the group or was lost. A member's loss fails
    what waits then, and its close what waits for it. Receives from any member learn of a close once: those
    that wait, or else the next.
    """

    def __init__(
        self,
        members: list[tuple[int, int, int, int, int]],
        *,
        rank: int,
        channel: int,
        epoch: int,
        patience_ns: int,
        mappings: object,
        stage: Callable[[], NDArray[Any] | None] | None = None,
    ) -> None:
        """members: the base of the segment here, the slot and the process of each, the offset of its slots
        for messages, and the bytes of its segment. patience_ns: how long a wait looks before it parks, at
        most. mappings: keeps those segments mapped. stage: returns `STAGE_BYTES` of this rank's own segment
        for messages on their way, or None; called once, if ever. Raises ValueError."""
    @property
    def rank(self) -> int:
        """The place of this process in the group."""
    @property
    def is_idle(self) -> bool:
        """Whether no request of this process waits."""
    @property
    def copies(self) -> list[int]:
        """The members that have yet to receive a message whose sender has gone on."""
    @property
    def lost(self) -> list[int]:
        """The members that are known to have ended without closing the group."""
    @property
    def waiters(self) -> int:
        """The threads that are in `wait`."""
    def send(self, x: NDArray[Any], to: int, tag: int, label: bytes, timeout_ns: int) -> Request:
        """Send an array in one piece; if the request is over, it may change."""
    def receive(self, x: NDArray[Any], source: int, tag: int, label: bytes, timeout_ns: int) -> Request:
        """Receive into an array in one piece. source: -1 for any. The dtypes of both labels must be equal."""
    def progress(self) -> None:
        """Carry out what can be carried out now."""
    def wait(self, request: Request, limit_ns: int) -> bool:
        """Wait until a request is over; False after the limit. The GIL is let go."""
    def withdraw(self, request: Request) -> None:
        """Have a request that waits fail with `DEADLINE`."""
    def let_go(self) -> bool:
        """Use no memory of the members from now on; False, and nothing done, while a thread is in it."""
    def overdue(self, now_ns: int) -> list[Request]:
        """Return the requests whose own deadline has passed."""
