"""Works and futures of `torch.distributed`.

Needs PyTorch; imported by `process_group` alone.
"""

from __future__ import annotations

import concurrent.futures
import importlib
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

from zbmd.collectives.errors import Desynchronised, MembersLost
from zbmd.collectives.group.group import Group
from zbmd.collectives.native._messages import Request
from zbmd.collectives.p2p.direct import DirectMessages
from zbmd.collectives.p2p.tagged import named
from zbmd.collectives.torch.continuity import BESIDE, CONTINUITY
from zbmd.collectives.torch.tensors import TensorBuffer
from zbmd.transport.errors import DeadlineExceeded, ZbmdError
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

COMPLETERS = 8
"""Threads that complete futures. A callback may wait for another future, so there is more than one."""

WAITS_MAX: Final = 4_096
"""The latest intervals that are kept."""

AGAIN: Final = "destroy the process groups, and initialise again"

DONE: Final[Future[Any]] = Future()
"""Of operations that are over when their works are made."""
DONE.set_result(None)


def in_call(error: ZbmdError, call: str) -> ZbmdError:
    """Return the error as one that names the call, and what to do, in PyTorch's terms."""
    if isinstance(error, MembersLost):
        return MembersLost(error.ranks, f"in {call}; {AGAIN}")
    if isinstance(error, DeadlineExceeded) and error.absent:
        why = f"waited for {named(error.absent)} until the timeout of the group or call"
        return DeadlineExceeded(f"{call}: {why}; {AGAIN}", absent=error.absent)
    if call not in str(error) and not isinstance(error, Desynchronised):
        error.add_note(f"in {call}")
    return error


def as_torch_error(error: BaseException) -> BaseException:
    """Return what torch's users expect: a `DistBackendError`, which is a `RuntimeError`, caused by ours."""
    if not isinstance(error, ZbmdError):
        return error
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    # Callers look for gloo's word in it.
    late = "Timed out in " if isinstance(error, DeadlineExceeded) else ""
    wrapped: BaseException = dist.DistBackendError(f"{type(error).__name__}: {late}{error}{notes}")
    wrapped.__cause__ = error
    if CONTINUITY.is_beside:
        setattr(wrapped, BESIDE, True)
    return wrapped


class WaitLog:
    """The intervals in which callers have waited for operations, since the last `take`; ns.

    C++ waits for futures where nothing here sees it: DDP does so at the end of a backward pass. From the call
    that asked for the last future until the last future is done counts as such an interval.
    """

    def __init__(self) -> None:
        self.is_on = False
        """Whether anyone takes them."""
        self._spans: deque[tuple[int, int]] = deque(maxlen=WAITS_MAX)
        self._asked_ns = self._answered_ns = 0

    def add(self, begin_ns: int) -> None:
        """A wait that began at `begin_ns` has ended."""
        self._spans.append((begin_ns, now_ns()))

    @contextmanager
    def waiting(self) -> Generator[None]:
        """The caller waits within the context."""
        begin_ns = now_ns()
        try:
            yield
        finally:
            if self.is_on:
                self.add(begin_ns)

    def asked(self) -> None:
        """A future has been asked for."""
        self._asked_ns = now_ns()

    def answered(self) -> None:
        """A future is done; from any thread."""
        self._answered_ns = now_ns()

    def take(self) -> list[tuple[int, int]]:
        """Return the intervals, in order and disjoint, and forget them."""
        spans = list(self._spans)
        self._spans.clear()
        if self._asked_ns:
            spans.append((self._asked_ns, self._answered_ns))
            self._asked_ns = 0
        found = list[tuple[int, int]]()
        end = 0
        for begin, until in sorted(spans):
            if until > max(begin, end):
                found.append((max(begin, end), until))
                end = until
        return found


WAITS: Final = WaitLog()
"""Of this process."""


