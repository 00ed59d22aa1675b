"""Sampled steps: the time of each op and of each collective, with bytes and FLOPs.

Of the engine's ops, the forward time is that since the one before it was recorded; the backward time that of
its rule, without the rules and the hooks that run within it. Gradients of parameters that its rule leaves for
later, as schedules of pipelines do, are a row of their own. Calls of one op with equal shapes are one row. On
a CPU a call returns when its result is there, so the time in which it is enqueued is the time in which it
runs. On a device both are known: the host's clock says how long it takes to ask for an op, and CUDA events
how long that runs (`training.ops.cuda.timing`); own times are those without what is nested, on either clock.
PyTorch's ops come from `training.torch.durable.operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, TypeVar

import numpy as np

from zbmd.collectives.flight._flight import COMPLETE
from zbmd.collectives.flight.recorder import FlightLog
from zbmd.training.autograd._spans import SpanRecorder
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import Kernel
from zbmd.training.autograd.tape import Backward, Parameter, Tensor
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.timing import StepTimes, Timer
from zbmd.training.profiler.lines import OPS_MAX, OpRow
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
WEIGHTS: Final = "weights"
"""Gradients of parameters that a backward pass has left for later."""
WORK: Final = "work"
"""Outside the passes: the update, the norm."""
COLLECTIVE: Final = "collective"
COPY: Final = "copy"
"""Between host and device, on whatever stream."""

NAMES: Final = {
    "_attention_by_kernel": "causal_attention",
    "_whole": "causal_attention",
    "_cross_entropy_by_kernel": "cross_entropy",
    "_squared_relu": "squared_relu",
    "_gelu": "gelu",
    "_kept": "vocabulary_embedding",
    "Tape.checkpoint": "checkpoint",
}
"""Of functions that record an op under another name than its own."""
PRODUCTS: Final = frozenset({"linear", "tied_linear"})
"""Ops that multiply matrices: once forwards, twice backwards."""

EVERY_MAX: Final = 1_000_000_000
EVERY_VARIABLE: Final = "ZBMD_TRAIN_PROFILE_OPS"
"""Says for any job which of its steps are sampled, unless the job does."""

Key = tuple[str, str, str, str]
"""Op, pass, shape, dtype."""


def parse_ops_every(text: str) -> int:
    """Return the steps from one that is sampled to the next; 0 for `off`. Raises `UserError`."""
    number = text.removeprefix("every=")
    if text == "off" or number == "0":
        return 0
    if not number.isdecimal() or len(number) > 10 or not 0 < int(number) <= EVERY_MAX:
        raise UserError(f"expected off or every=N, N up to {EVERY_MAX:,}, got {text!r}")
    return int(number)


class OpSum:
    """A row in the making. nbytes, flops: of a call; title: of its spans; enqueue_ns: by the host's clock."""

    __slots__ = ("calls", "enqueue_ns", "execute_ns", "flops", "key", "nbytes", "title")

    def __init__(self, key: Key, nbytes: int, flops: int) -> None:
        self.key, self.nbytes, self.flops = key, nbytes, flops
        self.title = f"{key[0]} {key[1]}"
        self.clear()

    def clear(self) -> None:
        self.calls = self.execute_ns = self.enqueue_ns = 0

    def row(self) -> OpRow:
        return OpRow(
            *(*self.key, self.calls, self.execute_ns, 0),
            *(self.calls * self.nbytes, self.calls * self.flops, self.enqueue_ns),
        )


RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Timed(Generic[RowT]):
    """A call on the stream that computes, between two marks. row: None of what counts for no op."""

    row: RowT | None
    begin: int
    end: int


class _Known:
    """An op of some shapes: its rows, and the code of its rule, whose identity is in use while it is kept."""

    __slots__ = ("back", "code", "forward", "weights")

    def __init__(self, code: object, forward: OpSum, back: OpSum, weights: OpSum) -> None:
        self.code, self.forward, self.back, self.weights = code, forward, back, weights


