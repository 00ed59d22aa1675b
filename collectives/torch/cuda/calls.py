"""Calls of process groups with tensors on a device: their order with streams, and their works.

A call comes after the work that its caller's current stream has then. Once its `Work` has been waited for,
the results are there for every stream. Needs PyTorch.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, TypeVar

import numpy as np

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.device.arrays import DeviceArray
from zbmd.collectives.device.staged_calls import CallStream, Cut, Gate
from zbmd.collectives.torch.cuda.devices import SEAM, DeviceBuffer, DeviceState, devices_of
from zbmd.collectives.torch.tensors import Array, TensorBuffer
from zbmd.collectives.torch.work import Waits
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

ARRIVALS: Final = 32
"""Threads and streams for messages that have come, at most."""
ResultT = TypeVar("ResultT")
WAIT_ON_STREAM: Final = "ZBMD_WAIT_ON_STREAM"
"""The variable by which `wait` blocks the current stream instead of its thread."""
DEVICE_PATHS: Final = "ZBMD_DEVICE_PATHS"
"""The variable that, as 0, has all tensors pass through the host."""


class DeviceCalls:
    """Those of one process group. streams: made when they are first needed, one for each kind of thread."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, int], CallStream] = {}
        self.index: int | None = None
        """The device of its tensors; None before the first."""
        self.failure: BaseException | None = None
        """The error of a call for which a stream, and so nobody, waited: the next calls raise it."""
        self.waits_on_stream = os.environ.get(WAIT_ON_STREAM) == "1"
        self._may_connect = os.environ.get(DEVICE_PATHS) != "0"
        self._connected: tuple[Communicator, bool] | None = None

    def connects(self, c: Communicator, buffer: DeviceBuffer, end_ns: int) -> bool:
        """Whether the members' devices read each other's memory: they try it with the first such call."""
        if not self._may_connect:
            return False
        if self._connected is None or self._connected[0] is not c:
            state = SEAM.state(buffer.index)
            x = DeviceArray(state.api, buffer.address, (buffer.size,), buffer.dtype, owner=None, stream=0)
            self._connected = c, c.connect_devices(x, deadline_ns=end_ns).direct
        return self._connected[1]

    def of(
        self,
        reads: Sequence[TensorBuffer],
        writes: Sequence[TensorBuffer],
        cut: Cut | None,
        role: str = "calls",
    ) -> DeviceCall | None:
        """Return that of a call with these buffers; None if they are on the host. Raises `UserError`."""
        buffers = devices_of([*reads, *(buffer for buffer in writes if buffer not in reads)])
        if not buffers:
            return None
        for buffer in buffers:
            buffer.stores = buffer in writes
        return DeviceCall(self, SEAM.state(buffers[0].index), buffers, cut, role)

    def at(self, index: int) -> DeviceCall:
        """Return a call without buffers that comes after the current stream's work on a device."""
        return DeviceCall(self, SEAM.state(index), (), None, "calls")

    def ordered(self) -> DeviceCall | None:
        """As `at`, on the device of the group's tensors, for a thread that waits; None if it has had none."""
        if self.index is None:
            return None
        call = self.at(self.index)
        call.waits_on_stream = False
        return call

    def stream(self, state: DeviceState, role: str) -> CallStream:
        """Return the stream of the copies of calls in this role."""
        key = role, state.index
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = state.new_stream()
            self.index = state.index
        return found

    def raise_failure(self) -> None:
        """Raise the error that nobody has got: until the group is made again, but for a bad argument."""
        failure = self.failure
        if isinstance(failure, UserError):
            self.failure = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Give all back, when nothing is under way."""
        while self._streams:
            self._streams.popitem()[1].close()


class DeviceCall:
    """One call. `begin` on its caller's thread, then `carry_out` on any, then `end`, however it went."""

    def __init__(
        self,
        calls: DeviceCalls,
        state: DeviceState,
        buffers: tuple[DeviceBuffer, ...],
        cut: Cut | None,
        role: str,
    ) -> None:
        self._calls, self._state, self._buffers, self._cut = calls, state, buffers, cut
        self._stream = calls.stream(state, role)
        self._after = 0
        self.gate: Gate | None = None
        self.waits_on_stream = calls.waits_on_stream
        """Whether `wait` is to block the current stream alone."""
        self._error: BaseException | None = None
        self.of_futures = SEAM.devices.of_futures(state.index)

    def begin(self) -> None:
        """Come after what the current stream has until now. Raises `CudaFault`."""
        self._after = self._stream.recorded(SEAM.devices.stream(self._state.index))
        self.gate = self._state.gates.take()

    def carry_out(
        self, operation: Callable[[], object], end_ns: int = 0, c: Communicator | None = None
    ) -> None:
        """Carry the operation out over memory of the host; see `CallStream.carry_out`.

        c: what the operation calls; where the members' devices reach each other it takes the tensors there.
        """
        after, self._after = self._after, 0
        if not after:  # again, by this rank alone, after what it did with the others has failed
            after = self._stream.recorded(self._stream.handle)
        try:
            between = c is not None and self._goes_between_devices(c, end_ns)
        except BaseException:
            self._stream.drop(after)
            raise
        with self.on_stream():
            if between:
                self._stream.pass_on(self._buffers, after, operation, self._ask_home)
            else:
                self._stream.carry_out(
                    self._buffers, after, operation, self._ask_home, cut=self._cut, end_ns=end_ns
                )

    def _goes_between_devices(self, c: Communicator, end_ns: int) -> bool:
        if self._cut is None or not self._cut.as_placed or not all(each.size for each in self._buffers):
            return False
        return self._calls.connects(c, self._buffers[0], end_ns)

    def on_stream(self) -> AbstractContextManager[object]:
        """Meanwhile this thread's work on the device is that of the call, behind its copies."""
        return SEAM.devices.on_stream(self._state.index, self._stream.handle)

    def settle(self) -> None:
        """Return once what was asked `on_stream` is done. Raises `CudaFault`."""
        self._stream.api.stream_synchronize(self._stream.handle)

    def _ask_home(self) -> None:
        for buffer in self._buffers:
            if buffer.stores:
                buffer.ask_home()

    def end(self, error: BaseException | None = None) -> None:
        """Let streams go on. error: what it failed with."""
        if self._after:
            self._stream.drop(self._after)
            self._after = 0
        self._error = error
        if self.gate is not None:
            self._report()
            self.gate.open()

    def _report(self) -> None:
        """Keep an error for the next call if a stream waits: its wait tells nobody."""
        if self._error is not None and self.gate is not None and self.gate.is_waited_for:
            self._calls.failure = self._error

    def hold(self) -> bool:
        """Have the current stream wait for the end; False if it cannot, so the thread has to."""
        if self.gate is None:
            return False
        self.gate.hold(SEAM.devices.stream(self._state.index))
        self._report()  # it may have failed meanwhile
        return True