class Waits:
    """The methods of `Work`. outputs: the tensors of its result. source: who sent, of a receive. begun_in:
    the group in whose fast path the operation flies, if it does: who asks for its end brings it about.
    """

    _devices: Sequence[Any] | None = None
    """Of its tensors, if they are not in host memory: a future takes those of no other."""

    def __init__(
        self,
        done: Future[Any],
        outputs: Sequence[Any],
        completers: ThreadPoolExecutor,
        source: Callable[[], int] | None = None,
        begun_in: Group | None = None,
    ) -> None:
        super().__init__()  # C++ needs it
        self._done, self._begun_in = done, begun_in
        # A work that is kept for C++ must keep no memory.
        self._outputs = [weakref.ref(tensor) for tensor in outputs]
        self._completers = completers
        self._source = source
        self._future: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done. timeout: no limit if it is 0 or less. Raises `DistBackendError`."""
        limit_s = timeout.total_seconds() if timeout is not None else 0.0
        begin_ns = now_ns() if WAITS.is_on and not self._done.done() else 0
        if self._begun_in is not None and not self._done.done():
            if limit_s > 0:
                self._hand_over()
            else:
                self._begun_in.communicator.fast_path.land()
        try:
            self._done.result(limit_s if limit_s > 0 else None)
        except concurrent.futures.TimeoutError:
            raise dist.DistBackendError(f"the operation is not done after {limit_s:g} s") from None
        except ZbmdError as error:
            raise as_torch_error(error) from error
        if begin_ns:
            WAITS.add(begin_ns)
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """As `wait`: a CPU has no streams."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, in either way."""
        if self._begun_in is not None and not self._done.done():
            self._begun_in.communicator.fast_path.land_now()
        return self._done.done()

    def _hand_over(self) -> None:
        """Have the group's thread wait for the end of an operation that flies."""
        if self._begun_in is not None:
            self._begun_in.submit(lambda c: c.fast_path.land())
            self._begun_in = None

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed() and self._done.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error that it failed with, if it has."""
        error = self._done.exception() if self._done.done() else None
        return None if error is None else as_torch_error(error)

    def result(self) -> list[Any]:
        """Return the tensors that it has written and that still exist."""
        return [tensor for tensor in (output() for output in self._outputs) if tensor is not None]

    def source_rank(self) -> int:
        """Return the rank in the group that sent, of a receive; else -1."""
        return -1 if self._source is None else self._source()

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a `torch.futures.Future` of the tensors; its callbacks run beside operations."""
        if self._future is not None:
            return self._future
        outputs, done = self.result(), self._done
        is_noted = WAITS.is_on
        if is_noted:
            WAITS.asked()

        def value(_: Any) -> list[Any]:
            error = done.exception()
            if error is not None:
                raise as_torch_error(error)
            return outputs

        base = torch.futures.Future(devices=self._devices)
        # `set_exception` would store an ordinary value, which C++ takes for a result.
        self._future = base.then(value)

        def completed(_: Future[Any]) -> None:
            if is_noted:
                WAITS.answered()
            try:
                self._completers.submit(base.set_result, None)
            except RuntimeError:  # the process group has been shut down
                base.set_result(None)

        done.add_done_callback(completed)
        if not done.done():
            self._hand_over()
        return self._future


class OverWaits(Waits):
    """The methods of `OVER`."""

    def __init__(self) -> None:
        super(Waits, self).__init__()  # C++ needs it
        self._done, self._outputs, self._source, self._begun_in = DONE, [], None, None
        self._future = torch.futures.Future()
        self._future.set_result([])

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return at once."""
        return True


class MessageWaits(Waits):
    """The methods of `MessageWork`: of a send or a receive that its caller's thread carries out.

    buffer: where a receive puts its message; it is brought home once that is there.
    """

    _buffer: TensorBuffer | None = None
    _future: Any = None
    _ended: Future[Any] | None = None

    def __init__(
        self,
        direct: DirectMessages,
        request: Request,
        completers: ThreadPoolExecutor,
        tensor: Any = None,
        buffer: TensorBuffer | None = None,
    ) -> None:
        super(Waits, self).__init__()  # C++ needs it
        self._direct, self._request, self._completers = direct, request, completers
        if buffer is not None:
            self._output = weakref.ref(tensor)
            self._buffer = buffer

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done. timeout: no limit if it is 0 or less. Raises `DistBackendError`."""
        request = self._request
        if not request.is_over or request.failure:
            limit_s = timeout.total_seconds() if timeout is not None else 0.0
            try:
                self._direct.wait(request, limit_s if limit_s > 0 else None)
            except TimeoutError:
                raise dist.DistBackendError(f"the operation is not done after {limit_s:g} s") from None
            except ZbmdError as error:
                raise as_torch_error(error) from error
        if self._buffer is not None:
            self._bring_home()
        return True

    def _bring_home(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None and not self._request.failure:
            buffer.bring_home()

    def is_completed(self) -> bool:
        """Return whether it has ended, in either way."""
        over = self._direct.is_over(self._request)
        if over:
            self._bring_home()
        return over

    def is_success(self) -> bool:
        """Return whether it has succeeded."""
        return self.is_completed() and not self._request.failure

    def exception(self) -> BaseException | None:
        """Return the error that it failed with, if it has."""
        if not self.is_completed() or not self._request.failure:
            return None
        return as_torch_error(self._direct.error_of(self._request))

    def source_rank(self) -> int:
        """Return the rank in the group that sent, of a receive; else -1."""
        return self._request.source

    _source_rank = source_rank

    def result(self) -> list[Any]:
        """Return the tensor that it has written, if it has and that still exists."""
        tensor = None if self._request.sends else self._output()
        return [] if tensor is None else [tensor]

    @property
    def _done(self) -> Future[Any]:  # type: ignore[override]
        """A future of its end; a thread of the group carries on with it."""
        done, request, direct = self._ended, self._request, self._direct
        if done is not None:
            return done
        done = self._ended = Future()

        def complete() -> None:
            if request.failure:
                done.set_exception(direct.error_of(request))
            else:
                self._bring_home()
                done.set_result(None)

        def over() -> None:
            try:
                self._completers.submit(complete)
            except RuntimeError:  # the process group has been shut down
                complete()

        request.when_over(over)
        return done

    def future(self) -> Future[Any]:
        """Return a future of its end."""
        return self._done


Work: Any = type("ZbmdWork", (Waits, dist.Work), {"__doc__": Waits.__doc__})
MessageWork: Any = type("ZbmdMessageWork", (MessageWaits, dist.Work), {"__doc__": MessageWaits.__doc__})
OVER: Final[Any] = type("ZbmdOver", (OverWaits, dist.Work), {"__doc__": OverWaits.__doc__})()
"""The work of every operation whose caller has waited for it, and asks for nothing more."""