class OpSampler:
    """The watch of one rank's sampled steps: see `zbmd.training.autograd.op_watch`. For one thread.

    What an op is, is found out at its first call with these shapes: later ones take 2 µs, and as much for
    the rule. Ops of more than `OPS_MAX` kinds share a row. timer: of the device that computes, if one does.
    """

    def __init__(self, recorder: SpanRecorder, timer: Timer | None = None) -> None:
        self._recorder, self._timer = recorder, timer
        self._times: StepTimes | None = None
        """Of the step under way, or of the last one until its rows are asked for."""
        self._timed_calls: list[Timed[OpSum]] = []
        self._began = 0
        """The mark of `begin`."""
        self._of_groups: list[OpRow] = []
        self._known: dict[object, _Known] = {}
        self._work: dict[Key, OpSum] = {}
        self._rest = OpSum(("others", WORK, "", ""), 0, 0)
        self._began_ns = self._inner_ns = 0
        self.generation = 0
        """Of its rows: whoever keeps some from step to step asks for them again in another one."""
        self._flights: list[tuple[FlightLog, int]] = []
        self._playing: tuple[OpSum, int] | None = None
        """Of the rule that runs: the row of what it leaves for later, and its unit."""

    def start(self, flights: Sequence[FlightLog]) -> None:
        """Begin a step, with the operations that groups begin from now on.

        Rows are kept from step to step, and made again once there were too many: shapes may change each step.
        """
        if self._is_full:
            self._known.clear()
            self._work.clear()
            self.generation += 1
        for one in self._sums():
            one.clear()
        self._flights = [(flight, flight.ring.begun) for flight in flights]
        for flight in flights:
            flight.devices.start()
        self._timed_calls.clear()
        self._times = None if self._timer is None else self._timer.begin()

    def end(self) -> None:
        """End the step: nothing that happens from now on is part of its rows, but copies that it began."""
        self._of_groups, self._flights = _collectives(self._flights), []
        if self._timer is not None:
            self._timer.end()

    @property
    def is_done(self) -> bool:
        """Whether `rows` needs not wait for a device."""
        return self._times is None or self._times.is_done

    def mark(self) -> int:
        """Note what the device was asked for so far; return a number, -1 if no device is timed."""
        return self._mark()

    def called(self, one: OpSum, began_ns: int, end_ns: int, begin: int) -> None:
        """Add a call of another library. begin: the `mark` before it, -1 of a call on the host."""
        self.add(one, -1, began_ns, end_ns, end_ns - began_ns)
        if begin >= 0:
            self._note(one, begin)
        elif self._times is not None:
            one.execute_ns += end_ns - began_ns

    def _mark(self) -> int:
        return -1 if self._times is None else self._times.mark()

    def _note(self, one: OpSum | None, begin: int) -> None:
        """Note a call on the device from the mark `begin` to here. one: its row, None of what is none's."""
        if self._times is not None:
            self._timed_calls.append(Timed(one, begin, self._times.mark()))

    def _sums(self) -> list[OpSum]:
        of_ops = [one for op in self._known.values() for one in (op.forward, op.back, op.weights)]
        return [*of_ops, *self._work.values(), self._rest]

    @property
    def _is_full(self) -> bool:
        return 3 * len(self._known) + len(self._work) >= OPS_MAX - 3  # an op of a tape has three rows

    def found(self, key: Key, *, nbytes: int, flops: int) -> OpSum:
        """Return the row of an op that no tape records, or the one that ops beyond `OPS_MAX` share."""
        known = self._work.get(key)
        if known is None:
            known = OpSum(key, nbytes, flops)
            if self._is_full:
                return self._rest
            self._work[key] = known
        return known

    def begin(self) -> None:
        """See `OpWatch`."""
        self._began, self._began_ns = self._mark(), now_ns()

    def computed(
        self, unit: int, data: Array, backward: Backward, parameters: Sequence[Parameter]
    ) -> Backward:
        """See `OpWatch`."""
        end_ns = now_ns()
        code = getattr(backward, "__code__", backward)
        weight = parameters[0].stored.shape if parameters else None
        defers = bool(parameters) and parameters[0].deferred is not None
        shapes = (id(code), data.shape, data.dtype.num, weight, defers)
        known = self._known.get(shapes)
        if known is None:
            known = self._learnt(shapes, code, data, backward, parameters)
        for parameter in parameters:
            hook = parameter.on_ready
            if hook is not None and type(hook) is not _Hook:
                parameter.on_ready = _Hook(self, hook)
        began_ns, back = self._began_ns, known.back
        self._note(known.forward, self._began)
        self.add(known.forward, unit, began_ns, end_ns, end_ns - began_ns)
        self._inner_ns += end_ns - began_ns  # of a rule that computes ops again

        def timed(dy: Array) -> None:
            outer, self._playing = self._playing, (known.weights, unit)
            try:
                self._timed(back, unit, lambda: backward(dy))
            finally:
                self._playing = outer

        return timed

    def _learnt(
        self, shapes: object, code: object, data: Array, backward: Backward, parameters: Sequence[Parameter]
    ) -> _Known:
        if self._is_full:
            return _Known(code, self._rest, self._rest, self._rest)
        op, inputs = name_of(backward, parameters), captured(backward)
        shape, dtype = shape_of(data, parameters), str(data.dtype)
        read = sum(nbytes_of(one) for one in inputs.values())
        written = sum(nbytes_of(one) for one in inputs.values() if isinstance(one, Tensor | Parameter))
        ahead, back = flops_of(op, data, parameters, inputs)
        later = back // 2 if op in PRODUCTS and parameters and parameters[0].deferred is not None else 0
        known = self._known[shapes] = _Known(
            code,
            OpSum((op, FORWARD, shape, dtype), read + data.nbytes, ahead),
            OpSum((op, BACKWARD, shape, dtype), read + data.nbytes + written, back - later),
            OpSum((op, WEIGHTS, shape, dtype), read + data.nbytes, later),
        )
        return known

    def deferred(self, compute: Callable[[], None]) -> Callable[[], None]:
        """See `OpWatch`."""
        playing = self._playing
        if playing is None:
            return compute
        return partial(self._timed, *playing, compute)

    def _timed(self, row: OpSum, unit: int, compute: Callable[[], None]) -> None:
        with self._within(row, unit):
            compute()

    def work(self, op: str, arrays: Sequence[Array]) -> AbstractContextManager[None]:
        """See `OpWatch`."""
        size, dtype = max((array.size for array in arrays), default=0), str(arrays[0].dtype) if arrays else ""
        nbytes = sum(array.nbytes for array in arrays)
        return self._within(self.found((op, WORK, str(size), dtype), nbytes=nbytes, flops=0), -1)

    def kernel(self, one: Kernel) -> AbstractContextManager[None]:
        """See `OpWatch`."""
        key = (one.op, one.which, one.shape, one.dtype)
        return self._within(self.found(key, nbytes=one.nbytes, flops=one.flops), one.unit)

    @contextmanager
    def _within(self, row: OpSum, unit: int) -> Generator[None]:
        """Time the block; the time without that of what is timed within it is the row's."""
        outer_ns, self._inner_ns = self._inner_ns, 0
        begin, began_ns = self._mark(), now_ns()
        try:
            yield
        finally:
            took_ns = now_ns() - began_ns
            self._note(row, begin)
            self.add(row, unit, began_ns, began_ns + took_ns, took_ns - self._inner_ns)
            self._inner_ns = outer_ns + took_ns

    def add(self, one: OpSum, unit: int, began_ns: int, end_ns: int, own_ns: int) -> None:
        recorder = self._recorder
        recorder.op(one.title, unit if unit < recorder.units else -1, began_ns, end_ns, own_ns)
        one.calls += 1
        one.enqueue_ns += own_ns
        if self._times is None:
            one.execute_ns += own_ns

    def rows(self) -> tuple[OpRow, ...]:
        """Return the rows of the step, by time: those of ops, and of operations that have ended.

        Waits for the device if it is not `is_done`. Raises `CudaFault`.
        """
        if self._times is not None:
            self._take_times(self._times)
            self._times = None
        merged: dict[Key, OpRow] = {}
        for one in self._sums():
            if one.calls:
                _merge(merged, one.row())
        for row in self._of_groups:
            _merge(merged, row)
        return tuple(sorted(merged.values(), key=lambda row: -row.execute_ns)[:OPS_MAX])

    def _take_times(self, times: StepTimes) -> None:
        """Add up what ran how long on the device: calls, and copies between it and the host."""
        at_ns, calls = times.read(), self._timed_calls
        for copy in times.copies:
            key = (copy.op, COPY, f"{copy.nbytes} B", "")
            row = self.found(key, nbytes=copy.nbytes, flops=0)
            row.calls += 1
            if copy.in_order:
                calls.append(Timed(row, copy.begin, copy.end))
            else:
                row.execute_ns += at_ns[copy.end] - at_ns[copy.begin]
        for row, ns in own_times(calls, at_ns):
            row.execute_ns += ns
        if times.is_full:  # ops from the last event on have no times, but together
            self._rest.calls += 1
            last_ns = max((at_ns[call.end] for call in calls), default=0)
            self._rest.execute_ns += max(0, at_ns[-1] - last_ns)


