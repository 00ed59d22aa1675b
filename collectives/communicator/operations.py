"""The operations of a group, declared once: for coroutines (`Group`) and for threads (`Blocking`).

A surface says only how a call is started (`Operations._start`). Elastic groups have another result and other
options: `zbmd.collectives.elastic.operations` declares theirs.

A blocking call runs on the calling thread, without the GIL if it lasts; a small one takes a microsecond.
Calls keep the order of the group's other calls: what was awaited or submitted before, and is not done yet,
goes first. Do not call it on a loop's thread: the loop would stand still.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, NoReturn, TypeAlias, TypeVar

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.turns import NO_ROOT
from zbmd.collectives.device.arrays import given_back, taken
from zbmd.collectives.native._fast_path import BlockingCalls
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

TIMEOUT_S_DEFAULT = 600.0
"""Until an operation without a `timeout` gives up. A death ends it within a millisecond: this is for a
member that lives and does not come, so it must exceed the longest that one may compute between two calls."""
TIMEOUT_S_MAX = 30 * 24 * 3600.0
"""No operation waits longer than this."""

CalledT = TypeVar("CalledT", covariant=True)
"""The return type of a call: a coroutine of the result, or the result."""
Method: TypeAlias = Callable[[Communicator, Any, Any, int], Any]
"""Takes the communicator, `x`, `out` and the deadline, ns."""
Submit = Callable[[Callable[[Communicator], Any], int, int], "Future[Any]"]

_TIMEOUT_NS_DEFAULT: Final = round(TIMEOUT_S_DEFAULT * 1e9)
_ALL_REDUCE: Final = Operation.ALL_REDUCE.value
_BROADCAST: Final = Operation.BROADCAST.value
_BARRIER: Final = Operation.BARRIER.value


def timeout_ns(timeout: float | None) -> int:
    """Return a timeout in nanoseconds; None is the default. Raises `UserError` if it is out of bounds."""
    if timeout is None:
        return _TIMEOUT_NS_DEFAULT
    if not 0 < timeout <= TIMEOUT_S_MAX:
        raise UserError(f"timeout={timeout!r} is not a number of seconds in 0..{TIMEOUT_S_MAX:g}")
    return round(timeout * 1e9)


class Operations(ABC, Generic[CalledT]):
    """The operations of a plain group; `Group` returns coroutines of their results, `Group.blocking` results.

    Ranks are ranks of the group. Arrays may lie on a device (`device.arrays`): the operation comes after the
    work that was queued on `stream` before the call; by default the stream that the array names, with cupy
    the current one. timeout: seconds from the call to the result (`TIMEOUT_S_DEFAULT`). priority: of a group
    with priorities, -127..127; of those that all members have called, the highest goes first.
    """

    @abstractmethod
    def _start(
        self, call: Method, x: Any, out: Any, timeout: float | None, priority: int, stream: Any = None
    ) -> CalledT:
        """Make a call with `x` and `out`, as `taken` gives them, in the order of the group's calls."""

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
    ) -> CalledT:
        """Reduce `x` over all members, elementwise, and return the result, the same bits on every rank.

        In place (`x` is overwritten) without `out`: after an error `x` is to be computed again. With `out`,
        `x` stays intact until the operation is complete.
        """
        return self._start(
            lambda c, x, out, ns: c.all_reduce(x, out, op=op, algorithm=algorithm, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        *,
        op: str = "sum",
        algorithm: str = "auto",
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Reduce every array over all members, in place; small ones travel together
        (`zbmd.collectives.communicator.uneven`).

        All members give arrays of the same dtypes and sizes in the same order. Returns `arrays`.
        """
        return self._start(
            lambda c, x, _, ns: c.all_reduce_many(x, op=op, algorithm=algorithm, deadline_ns=ns),
            arrays,
            None,
            timeout,
            priority,
            stream,
        )

    def reduce(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        op: str = "sum",
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x` over all members at rank `root`, which returns the result (in `x` without `out`)."""
        return self._start(
            lambda c, x, out, ns: c.reduce(x, root, out, op=op, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def broadcast(
        self, x: Any, root: int, *, timeout: float | None = None, priority: int = 0, stream: Any = None
    ) -> CalledT:
        """Copy `x` of rank `root` to all members' `x`, and return it."""
        return self._start(
            lambda c, x, _, ns: c.broadcast(x, root, deadline_ns=ns),
            x,
            None,
            timeout,
            priority,
            stream,
        )

    def all_gather(
        self, x: Any, *, out: Any = None, timeout: float | None = None, priority: int = 0, stream: Any = None
    ) -> CalledT:
        """Return (size, *x.shape): every member's `x`, in rank order."""
        return self._start(
            lambda c, x, out, ns: c.all_gather(x, out, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def all_gather_v(
        self, x: Any, *, timeout: float | None = None, priority: int = 0, stream: Any = None
    ) -> CalledT:
        """Return every member's rows `x`, (rows, ...), in rank order; their numbers may differ."""
        return self._start(
            lambda c, x, _, ns: c.all_gather_v(x, deadline_ns=ns),
            x,
            None,
            timeout,
            priority,
            stream,
        )

    def gather(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Return (size, *x.shape), every member's `x`, at rank `root`; None elsewhere."""
        return self._start(
            lambda c, x, out, ns: c.gather(x, root, out, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def scatter(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Return this member's part of the `x` of rank `root`, (size, ...); others pass None and `out`."""
        return self._start(
            lambda c, x, out, ns: c.scatter(x, root, out, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def reduce_scatter(
        self,
        x: Any,
        *,
        out: Any = None,
        op: str = "sum",
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x`, (size, ...), over all members and return this member's part of it."""
        return self._start(
            lambda c, x, out, ns: c.reduce_scatter(x, out, op=op, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def reduce_scatter_v(
        self,
        x: Any,
        rows: Sequence[int],
        *,
        out: Any = None,
        op: str = "sum",
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Reduce `x` over all members and return this member's rows of it: `rows[r]` for the r-th."""
        return self._start(
            lambda c, x, out, ns: c.reduce_scatter_v(x, rows, out, op=op, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def all_to_all(
        self, x: Any, *, out: Any = None, timeout: float | None = None, priority: int = 0, stream: Any = None
    ) -> CalledT:
        """Send block d of `x`, (size, ...), to member d, and return the blocks that came, in rank order."""
        return self._start(
            lambda c, x, out, ns: c.all_to_all(x, out, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def all_to_all_v(
        self,
        x: Any,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        *,
        out: Any = None,
        timeout: float | None = None,
        priority: int = 0,
        stream: Any = None,
    ) -> CalledT:
        """Send `send_rows[d]` rows of `x` to member d; return the `receive_rows[s]` rows of each member s."""
        return self._start(
            lambda c, x, out, ns: c.all_to_all_v(x, send_rows, receive_rows, out, deadline_ns=ns),
            x,
            out,
            timeout,
            priority,
            stream,
        )

    def barrier(self, *, timeout: float | None = None, priority: int = 0) -> CalledT:
        """Return once every member has called this."""
        return self._start(lambda c, _x, _, ns: c.barrier(deadline_ns=ns), None, None, timeout, priority)

    def connect_devices(self, x: Any, *, timeout: float | None = None) -> CalledT:
        """Have the members' devices read each other's memory from now on, if all of them can.

        All members call it, each with an array on its device. Returns the same `DevicePaths` on all: whether
        they do, and why, or why not. If so, arrays of devices no longer pass through the host, and to an
        operation all members pass such arrays, or none does (`Desynchronised`). Else all stays as it was.
        """
        return self._start(lambda c, x, _, ns: c.connect_devices(x, deadline_ns=ns), x, None, timeout, 0)


class Blocking(BlockingCalls, Operations[Any]):
    """`group.blocking`: the operations of `Group` for a thread that may wait."""

    def __init__(self, communicator: Communicator, submit: Submit) -> None:
        super().__init__(communicator.fast_path, _TIMEOUT_NS_DEFAULT)
        self._communicator = communicator
        self._submit = submit

    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call."""
        self._communicator.fast_path_failed()

    def _all_reduce(
        self, x: Any, out: Any, op: str, algorithm: str, timeout: float | None, priority: int, stream: Any
    ) -> Any:
        limit_ns = timeout_ns(timeout)
        fast = None if priority else self._fast_path
        done = fast and fast.run_now(_ALL_REDUCE, x, out, op, algorithm, NO_ROOT, limit_ns)
        if done is None:
            return Operations.all_reduce(
                self,
                x,
                out=out,
                op=op,
                algorithm=algorithm,
                timeout=timeout,
                priority=priority,
                stream=stream,
            )
        return (x if out is None else out) if done else self.fast_path_failed()

    def broadcast(
        self, x: Any, root: int, *, timeout: float | None = None, priority: int = 0, stream: Any = None
    ) -> Any:
        """See `Operations.broadcast`."""
        limit_ns = timeout_ns(timeout)
        fast = None if priority else self._fast_path
        done = fast and fast.run_now(_BROADCAST, x, None, "sum", "auto", root, limit_ns)
        if done is None:
            return super().broadcast(x, root, timeout=timeout, priority=priority, stream=stream)
        return x if done else self.fast_path_failed()

    def barrier(self, *, timeout: float | None = None, priority: int = 0) -> None:
        """See `Operations.barrier`."""
        limit_ns = timeout_ns(timeout)
        fast = None if priority else self._fast_path
        done = fast and fast.run_now(_BARRIER, None, None, "sum", "auto", NO_ROOT, limit_ns)
        if done is None:
            super().barrier(timeout=timeout, priority=priority)
        elif not done:
            self.fast_path_failed()

    def _start(
        self, call: Method, x: Any, out: Any, timeout: float | None, priority: int, stream: Any = None
    ) -> Any:
        """Run an operation here, or on the group's thread if others wait there."""
        x, out = taken(x, stream), taken(out, stream)
        end_ns = now_ns() + timeout_ns(timeout)
        if self._fast_path.queued or priority:
            queued = self._submit(lambda c: call(c, x, out, end_ns), priority, end_ns)
            return given_back(queued.result())
        return given_back(call(self._communicator, x, out, end_ns))
