"""One operation as a sequence of native runs: pieces of bounded size, staged in the arena where needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from zbmd.collectives.algorithms.catalogue import Operation, Request
from zbmd.collectives.communicator.planning import Call
from zbmd.collectives.device.arrays import DeviceArray
from zbmd.collectives.device.arrays_in import Array, Placed, address
from zbmd.collectives.device.host_copy import DeviceStaging
from zbmd.collectives.device.windows import DeviceWindows
from zbmd.collectives.execution.executor import Executor
from zbmd.collectives.execution.plan import Plan, Run, plan_of
from zbmd.collectives.flight.device_clock import DeviceClock
from zbmd.collectives.programs.layout import Layout, Piece
from zbmd.collectives.programs.program import IN, OUT, PUB, hash_text
from zbmd.collectives.programs.reductions import itemsize
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import address_of

_FOREIGN = frozenset((IN, OUT))
"""Buffers that may lie in a rank's own memory: its descriptor says where."""
_ON_DEVICES = hash_text("devices read each other's memory")
"""Tells such an operation from the same one over memory of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meeting(Run):
    """A barrier in which the members find that they have `called` the same."""

    called: Request

    @property
    def operation(self) -> int:
        """See `Run`."""
        return self.called.operation.value

    @property
    def root(self) -> int:
        """See `Run`."""
        return self.called.root


@dataclass(frozen=True, slots=True)
class Side:
    """An array's part in an operation: `buffers` are its numbers, `array` is flat, `blocks` of equal length.

    `load` is copied in before and `store` copied out after each piece, when the memory used is not theirs.
    """

    buffers: tuple[int, ...]
    array: Placed
    blocks: int = 1
    load: Placed | None = None
    store: Placed | None = None
    only_read: bool = False
    """The operation leaves it as it is, so nothing is copied back to `store`."""


def sides_of(
    plan: Plan, source: Placed | None, target: Placed | None, *, blocks_in: int = 1, blocks_out: int = 1
) -> list[Side]:
    """The sides of an operation that reads `source` and writes `target`; None: this rank has no such part."""
    if source is not None and source is target and not plan.eager:
        return [Side((IN, OUT), source, blocks_in, source, source)]
    sides: list[Side] = []
    if source is not None:
        sides.append(Side((PUB if plan.eager else IN,), source, blocks_in, source))
    if target is not None:
        sides.append(Side((OUT,), target, blocks_out, None, target))
    return sides


class PieceRunner:
    """Carries calls out on one executor, staging in the arena what peers must read and cannot where it lies.

    single: the only run of the latest call, if it was one, and nothing was copied for it. staged_bytes: of
    arrays that went through the arena, in all calls. windows: of the members' devices, if these read each
    other's memory; on_devices: whether the latest call went that way.
    """

    def __init__(self, segment: Segment, executor: Executor, place: int, clock: DeviceClock) -> None:
        self._segment = segment
        self._executor = executor
        self._place = place
        self.single: Run | None = None
        self.staged_bytes = 0
        self._clock = clock
        self.devices = DeviceStaging(segment, clock=clock)
        self.windows: DeviceWindows | None = None
        self.on_devices = False

    def run(self, call: Call, plan: Plan, sides: Sequence[Side], deadline_ns: int) -> None:
        """Run all pieces. Raises what `Executor.run` does, and `CudaFault` with arrays of a device."""
        self.single, self.on_devices = None, False
        arrays = [side.array for side in sides if isinstance(side.array, DeviceArray)]
        if not arrays:
            self._run(call, plan, sides, deadline_ns)
            return
        self._clock.begin()
        if self.windows is not None and self._run_on_devices(self.windows, call, sides, deadline_ns):
            return
        try:
            self.devices.begin(*arrays)
            self._run(call, plan, sides, deadline_ns)
        finally:
            self.devices.end()

    def close(self) -> None:
        """Give back what there is of devices. Idempotent. Raises `CudaFault`."""
        self.connected(None)
        self._clock.close()
        self.devices.close()

    def connected(self, windows: DeviceWindows | None) -> None:
        """Use these windows from now on."""
        if self.windows is not None:
            self.windows.close()
        self.windows = windows

    def can_be_read(self, x: Placed) -> bool:
        """Whether peers can read it where it lies."""
        if isinstance(x, DeviceArray):
            return False
        return self._executor.reads_peers or self._segment.arena.offset_of(x) is not None

    def _run(self, call: Call, plan: Plan, sides: Sequence[Side], deadline_ns: int) -> None:
        if call.layout is None:
            self._run_even(call, plan, sides, deadline_ns)
        else:
            self._run_laid_out(call, plan, sides, call.layout, deadline_ns)

    def _run_on_devices(
        self, windows: DeviceWindows, call: Call, sides: Sequence[Side], deadline_ns: int
    ) -> bool:
        """Run it between the devices; False if it is none that they do by themselves."""
        request, lengths = call.request, () if call.layout is None else call.layout.lengths
        if not windows.takes(request.operation, call.count, call.dtype, lengths):
            return False
        self.on_devices = True
        windows.run(
            request.operation,
            count=call.count,
            dtype=call.dtype,
            reduction=call.reduction,
            root=request.root,
            source=next((side.load for side in sides if side.load is not None), None),
            target=next(
                (side.store for side in sides if side.store is not None and not side.only_read), None
            ),
            meet=partial(self._meet, call, deadline_ns),
            clock=self._clock,
            deadline_ns=deadline_ns,
        )
        return True

    def _meet(self, call: Call, deadline_ns: int) -> None:
        barrier = Request(operation=Operation.BARRIER, algorithm="dissemination", n=call.request.n)
        meeting = _Meeting(
            plan=plan_of(barrier, self._place),
            addresses={},
            dtype=call.dtype,
            reduction=call.reduction,
            count=0,
            total=call.count,
            piece=0,
            in_stride=0,
            out_stride=0,
            digest=call.digest ^ _ON_DEVICES,
            called=call.request,
        )
        self._executor.run(meeting, deadline_ns=deadline_ns)

    def _run_even(self, call: Call, plan: Plan, sides: Sequence[Side], deadline_ns: int) -> None:
        count, piece = call.count, plan.piece
        staging = [self._memory_for(plan, side, min(piece, count) * side.blocks) for side in sides]
        for number, begin in enumerate(range(0, max(count, 1), max(piece, 1))):
            length = min(piece, count - begin)
            addresses: dict[int, int] = {}
            strides = {IN: 0, OUT: 0}
            for side, staged in zip(sides, staging, strict=True):
                if staged is None:
                    at, stride = address(side.array) + begin * itemsize(call.dtype), count
                    self._copy_piece(side.load, side.array, side.blocks, begin, begin, length)
                else:
                    at, stride = address_of(staged), staged.size // side.blocks
                    self._copy_piece(side.load, staged, side.blocks, begin, 0, length)
                for buffer in side.buffers:
                    addresses[buffer], strides[buffer] = at, stride if side.blocks > 1 else 0
            run = Run(
                plan=plan if length == piece or plan.last is None else plan.last,
                addresses=addresses,
                dtype=call.dtype,
                reduction=call.reduction,
                count=length,
                total=count,
                piece=number,
                in_stride=strides[IN],
                out_stride=strides[OUT],
                digest=call.digest,
            )
            self._carry_out(run, sides, staging, deadline_ns)
            for side, staged in zip(sides, staging, strict=True):
                if staged is not None and not side.only_read:
                    self._copy_piece(staged, side.store, side.blocks, 0, begin, length)

    def _run_laid_out(
        self, call: Call, plan: Plan, sides: Sequence[Side], layout: Layout, deadline_ns: int
    ) -> None:
        pieces = layout.pieces(plan.piece)
        staging: list[Array | None] = []
        for side in sides:
            column = 1 if side.buffers[0] in (IN, PUB) else 3
            most = max(int(piece.extents[self._place, column]) for piece in pieces)
            staging.append(self._memory_for(plan, side, most))
        for number, piece in enumerate(pieces):
            addresses: dict[int, int] = {}
            staged_flags = {IN: 0, OUT: 0}
            for side, staged in zip(sides, staging, strict=True):
                buffer = side.buffers[0]
                addresses[buffer] = address(side.array if staged is None else staged)
                if staged is not None:
                    staged_flags[buffer] = 1
                    self._move_blocks(layout, piece, buffer, side.load, staged, into=True)
            run = Run(
                plan=plan,
                addresses=addresses,
                dtype=call.dtype,
                reduction=call.reduction,
                count=piece.longest,
                total=call.count,
                piece=number,
                in_stride=staged_flags[IN],
                out_stride=staged_flags[OUT],
                layout=piece,
                digest=piece.digest ^ call.digest,
            )
            self._carry_out(run, sides, staging, deadline_ns)
            for side, staged in zip(sides, staging, strict=True):
                if staged is not None:
                    self._move_blocks(layout, piece, side.buffers[0], side.store, staged, into=False)

    def _carry_out(
        self, run: Run, sides: Sequence[Side], staging: Sequence[Array | None], deadline_ns: int
    ) -> None:
        self.devices.settle()
        self._executor.run(run, deadline_ns=deadline_ns)
        if run.count == run.total and _nothing_is_copied(sides, staging):
            self.single = run

    def _move_blocks(
        self, layout: Layout, piece: Piece, buffer: int, array: Placed | None, staged: Array, *, into: bool
    ) -> None:
        """Copy this rank's part of every block between a whole array and the memory it is staged in."""
        if array is None:
            return
        inputs = buffer in (IN, PUB)
        row = 1 if inputs else 3
        for block in layout.blocks_in(self._place) if inputs else layout.blocks_out(self._place):
            length, at, packed_at = (int(piece.table[i, block]) for i in (0, row, row + 1))
            whole, packed = _part(array, at, at + length), staged[packed_at : packed_at + length]
            self.devices.copy(*(packed, whole) if into else (whole, packed))

    def _memory_for(self, plan: Plan, side: Side, length: int) -> Array | None:
        """Memory in the arena, if peers must read the side and cannot read it where it lies."""
        arena, array = self._segment.arena, side.array
        if isinstance(array, DeviceArray):
            return self.devices.empty(array, length)
        if plan.exposed.isdisjoint(side.buffers) or arena.offset_of(array) is not None:
            return None
        if self._executor.reads_peers and _FOREIGN.issuperset(side.buffers):
            return None
        self.staged_bytes += array.nbytes
        return arena.empty(length, array.dtype)

    def _copy_piece(
        self,
        source: Placed | None,
        target: Placed | None,
        blocks: int,
        source_begin: int,
        target_begin: int,
        length: int,
    ) -> None:
        if source is None or target is None or source is target:
            return
        if isinstance(source, DeviceArray) or isinstance(target, DeviceArray):
            for block in range(blocks):
                begins = (
                    block * (array.size // blocks) + begin
                    for array, begin in ((target, target_begin), (source, source_begin))
                )
                into, src = (
                    _part(array, begin, begin + length)
                    for array, begin in zip((target, source), begins, strict=True)
                )
                self.devices.copy(into, src)
            return
        rows_from = source.reshape(blocks, -1)[:, source_begin : source_begin + length]
        target.reshape(blocks, -1)[:, target_begin : target_begin + length] = rows_from


def _part(array: Placed, begin: int, end: int) -> Placed:
    return array.part(begin, end) if isinstance(array, DeviceArray) else array[begin:end]


def _nothing_is_copied(sides: Sequence[Side], staging: Sequence[Array | None]) -> bool:
    return all(staged is None for staged in staging) and all(
        other is None or other is side.array for side in sides for other in (side.load, side.store)
    )