def _merge(into: dict[Key, OpRow], row: OpRow) -> None:
    key = row.op, row.which, row.shape, row.dtype
    known = into.get(key)
    into[key] = row if known is None else _sum_of(known, row)


def _sum_of(one: OpRow, other: OpRow) -> OpRow:
    """Return the row of two ops with the same name and shapes."""
    return OpRow(
        *(one.op, one.which, one.shape, one.dtype),
        one.calls + other.calls,
        one.execute_ns + other.execute_ns,
        one.wait_ns + other.wait_ns,
        one.nbytes + other.nbytes,
        one.flops + other.flops,
        one.enqueue_ns + other.enqueue_ns,
    )


def own_times(calls: Iterable[Timed[RowT]], at_ns: Sequence[int]) -> Iterator[tuple[RowT, int]]:
    """Yield the time of each call of one stream without what is nested in it. at_ns: of the marks."""
    under_way: list[tuple[Timed[RowT], list[int]]] = []

    def ended(before: int) -> Iterator[tuple[RowT, int]]:
        while under_way and under_way[-1][0].end <= before:
            one, inner = under_way.pop()
            if one.row is not None:
                yield one.row, max(0, at_ns[one.end] - at_ns[one.begin] - sum(inner))

    for call in sorted(calls, key=lambda call: (call.begin, -call.end)):
        yield from ended(call.begin)
        if under_way:  # another thread's copy may end after the op that it began in
            outer, inner = under_way[-1]
            inner.append(at_ns[min(call.end, outer.end)] - at_ns[call.begin])
        under_way.append((call, []))
    yield from ended(len(at_ns))


