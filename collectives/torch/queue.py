"""The queue of a process group: its collectives in the order of their calls.

An operation that its caller waits for, with nothing queued before it, runs on the caller's thread; the others
on the group's data-plane thread. Needs PyTorch; imported by `process_group` alone.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.operations import TIMEOUT_S_MAX
from zbmd.collectives.device.staged_calls import Cut, DeviceLate
from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY, LOSSES
from zbmd.collectives.torch.cuda.calls import DeviceCall, DeviceWork
from zbmd.collectives.torch.flights import kept, label, like, profiled
from zbmd.collectives.torch.identity import Unmade
from zbmd.collectives.torch.messages import Messages
from zbmd.collectives.torch.reductions import Reduction, reduction_of
from zbmd.collectives.torch.stand_in import Alone
from zbmd.collectives.torch.tensors import Called, TensorBuffer
from zbmd.collectives.torch.work import COMPLETERS, DONE, OVER, WAITS, Work, in_call
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import ZbmdError
from zbmd.transport.native._native import now_ns

dist: Any = importlib.import_module("torch.distributed")

Operation = Callable[[Any, int], object]
"""Takes the communicator, or its stand-in, and the deadline, ns."""
Call = tuple[int, Any, Any, str, int]
"""A call as the fast path knows it: its operation, x, out, reduction and root."""
_NO_TIME = timedelta(0)
_REDUCE_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)


class Queue(Messages):
    """The methods of a process group that queue its operations, or carry them out at once."""

    def __init__(
        self, group: Group | Unmade, store: Any, timeout_s: float, name: str, ranks: Sequence[int] = ()
    ) -> None:
        super().__init__(group, store, timeout_s, name, ranks)
        self._together: list[Future[Any]] | None = None
        self.flights: deque[Called] = deque(maxlen=kept())
        self._completers = ThreadPoolExecutor(COMPLETERS, thread_name_prefix="zbmd-torch-done")
        self._closed = False

    def _queue(
        self,
        called: Called,
        operation: Operation,
        outputs: Sequence[Any],
        opts: Any,
        timeout: Any = None,
        *,
        reads: Sequence[TensorBuffer] = (),
        home: Sequence[TensorBuffer] = (),
        call: Call | None = None,
        cut: Cut | None = None,
        on: DeviceCall | None = None,
    ) -> Any:
        """Queue an operation, after which what came into the buffers of `home` is in their tensors.

        reads: the other buffers, and those of `home` that are read. call: what the fast path may begin
        instead. cut: see `CallStream.carry_out`; on: the call on a device, if its buffers do not say it.
        """
        if CONTINUITY.is_usual:
            self.device_calls.raise_failure()
        # A local one has a stream of its own: on that of the calls it would have the turn of one before it,
        # which is queued, and for whose end this thread's stream waits.
        on = on or self.device_calls.of(reads, home, cut, "calls" if CONTINUITY.is_usual else "local calls")
        if (
            on is None
            and call
            and CONTINUITY.is_usual
            and not called.terms
            and getattr(opts, "asyncOp", True)
        ):
            work = None if profiled() else self._begin_here(called, call, outputs, opts, timeout, home)
            if work is not None:
                return work
        self._number(called, opts, timeout)
        if CONTINUITY.is_alone:
            if on is not None:
                on.begin()
            try:
                self._alone(operation, home, on)
            finally:
                if on is not None:
                    on.end()
            CONTINUITY.answer(self._name, called.number, outputs)
            return self._work(DONE, outputs)
        self.flights.append(called)
        if not profiled():
            return self._begin(called, operation, outputs, opts, home, on)
        with label(called.name, [*like(called)]):
            return self._begin(called, operation, outputs, opts, home, on)

    def _number(self, called: Called, opts: Any, timeout: Any) -> None:
        called.limit_ns, called.called_ns = self._limit_ns(opts, timeout), now_ns()
        self._calls = called.number = self._calls + 1
        called.place = self.title

    def _begin(
        self,
        called: Called,
        operation: Operation,
        outputs: Sequence[Any],
        opts: Any,
        home: Sequence[TensorBuffer],
        on: DeviceCall | None,
    ) -> Any:
        end_ns, epoch = called.called_ns + called.limit_ns, self._group.epoch
        forgive = CONTINUITY.keep(outputs)

        def carry_out(c: Communicator) -> None:
            c.label(called.text)
            called.began_ns = now_ns()
            try:
                if called.terms:
                    c.agree_on(called.terms, deadline_ns=end_ns)
                if on is None:
                    operation(c, end_ns)
                else:
                    on.carry_out(lambda: _piece(c, called, operation, end_ns), end_ns, c)
            except ZbmdError as error:
                self._note(error, epoch)
                if isinstance(error, CudaFault | DeviceLate):  # the others wait for this rank's part
                    self._group.give_up(f"failed: {error}")
                with _on_stream(on):
                    forgiven = forgive is not None and forgive(error, epoch)
                if not forgiven:
                    raise in_call(error, called.text()) from None
                self._alone(operation, (), on)
            with _on_stream(on):
                self._ended(called, outputs, home)

        if on is None:
            return self._begun(carry_out, outputs, opts, end_ns)
        on.begin()
        return self._begun_on(on, carry_out, outputs, opts, end_ns)

    def _begun(
        self, run: Callable[[Communicator], object], outputs: Sequence[Any], opts: Any, end_ns: int
    ) -> Any:
        if self._may_run_here(opts):
            begin_ns = now_ns() if WAITS.is_on else 0
            run(self._group.communicator)
            if begin_ns:
                WAITS.add(begin_ns)
            return OVER
        return self._work(self._group.submit(run, patience_s=(end_ns - now_ns()) / 1e9), outputs)

    def _begun_on(
        self,
        on: DeviceCall,
        run: Callable[[Communicator], object],
        outputs: Sequence[Any],
        opts: Any,
        end_ns: int,
    ) -> Any:
        def ended(c: Communicator) -> None:
            failure: BaseException | None = None
            try:
                run(c)
            except BaseException as error:
                failure = error
                raise
            finally:
                on.end(failure)

        if self._may_run_here(opts) and not on.waits_on_stream:
            ended(self._group.communicator)
            return OVER
        try:
            done = self._group.submit(ended, patience_s=(end_ns - now_ns()) / 1e9)
        except BaseException:
            on.end()
            raise
        return self._keep(DeviceWork(done, outputs, self._completers, on), done)

    def _note(self, error: ZbmdError, epoch: int) -> None:
        CONTINUITY.note(error, epoch)
        if self.companions is not None and isinstance(error, LOSSES):
            self.companions.lost(error, epoch)

    def _ended(self, called: Called, outputs: Sequence[Any], home: Sequence[TensorBuffer]) -> None:
        for buffer in home:
            buffer.bring_home()
        called.ended_ns = now_ns()
        CONTINUITY.record(self._name, called.number, outputs)

    def _alone(
        self, operation: Operation, home: Sequence[TensorBuffer] = (), on: DeviceCall | None = None
    ) -> None:
        """Carry an operation out without the others."""
        alone = Alone(self.rank(), self.size())
        if on is None:
            operation(alone, 0)
        else:
            on.carry_out(lambda: operation(alone, 0))
        for buffer in home:
            buffer.bring_home()

    def _begin_here(
        self,
        called: Called,
        call: Call,
        outputs: Sequence[Any],
        opts: Any,
        timeout: Any,
        home: Sequence[TensorBuffer] = (),
    ) -> Any:
        """Begin a small operation that has been made before on this thread; None: it is to be queued.

        The thread that waits for it ends it.
        """
        if not self._is_first():
            return None
        done, epoch = Future[Any](), self._group.epoch

        def landed(error: BaseException | None) -> None:
            _ = call  # whose arrays it reads and writes until now
            if error is None:
                self._ended(called, outputs, home)
                done.set_result(None)
                return
            if isinstance(error, ZbmdError):
                self._note(error, epoch)
                error = in_call(error, called.text())
            done.set_exception(error)

        self._number(called, opts, timeout)
        called.began_ns = called.called_ns
        if not self._group.communicator.begin(call, called.limit_ns, called.text, landed):
            self._calls -= 1
            return None
        self.flights.append(called)
        work = Work(done, outputs, self._completers, None, self._group)
        self._kept.append(work)
        return work

    def _may_run_here(self, opts: Any) -> bool:
        """Whether the caller waits for the operation that it asks for, and none is queued before it."""
        return not getattr(opts, "asyncOp", True) and self._is_first()

    def _is_first(self) -> bool:
        return self._together is None and not self._group.communicator.fast_path.queued

    def _limit_ns(self, opts: Any, timeout: Any) -> int:
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        if given is None or given <= _NO_TIME:
            return self._timeout_ns
        return int(min(given.total_seconds(), TIMEOUT_S_MAX) * 1e9)

    def _op(self, opts: Any, op: Any) -> Reduction:
        if op is None and isinstance(opts, _REDUCE_OPS):
            op = opts  # given by position
        if op is None:
            op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return reduction_of(op)

    def _root(self, opts: Any, root: int | None) -> int:
        return self._rank(opts.rootRank if root is None else root)

    def _start_coalescing(self, device: Any) -> None:
        backend = self._get_backend(device)
        if backend is not self:
            backend._start_coalescing()
            return
        self._together = []

    def _end_coalescing(self, device: Any) -> Any:
        backend = self._get_backend(device)
        if backend is not self:
            return backend._end_coalescing()
        together, self._together = self._together or [], None

        def all_done() -> None:
            for done in together:
                done.result()

        return Work(self._completers.submit(all_done), [], self._completers)


def _piece(c: Communicator, called: Called, operation: Operation, end_ns: int) -> None:
    c.label(called.text)
    operation(c, end_ns)


def _on_stream(on: DeviceCall | None) -> AbstractContextManager[object]:
    return nullcontext() if on is None else on.on_stream()