class DeviceMessages:
    """Sends and receives of a process group with tensors on a device, beside its collectives.

    A send leaves when the stream that makes its tensor has got there: a thread for each destination waits for
    that, so messages to one rank stay in order, and those to others pass.
    """

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls
        self._departures: dict[int, ThreadPoolExecutor] = {}
        self._arrivals: ThreadPoolExecutor | None = None
        self._receives = 0

    def send(
        self, buffer: DeviceBuffer, to: int, send: Callable[[Array], Future[Any]]
    ) -> tuple[DeviceCall, Future[Any]]:
        """Have `send` called with the tensor's elements, and return the end of all that."""
        on = self._calls.of([buffer], [], None, f"send {to}")
        assert on is not None, "its tensor is on a device"
        call, done = on, Future[Any]()
        departures = self._departures.get(to)
        if departures is None:
            departures = ThreadPoolExecutor(1, thread_name_prefix=f"zbmd-torch-send-{to}")
            self._departures[to] = departures
        call.begin()

        def depart() -> None:
            found: list[Array] = []
            try:
                call.carry_out(lambda: found.append(buffer.array.copy()))
                send(found[0]).add_done_callback(lambda sent: _end(call, done, sent))
            except BaseException as error:  # noqa: BLE001 - whoever waits for the work gets it
                _fail(call, done, error)

        departures.submit(depart)
        return call, done

    def receive(
        self, buffer: DeviceBuffer, receive: Callable[[Array], Future[int]]
    ) -> tuple[DeviceCall, Future[int]]:
        """Call `receive` with memory for the tensor's elements, and return the end of all that."""
        self._receives += 1
        on = self._calls.of([], [buffer], None, f"receive {self._receives % ARRIVALS}")
        assert on is not None, "its tensor is on a device"
        call, done = on, Future[int]()
        arrivals = self._arrivals = self._arrivals or ThreadPoolExecutor(
            ARRIVALS, thread_name_prefix="zbmd-torch-receive"
        )
        call.begin()
        array = np.empty(buffer.size, buffer.dtype)

        def arrive(received: Future[int]) -> None:
            try:
                received.result()
                call.carry_out(lambda: np.copyto(buffer.array, array))
            except BaseException as error:  # noqa: BLE001 - whoever waits for the work gets it
                _fail(call, done, error)
            else:
                _end(call, done, received)

        def came(received: Future[int]) -> None:
            try:
                arrivals.submit(arrive, received)
            except RuntimeError as error:  # the process group has been shut down
                _fail(call, done, error)

        receive(array).add_done_callback(came)
        return call, done

    def close(self) -> None:
        """End its threads, when the group has ended."""
        for each in (*self._departures.values(), *([self._arrivals] if self._arrivals else [])):
            each.shutdown()


def chained(first: Future[Any], then: Callable[[Any], ResultT]) -> Future[ResultT]:
    """Return a future of what `then` makes of another's result."""
    made = Future[ResultT]()

    def over(ended: Future[Any]) -> None:
        error = ended.exception()
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(then(ended.result()))

    first.add_done_callback(over)
    return made


def _end(call: DeviceCall, done: Future[Any], ended: Future[Any]) -> None:
    error = ended.exception()
    if error is not None:
        _fail(call, done, error)
    else:
        call.end()
        done.set_result(ended.result())


def _fail(call: DeviceCall, done: Future[Any], error: BaseException) -> None:
    call.end(error)
    done.set_exception(error)


class DeviceWaits(Waits):
    """The methods of `DeviceWork`: of a call with tensors on a device."""

    def __init__(
        self,
        done: Future[Any],
        outputs: Sequence[Any],
        completers: ThreadPoolExecutor,
        call: DeviceCall,
        source: Callable[[], int] | None = None,
    ) -> None:
        super().__init__(done, outputs, completers, source)
        self._call = call
        self._devices = call.of_futures

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once it is done; with ZBMD_WAIT_ON_STREAM=1 only the current stream waits.

        timeout: with one, this thread waits, so long at most. Raises `DistBackendError`.
        """
        limited = timeout is not None and timeout.total_seconds() > 0
        if self._call.waits_on_stream and not limited and not self._done.done() and self._call.hold():
            return True
        return super().wait(timeout)

    def block_current_stream(self) -> None:
        """Have the current stream wait until it is done, and return at once.

        If it fails, the stream goes on, and the next call of the group raises the error. Where the device
        cannot wait so, this thread waits.
        """
        if self._done.done() or not self._call.hold():
            super().wait()


DeviceWork: Any = type("ZbmdDeviceWork", (DeviceWaits, dist.Work), {"__doc__": DeviceWaits.__doc__})
