"""The turns of a communicator: one operation at a time, its flight record, and the end after an error."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np

from zbmd.collectives.algorithms.catalogue import ROOTED
from zbmd.collectives.communicator.pieces import PieceRunner, Side, sides_of
from zbmd.collectives.communicator.planning import MOVING, Call, Planner
from zbmd.collectives.device.arrays import DeviceArray
from zbmd.collectives.device.arrays_in import Array, Placed, Target, as_bytes
from zbmd.collectives.device.windows import DevicePaths, Members, connect
from zbmd.collectives.errors import Desynchronised, MembersLost, OperationAborted
from zbmd.collectives.execution.executor import Executor, a_core_each
from zbmd.collectives.execution.plan import Plan, Run
from zbmd.collectives.execution.remote_executor import RemoteExecutor
from zbmd.collectives.flight._flight import COMPLETE, FAILED
from zbmd.collectives.flight.recorder import FlightLog, FlightRecord
from zbmd.collectives.native._fast_path import FastPath, Turnstile
from zbmd.collectives.programs.program import IN, OUT, PUB
from zbmd.collectives.programs.reductions import REDUCTIONS
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.host.topology.kernel_files import clock_counts_ticks
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import address_of, now_ns

LABELS_KEPT: Final = 4
"""The last calls in their callers' words: a rank may learn late that an earlier one did not fit."""
NO_ROOT: Final = -1
"""The root of a call that has none, for the fast path."""
_FAST_PATH_BUFFERS = frozenset((OUT, PUB, IN))

Explain: TypeAlias = Callable[[ZbmdError, str, str], ZbmdError]
"""Takes the error of an operation, the text of the call, and why this rank ended the communicator, if it did;
returns an error that says what has happened."""
OnFlight: TypeAlias = Callable[[FlightRecord, Sequence[Array]], None]
"""Takes an operation as it begins, without results, and again as it ends, with them."""


