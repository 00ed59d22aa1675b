"""A group's operations for a thread that may wait: no event loop, no other thread in their path.

A small operation takes a microsecond so. It blocks the calling thread, without the GIL if it lasts: call it
where nothing else is to be done meanwhile: on a compute thread, or in a script without a loop. On a loop's
thread it holds up the loop.

Calls keep the order of the group's other calls: what has been awaited or submitted before, and is not done
yet, goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Final, NoReturn, TypeVar

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.runs import NO_ROOT
from zbmd.collectives.device.arrays import given_back, taken
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.native._fast_path import BlockingCalls
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.native._native import now_ns

TIMEOUT_S_DEFAULT = 600.0
"""Until an operation that says nothing else gives up. A death ends it within a millisecond: this is for a
member that lives and does not come, so it must exceed the longest that one may compute between two calls."""
TIMEOUT_S_MAX = 30 * 24 * 3600.0
"""No operation waits longer than this."""
LOOP_CHECK_S: Final = 1.0
"""How often a thread that waits for the loop looks whether that has been closed: it would tell nobody."""

ResultT = TypeVar("ResultT")
Submit = Callable[[Callable[[Communicator], Any], int, int], "Future[Any]"]

_TIMEOUT_NS_DEFAULT: Final = round(TIMEOUT_S_DEFAULT * 1e9)
_ALL_REDUCE: Final = Operation.ALL_REDUCE.value
_BROADCAST: Final = Operation.BROADCAST.value
_BARRIER: Final = Operation.BARRIER.value


def timeout_ns(timeout: float | None) -> int:
    """A timeout in nanoseconds; None is the default. Raises `UserError` if it is out of bounds."""
    if timeout is None:
        return _TIMEOUT_NS_DEFAULT
    if not 0 < timeout <= TIMEOUT_S_MAX:
        raise UserError(f"timeout={timeout!r} is not a number of seconds in 0..{TIMEOUT_S_MAX:g}")
    return round(timeout * 1e9)


class OnLoop:
    """The loop of the thread that makes this, for calls of other threads that pass it."""

    def __init__(self) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def soon(self, call: Callable[[], None]) -> None:
        """Have the loop make a call, unless it is closed. From any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def wait_for(self, begin: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Have the loop run a coroutine; its result, or what it raises.

        Raises `LocalProtocolError` on the loop's thread, which may not wait, and `OperationAborted` if the
        loop ends first.
        """
        if threading.get_ident() == self._thread:
            raise LocalProtocolError("this call passes the loop, and this is its thread: await it instead")
        ended = OperationAborted("the loop that this call passes has ended, and took it along")
        begun = begin()
        try:
            running = asyncio.run_coroutine_threadsafe(begun, self._loop)
        except RuntimeError:  # it is closed
            begun.close()
            raise ended from None
        while not wait([running], timeout=LOOP_CHECK_S).done:
            if self._loop.is_closed():
                raise ended
        try:
            return running.result()
        except CancelledError:
            raise ended from None


class Blocking(BlockingCalls):
    """`group.blocking`: the operations of `Group` with the same arguments, results and errors."""

    def __init__(self, communicator: Communicator, submit: Submit) -> None:
        super().__init__(communicator.fast_path, _TIMEOUT_NS_DEFAULT)
        self._communicator = communicator
        self._submit = submit

    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call."""
        self._communicator.fast_path_failed()

    def _all_reduce(
        self, x: Any, out: Any, op: str, algorithm: str, timeout: float | None, priority: int
    ) -> Any:
        limit_ns = _TIMEOUT_NS_DEFAULT if timeout is None else timeout_ns(timeout)
        done = (
            None
            if priority
            else self._fast_path.run_now(_ALL_REDUCE, x, out, op, algorithm, NO_ROOT, limit_ns)
        )
        if done is None:
            x, out = taken(x), taken(out)
            return self._run(
                limit_ns,
                lambda c, ns: c.all_reduce(x, out, op=op, algorithm=algorithm, deadline_ns=ns),
                priority,
            )
        return (x if out is None else out) if done else self._communicator.fast_path_failed()

    def all_reduce_many(
        self,
        arrays: Sequence[Any],
        *,
        op: str = "sum",
        algorithm: str = "auto",
        timeout: float | None = None,
        priority: int = 0,
    ) -> Sequence[Any]:
        """As `Group.all_reduce_many`."""
        given = [taken(x) for x in arrays]
        self._run(
            timeout_ns(timeout),
            lambda c, ns: c.all_reduce_many(given, op=op, algorithm=algorithm, deadline_ns=ns),
            priority,
        )
        return arrays

    def broadcast(self, x: Any, root: int, *, timeout: float | None = None, priority: int = 0) -> Any:
        """As `Group.broadcast`."""
        limit_ns = _TIMEOUT_NS_DEFAULT if timeout is None else timeout_ns(timeout)
        done = (
            None if priority else self._fast_path.run_now(_BROADCAST, x, None, "sum", "auto", root, limit_ns)
        )
        if done is None:
            x = taken(x)
            return self._run(limit_ns, lambda c, end_ns: c.broadcast(x, root, deadline_ns=end_ns), priority)
        return x if done else self._communicator.fast_path_failed()

    def barrier(self, *, timeout: float | None = None, priority: int = 0) -> None:
        """As `Group.barrier`."""
        limit_ns = _TIMEOUT_NS_DEFAULT if timeout is None else timeout_ns(timeout)
        done = (
            None
            if priority
            else self._fast_path.run_now(_BARRIER, None, None, "sum", "auto", NO_ROOT, limit_ns)
        )
        if done is None:
            self._run(limit_ns, lambda c, end_ns: c.barrier(deadline_ns=end_ns), priority)
        elif not done:
            self._communicator.fast_path_failed()

    def reduce(
        self,
        x: Any,
        root: int,
        *,
        out: Any = None,
        op: str = "sum",
        timeout: float | None = None,
        priority: int = 0,
    ) -> Any:
        """As `Group.reduce`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout), lambda c, end_ns: c.reduce(x, root, out, op=op, deadline_ns=end_ns), priority
        )

    def all_gather(self, x: Any, *, out: Any = None, timeout: float | None = None, priority: int = 0) -> Any:
        """As `Group.all_gather`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout), lambda c, end_ns: c.all_gather(x, out, deadline_ns=end_ns), priority
        )

    def gather(
        self, x: Any, root: int, *, out: Any = None, timeout: float | None = None, priority: int = 0
    ) -> Any:
        """As `Group.gather`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout), lambda c, end_ns: c.gather(x, root, out, deadline_ns=end_ns), priority
        )

    def scatter(
        self, x: Any, root: int, *, out: Any = None, timeout: float | None = None, priority: int = 0
    ) -> Any:
        """As `Group.scatter`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout), lambda c, end_ns: c.scatter(x, root, out, deadline_ns=end_ns), priority
        )

    def reduce_scatter(
        self, x: Any, *, out: Any = None, op: str = "sum", timeout: float | None = None, priority: int = 0
    ) -> Any:
        """As `Group.reduce_scatter`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout),
            lambda c, end_ns: c.reduce_scatter(x, out, op=op, deadline_ns=end_ns),
            priority,
        )

    def all_to_all(self, x: Any, *, out: Any = None, timeout: float | None = None, priority: int = 0) -> Any:
        """As `Group.all_to_all`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout), lambda c, end_ns: c.all_to_all(x, out, deadline_ns=end_ns), priority
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
    ) -> Any:
        """As `Group.all_to_all_v`."""
        x, out = taken(x), taken(out)
        return self._run(
            timeout_ns(timeout),
            lambda c, end_ns: c.all_to_all_v(x, send_rows, receive_rows, out, deadline_ns=end_ns),
            priority,
        )

    def _run(self, limit_ns: int, operation: Callable[[Communicator, int], Any], priority: int) -> Any:
        """Run an operation here, or on the group's thread if others wait there."""
        end_ns = now_ns() + limit_ns
        if self._fast_path.queued or priority:
            queued: Future[Any] = self._submit(lambda c: operation(c, end_ns), priority, end_ns)
            return given_back(queued.result())
        return given_back(operation(self._communicator, end_ns))