class _Hook:
    """The hook of a parameter, whose time counts for no op."""

    __slots__ = ("_hook", "_sampler")

    def __init__(self, sampler: OpSampler, hook: Callable[[int], None]) -> None:
        self._sampler, self._hook = sampler, hook

    def __call__(self, index: int) -> None:
        sampler = self._sampler
        begin, began_ns = sampler._mark(), now_ns()
        self._hook(index)
        sampler._inner_ns += now_ns() - began_ns
        sampler._note(None, begin)


def _collectives(flights: Sequence[tuple[FlightLog, int]]) -> list[OpRow]:
    """Return the rows of operations, and of copies that those between host and device made of their own.

    One between devices runs as long as these work for it; all else of its time is a wait for other ranks.
    """
    sums: dict[tuple[str, str], list[int]] = {}
    copies: list[OpRow] = []
    for flight, first in flights:
        ring, timed = flight.ring, flight.devices.stop()
        for (way, nbytes), (calls, ns) in timed.copies.items():
            copies.append(OpRow(way, COPY, f"{nbytes} B", "", calls, ns, 0, calls * nbytes, 0))
        for number in range(max(first, ring.begun - ring.capacity), ring.begun):
            try:
                operation, algorithm, _, nbytes, start_ns, met_ns, end_ns, state, _ = ring.record(number)
            except IndexError:  # overwritten meanwhile
                continue
            if state != COMPLETE:
                continue
            ready_ns = min(max(met_ns, start_ns), end_ns)
            ran_ns, wait_ns = end_ns - ready_ns, ready_ns - start_ns
            if (device_ns := timed.of_operations.get(number)) is not None:
                ran_ns, wait_ns = device_ns, max(0, end_ns - start_ns - device_ns)
            one = sums.setdefault((operation, f"{nbytes} B {algorithm}"), [0, 0, 0, 0])
            one[:] = [known + more for known, more in zip(one, (1, ran_ns, wait_ns, nbytes), strict=True)]
    rows = [
        OpRow(op, COLLECTIVE, shape, "", calls, execute_ns, wait_ns, nbytes, 0)
        for (op, shape), (calls, execute_ns, wait_ns, nbytes) in sums.items()
    ]
    return rows + copies


