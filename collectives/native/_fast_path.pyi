from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.execution.plan import Plan, Run
from zbmd.collectives.flight._flight import FlightRing
from zbmd.collectives.native._stepper import NativeGroup

WAITING_MAX: Final[int]
"""Threads that may wait for their turn on one communicator."""
QUICK_BYTES_MAX: Final[int]
"""Bytes that a small operation moves at most."""

def array_at(owner: object, address: int, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return a flat, writeable array over memory that `owner` has, which it keeps."""

class Turnstile:
    """Lets threads through one at a time, in the order in which they came: `with turnstile: ...`.

    Entering raises LocalProtocolError when too many wait already.
    """

    def __enter__(self) -> Turnstile: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
    @property
    def waiting(self) -> int:
        """The threads that wait for their turn."""

class KnownCall:
    """A call that has been made before: everything of it but its arrays' addresses."""

    @property
    def plan(self) -> Plan: ...

class FastPath:
    """Repeats the cached run of an identical earlier call.

    A call that it takes is the very one that the executor would make: the same program, descriptor,
    fingerprint, abort word, deadline, kill points and flight record. It takes a call if one of the same
    operation, dtype, size, arguments and reduction has run in one piece over arrays where they lay
    (`learn`), if its own arrays can be used where they lie too, and if no other thread has the turn.

    A small operation looks for the other members with the GIL held, for some microseconds: most often they
    are there. `held`: whether every member has a core of its own, so that this is worth it. `counts`: whether
    the processor's counter can be gone by between readings of the clock (`quick_clock.h`).
    """

    open: bool
    """Whether it takes calls."""
    fail: Callable[[], NoReturn] | None
    """Raises what became of a call that had begun (`Turns.fast_path_failed`)."""
    far: Callable[[Plan, int, int], int] | None
    """Runs a plan of a group with members on other hosts, by `RemoteGroup.resume`: (plan, deadline_ns,
    kill_point) to a STATUS. Raises nothing."""

    def __init__(
        self,
        group: NativeGroup,
        turnstile: Turnstile,
        ring: FlightRing,
        *,
        arena_begin: int,
        arena_end: int,
        held: bool,
        counts: bool,
    ) -> None: ...
    @property
    def taken(self) -> int:
        """Calls that it took."""
    @property
    def queued(self) -> int:
        """Operations that wait for another thread, or run there (`queue`)."""
    @property
    def status(self) -> int:
        """The STATUS of the call that failed."""
    @property
    def failed(self) -> KnownCall | None:
        """The call that failed; the turn is still its caller's."""
    def kill_at(self, sequence: int, point: int) -> None:
        """Fault injection, see `Executor.kill_at`."""
    def forget(self) -> None:
        """Take no call of before any more; what they kept of memory goes back."""
    def queue(self, change: int) -> None:
        """Operations that wait for another thread have become one more, or one less."""
    def learn(
        self,
        run: Run,
        x: NDArray[Any] | None,
        out: NDArray[Any] | None,
        *,
        op: str,
        algorithm: str,
        called_root: int,
        places: Mapping[int, bool],
        memory: object,
        addresses: NDArray[np.uint64],
        scratch: NDArray[np.uint8],
        nbytes: int,
        flight: int,
        flight_read: int,
    ) -> None:
        """Take calls like this one, which has just run, from now on; call it while the turn is the caller's.

        `called_root`: as the caller had it. `places`: for each of its buffers, whether it is `out` (or `x`).
        `memory`: what owns scratch and inbox; it is kept. `addresses`, `scratch`: as `NativeGroup.run` had
        them. `flight`: its number in the ring, and `flight_read` if the program's other ran.
        """
    def run(
        self, operation: int, x: object, out: object, op: str, algorithm: str, root: int, deadline_ns: int
    ) -> bool | None:
        """None: this call is not for the fast path. True: done. False: failed, see `failed`."""
    def begin(
        self,
        operation: int,
        x: object,
        out: object,
        op: str,
        algorithm: str,
        root: int,
        timeout_ns: int,
        landed: Callable[[BaseException | None], object],
    ) -> bool | None:
        """Begin a small call without waiting for anyone; None: it is not for the fast path, or not now.

        Other members can complete it from now on. It keeps the turn, and ends when the others have come at
        once, when `land` is called, or when another call wants the turn, on that one's thread: then `landed`
        is called once, with its error if it has failed. `x` and `out` must live until then.
        """
    @property
    def flies(self) -> bool:
        """Whether a call has begun that nobody waits for."""
    def land(self) -> None:
        """End the call that has begun, if there is one: wait for the others."""
    def land_now(self) -> None:
        """As `land`, if all others have come."""
    def run_now(
        self, operation: int, x: object, out: object, op: str, algorithm: str, root: int, timeout_ns: int
    ) -> bool | None:
        """As `run`, unless operations wait for another thread: they come first."""

class FastPathCalls:
    """The calls that are made most often: no Python frame lies between them and their fast path."""

    fast_path: FastPath

    def all_reduce(
        self, x: Any, out: Any = None, *, op: str = "sum", algorithm: str = "auto", deadline_ns: int = 0
    ) -> Any:
        """Combine every rank's `x` element by element; all ranks get the result in `out` (default: `x`).

        `x`: any shape, the same dtype and size on all ranks. `op`: sum, prod, min, max, avg, band, bor or
        bxor, as far as the dtype has it (`reductions`). `algorithm`: auto, eager, direct, swap,
        ring, bidirectional_ring, halving_doubling, tree, double_tree or hierarchical.
        """
    def reduce(
        self,
        x: Any,
        root: int,
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Any:
        """Combine every rank's `x`; rank `root` of the group gets the result in `out` (default: `x`).

        Returns the result at the root and None elsewhere, where `x` stays intact and `out` is not used.
        `algorithm`: auto, eager, direct, shared or tree.
        """
    def broadcast(self, x: Any, root: int, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Every rank's `x` becomes that of rank `root` of the group. Any dtype without objects.

        `algorithm`: auto, eager, direct or tree.
        """
    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Collect every rank's `x` into `out`, shape (size, *x.shape), in the order of the members.

        `x` may be the rank's own part of `out`. Any dtype without objects. `algorithm`: auto, eager,
        direct or ring.
        """
    def gather(
        self, x: Any, root: int, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> Any:
        """Collect every rank's `x` at rank `root` in `out`, shape (size, *x.shape), in the order of the
        members.

        Returns `out` at the root and None elsewhere, where `out` is not used. At the root `x` may be its part
        of `out`. Any dtype without objects. `algorithm`: auto, eager or direct.
        """
    def _all_reduce(self, x: Any, out: Any, op: str, algorithm: str, deadline_ns: int) -> Any:
        """A call that is not for the fast path; the next ones likewise."""
    def _reduce(self, x: Any, root: int, out: Any, op: str, algorithm: str, deadline_ns: int) -> Any: ...
    def _broadcast(self, x: Any, root: int, algorithm: str, deadline_ns: int) -> Any: ...
    def _all_gather(self, x: Any, out: Any, algorithm: str, deadline_ns: int) -> Any: ...
    def _gather(self, x: Any, root: int, out: Any, algorithm: str, deadline_ns: int) -> Any: ...
    def _new_gathered(self, x: Any) -> Any:
        """Memory for what is gathered, beside `x`."""
    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call."""

class BlockingCalls:
    """As `FastPathCalls`, for `Group.blocking`. limit_ns: the time of a call that says nothing else."""

    @property
    def _fast_path(self) -> FastPath: ...
    def __init__(self, fast_path: FastPath, limit_ns: int) -> None: ...
    def all_reduce(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        algorithm: str = "auto",
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> Any:
        """See `Operations.all_reduce`."""
    def _all_reduce(
        self, x: Any, out: Any, op: str, algorithm: str, timeout: float | None, priority: int, stream: Any
    ) -> Any:
        """A call that is not for the fast path, or says more."""
    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call."""