class Turns:
    """Carries out the calls of one communicator, one at a time, in the order in which their threads came.

    The first call that fails ends the communicator. The fast path, which shares the turn and the flight
    recorder, learns each call that can be repeated as it was.
    """

    def __init__(self, executor: Executor, segment: Segment, planner: Planner, name: str) -> None:
        self._executor = executor
        self._planner = planner
        self._name = name
        self.turnstile = Turnstile()
        self.flight = FlightLog()
        self.pieces = PieceRunner(segment, executor, executor.place, self.flight.devices)
        self.on_flight: OnFlight | None = None
        self.on_fault: Callable[[str], object] | None = None
        self.explain: Explain | None = None
        self.labels: deque[Callable[[], str]] = deque(maxlen=LABELS_KEPT)
        self.fast_path = FastPath(
            executor.native,
            self.turnstile,
            self.flight.ring,
            arena_begin=segment.base + segment.nbytes - segment.arena.capacity_bytes,
            arena_end=segment.base + segment.nbytes,
            held=a_core_each(len(executor.members)),
            counts=clock_counts_ticks(),
        )
        self.fast_path.fail = self.fast_path_failed
        if isinstance(executor, RemoteExecutor):
            self.fast_path.far = executor.resume
        self.fast_path.open = not faults.armed()
        self._taught_inbox = executor.inbox
        self._ended = ""

    def end(self, reason: str) -> None:
        """Refuse every later call, for the first reason given; from any thread."""
        self._ended = self._ended or reason
        self.fast_path.open = False

    def forget(self) -> None:
        """Have the fast path forget what it learnt, and with it the memory that this keeps."""
        self.fast_path.forget()
        self._taught_inbox = self._executor.inbox

    def connect_devices(self, members: Members, x: Placed, deadline_ns: int) -> DevicePaths:
        """Have operations over arrays on devices go between these, from now on, if all members' can."""
        api = x.api if isinstance(x, DeviceArray) else None
        windows, found = connect(members, api, deadline_ns=deadline_ns)
        with self.turnstile:
            self.pieces.connected(windows)
        return found

    def perform(
        self,
        call: Call,
        source: Placed | None,
        target: Target[Any] | None,
        deadline_ns: int,
        x: Any = None,
        out: Any = None,
        *,
        blocks_in: int = 1,
        blocks_out: int = 1,
    ) -> None:
        """Carry out in turn a call that reads `source` and writes `target`, as bytes if it moves bytes.

        `x`, `out`: the arrays as the caller gave them.
        """
        plan, flat = self._planner.plan(call), None if target is None else target.flat
        if flat is not None and call.request.operation in MOVING:
            flat = as_bytes(flat, "out")
        sides = sides_of(plan, source, flat, blocks_in=blocks_in, blocks_out=blocks_out)
        self.perform_sides(call, plan, sides, deadline_ns, x, out)
        if target is not None:
            target.bring_home()

    def perform_sides(
        self, call: Call, plan: Plan, sides: Sequence[Side], deadline_ns: int, x: Any = None, out: Any = None
    ) -> None:
        """Carry out a call in turn. `x`, `out`: its arrays as the caller gave them."""
        with self.turnstile:
            self._perform(call, plan, sides, deadline_ns)
            if self.fast_path.open and self.pieces.single is not None:
                self._teach(call, x, out, self.pieces.single)

    def perform_in_turn(
        self, call: Call, source: Placed, flat: Placed, deadline_ns: int, *, blocks_out: int = 1
    ) -> None:
        """As `perform`, for a thread that has the turn; the fast path does not learn the call."""
        plan = self._planner.plan(call)
        self._perform(call, plan, sides_of(plan, source, flat, blocks_out=blocks_out), deadline_ns)

    def _perform(self, call: Call, plan: Plan, sides: Sequence[Side], deadline_ns: int) -> None:
        if self._ended:
            raise OperationAborted(f"an earlier call has ended this group: {self._ended}; make it again")
        ring, native = self.flight.ring, self._executor.native
        name = plan.request.operation.name.lower()
        native.meet_anew()
        ring.begin(
            ring.number(name, plan.request.algorithm), self._executor.sequence + 1, call.nbytes, now_ns()
        )
        if self.on_flight is not None:
            self.on_flight(self.flight[-1], ())
        try:
            self.pieces.run(call, plan, sides, deadline_ns)
        except BaseException as error:  # noqa: BLE001 (raised again)
            self._fail(name, error)
        else:
            if native.reads and plan.in_arena is not None:
                ring.renumber(ring.number(name, plan.in_arena.request.algorithm))
            if self.pieces.on_devices:
                ring.renumber(ring.number(name, "devices"))
                self.flight.devices.end(ring.begun - 1)
            ring.end(COMPLETE, native.met_ns, now_ns())
        finally:
            if self.on_flight is not None:
                results = [side.store for side in sides if isinstance(side.store, np.ndarray)]
                self.on_flight(self.flight[-1], results)

    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call, which still has the turn."""
        call = self.fast_path.failed
        if call is None:
            raise LocalProtocolError("no call of the fast path has failed")
        try:
            name = call.plan.request.operation.name.lower()
            self._fail(name, self._executor.error_of(self.fast_path.status, call.plan))
        finally:
            self.turnstile.__exit__(None, None, None)

    def give_up_desynchronised(self, what: str, calls: Sequence[str]) -> NoReturn:
        """End the communicator, in this thread's turn: the calls of the members do not fit."""
        executor = self._executor
        self.end(f"the ranks' calls do not fit: {what}")
        executor.give_up()
        call = (
            self.labels[-1]() if self.labels else f"operation #{executor.sequence} of epoch {executor.epoch}"
        )
        message = f"{call}: {what or 'the ranks asked for different things'}"
        error = Desynchronised(message, dict(zip(executor.members, calls, strict=True)), what)
        raised = error if self.explain is None else self.explain(error, call, "")
        self._ended = str(raised)
        try:
            raise raised
        finally:  # see `_fail`
            del error, raised

    def _fail(self, name: str, error: BaseException) -> NoReturn:
        """Raise what has failed the operation that has the turn."""
        explained = self._give_up(name, error)
        try:
            if explained is error:
                raise error
            raise explained from None
        finally:  # else this frame and the error would hold each other, and arrays of the arena
            del error, explained

    def _give_up(self, name: str, error: BaseException) -> BaseException:
        """The operation that has the turn has failed, and with it the communicator. Return why."""
        ended_here = self._ended
        self.fast_path.open = False
        if isinstance(error, MembersLost):
            self._executor.abort()  # the peers have their own notice, and it names the lost
        else:
            self._executor.give_up()  # whatever it was, they may wait for a part that will not come
        if self.explain is not None and isinstance(error, ZbmdError):
            number = f"#{self._executor.sequence} of {self._executor.title}"
            call = self.labels[-1]() if self.labels else f"{name} {number}"
            error = self.explain(error, call, ended_here)
        reason = str(error) or type(error).__name__
        self.flight.ring.end(FAILED, self._executor.native.met_ns, now_ns(), reason)
        self.end(f"{name} failed: {error}")
        if self.on_fault is not None and not isinstance(error, MembersLost | OperationAborted):
            self.on_fault(f"{name}: {reason}")
        return error

    def _teach(self, call: Call, x: Any, out: Any, run: Run) -> None:
        """Have the fast path take calls like this one from now on, if its arrays were used where they lie."""
        plan, executor = run.plan, self._executor
        if executor.far and not plan.eager:
            return
        if executor.inbox is not self._taught_inbox:
            if self._taught_inbox.nbytes:
                self.forget()  # what it learnt keeps the inbox that has been outgrown
            self._taught_inbox = executor.inbox
        if not all(_is_plain(array) for array in (x, out) if array is not None):
            return
        # What ran within one memory is another plan, or other buffers, than the same call on two.
        if x is not None and out is not None and np.may_share_memory(x, out):
            return
        places: dict[int, bool] = {}
        for buffer, address in run.addresses.items():
            if out is not None and address == address_of(out):
                places[buffer] = True
            elif x is not None and address == address_of(x):
                places[buffer] = False
            else:
                return
        if not _FAST_PATH_BUFFERS.issuperset(places):
            return
        name, numbers = plan.request.operation.name.lower(), self.flight.ring.number
        in_arena = plan if plan.in_arena is None else plan.in_arena
        self.fast_path.learn(
            run,
            x,
            out,
            op=REDUCTIONS[call.reduction],
            algorithm=call.request.algorithm,
            called_root=call.request.root if call.request.operation in ROOTED else NO_ROOT,
            places=places,
            memory=(executor.scratch, executor.inbox),
            addresses=executor.addresses,
            scratch=executor.scratch,
            nbytes=call.nbytes,
            flight=numbers(name, plan.request.algorithm),
            flight_read=numbers(name, in_arena.request.algorithm),
        )


def _is_plain(array: Any) -> bool:
    """Whether the fast path can look at such an array: a plain one, its elements one after the other."""
    return type(array) is np.ndarray and array.flags.c_contiguous and array.size > 0