# ---- what an op is


def name_of(backward: Backward, parameters: Sequence[Parameter]) -> str:
    """Return the name of the op that has `backward` for a rule: that of the function which defines it."""
    function = str(getattr(backward, "__qualname__", type(backward).__name__)).partition(".<locals>")[0]
    if function == "_norm_by_kernel":
        return "rms_norm" if len(parameters) == 1 else "layer_norm"
    return NAMES.get(function, function.rpartition(".")[2])[:200]


def captured(backward: Backward) -> dict[str, Any]:
    """Return what a rule closes over: what its op was given, and what it has kept of its results."""
    names = getattr(getattr(backward, "__code__", None), "co_freevars", ())
    found: dict[str, Any] = {}
    for name, cell in zip(names, getattr(backward, "__closure__", None) or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned
            continue
    return found


def nbytes_of(value: Any) -> int:
    """Return the bytes of an array, tensor or parameter; 0 of anything else."""
    if isinstance(value, Tensor):
        return int(value.data.nbytes)
    if isinstance(value, Parameter):
        return int(value.stored.nbytes)
    return int(value.nbytes) if isinstance(value, np.ndarray | DeviceArray) else 0


def shape_of(data: Array, parameters: Sequence[Parameter]) -> str:
    """Return the shape of an op's output and of its parameters: `2048x512, 128x512`."""
    shapes = [data.shape, *(parameter.stored.shape for parameter in parameters[:2])]
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def flops_of(
    op: str, data: Array, parameters: Sequence[Parameter], inputs: dict[str, Any]
) -> tuple[int, int]:
    """Return the FLOPs of matrix products, forwards and backwards; see `profiler.unit_flops` for the rules.

    Attention by the kernel computes the scores again in its backward pass.
    """
    if op in PRODUCTS and parameters:
        product = 2 * len(data) * int(np.prod(parameters[0].stored.shape))
        return product, 2 * product
    if op == "causal_attention":
        kept = inputs.get("logs", inputs.get("odds"))
        length = 0 if kept is None else int(kept.shape[-1])
        product = len(data) * (length + 1) * int(data.shape[1])
        return 2 * product, (5 if "logs" in inputs else 4) * product
    return 0, 0
