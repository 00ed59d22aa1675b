"""One operation as a sequence of native runs: pieces of bounded size, staged in the arena where needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from zbmd.collectives.algorithms.catalogue import Algorithm, Operation, Request, algorithm_of
from zbmd.collectives.algorithms.shard_tree import Assignment
from zbmd.collectives.communicator.algorithm_choice import Choice, choose
from zbmd.collectives.communicator.cost_model import ONE_HOST, Model
from zbmd.collectives.device.arrays import DeviceArray
from zbmd.collectives.device.arrays_in import Array, Placed, address
from zbmd.collectives.device.staging import DeviceStaging
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.execution.executor import Call, Executor
from zbmd.collectives.execution.plan import (
    CHUNK_BYTES,
    FAR_CHUNK_BYTES,
    FAR_PIECE_BYTES,
    FAR_SLOT_BYTES,
    PIECE_BYTES,
    PLANS_MAX,
    UNSTAGED_PIECE_BYTES,
    Plan,
    chunks_for,
    plan_of,
)
from zbmd.collectives.native._stepper import PUB_BYTES_MAX
from zbmd.collectives.programs.layout import Layout, Piece
from zbmd.collectives.programs.program import IN, OUT, PUB
from zbmd.collectives.programs.reductions import itemsize, slot_itemsize
from zbmd.transport.errors import UserError
from zbmd.transport.memory.segment import Segment
from zbmd.transport.native._native import address_of

_FOREIGN = frozenset((IN, OUT))
"""The buffers that a descriptor tells of where they are in a rank's own memory."""


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


_MOVING = frozenset(
    (
        Operation.BROADCAST,
        Operation.ALL_GATHER,
        Operation.GATHER,
        Operation.SCATTER,
        Operation.ALL_TO_ALL,
    )
)
"""Operations that reduce nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Everything that the choice of a plan depends on. `count` elements a block at most."""

    operation: Operation
    algorithm: str
    n: int
    place: int
    count: int
    dtype: int
    published: int = 0
    """Elements that a rank would publish in its descriptor, at most."""
    root: int = 0
    shards: int = 0
    assignment: Assignment = ()
    hosts: tuple[int, ...] = ()
    """The host of each rank, by number; empty: all on one."""
    model: Model = ONE_HOST
    eager_bytes_max: int = PUB_BYTES_MAX
    """What can travel with a descriptor."""
    far: bool = False
    """Whether there are members on other hosts."""
    reads_peers: bool = False
    """Whether members read each other's ordinary arrays, so that nothing is staged."""
    override: str = ""
    """The value of `ZBMD_ALGORITHM`."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The plans of one operation: whole pieces of `piece` elements a block, and the last, shorter one."""

    piece: int
    plan: Plan
    last: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One operation, ready to run. `layout`: where the blocks lie, if not one stride apart."""

    shape: Shape
    sides: Sequence[Side]
    count: int
    dtype: int
    reduction: int = 0
    layout: Layout | None = None
    digest: int = 0
    """Of what the ranks must agree on beyond the plan; it enters the fingerprint."""

    @property
    def nbytes(self) -> int:
        """Bytes of a block, the longest if they differ."""
        return self.count * itemsize(self.dtype)


def choice_of(ask: Ask) -> Choice:
    """What "auto" stands for here. Raises `UserError` if `ZBMD_ALGORITHM` names no algorithm."""
    item = itemsize(ask.dtype)
    count = max(ask.published, ask.count)
    if ask.operation is Operation.ALL_GATHER:
        count = ask.count * ask.n
    return choose(
        ask.operation,
        n=ask.n,
        nbytes=count * item,
        published_bytes=max(ask.published, ask.count) * item,
        # Only where no two members share memory does more than a little travel with a descriptor.
        hosts=max(1, len(set(ask.hosts))) if ask.eager_bytes_max <= PUB_BYTES_MAX else ask.n,
        model=ask.model,
        eager_bytes_max=ask.eager_bytes_max,
        far=ask.far,
        override=ask.override,
    )


@lru_cache(maxsize=PLANS_MAX)
def shape_of(ask: Ask) -> Shape:
    """The plans: pieces of at most `PIECE_BYTES` over all blocks of a rank, or `FAR_PIECE_BYTES` if there are
    members on other hosts. Raises `UserError`.
    """
    item = itemsize(ask.dtype)
    published_bytes = max(ask.published, ask.count) * item
    name, in_arena = ask.algorithm, ""
    if name == "auto":
        choice = choice_of(ask)
        name, in_arena = choice.algorithm, choice.in_arena
    if name == "eager" and published_bytes > ask.eager_bytes_max:
        raise UserError(f"algorithm 'eager' does not take {published_bytes} bytes; use 'auto'")

    piece_bytes = _cut(ask, name)[1]

    def plan(elements: int) -> Plan:
        try:
            request = _request(ask, name, elements * item)
            if not in_arena:
                return plan_of(request, ask.place)
            return plan_of(request, ask.place, _request(ask, in_arena, elements * item))
        except ProgramError as error:
            raise UserError(str(error)) from None

    a_rank = 1 if not _entry(ask, name).blocked else ask.n
    piece = min(ask.count, max(1, piece_bytes // (item * a_rank)))
    whole = plan(piece)
    rest = ask.count % piece if piece else 0
    return Shape(piece, whole, plan(rest) if rest else whole)


def _request(ask: Ask, name: str, block_bytes: int) -> Request:
    request = Request(
        operation=ask.operation,
        algorithm=name,
        n=ask.n,
        root=ask.root,
        shards=ask.shards,
        assignment=ask.assignment,
        hosts=ask.hosts if _entry(ask, name).over_hosts else (),
    )
    request = replace(request, chunks=request.blocks)
    return replace(request, chunks=chunks_for(request, block_bytes, _cut(ask, name)[0]))


def _cut(ask: Ask, name: str) -> tuple[int, int]:
    """Bytes of a chunk and of a piece, at most."""
    wider = slot_itemsize(ask.dtype) // itemsize(ask.dtype)  # a 16-bit float takes more in a slot
    if name == "swap":  # a chunk of each peer is in slots
        return max(1, CHUNK_BYTES // (wider * max(1, ask.n - 1))), UNSTAGED_PIECE_BYTES
    if ask.far and name == "direct":
        return FAR_CHUNK_BYTES, FAR_PIECE_BYTES
    if ask.reads_peers and name == "direct":
        return CHUNK_BYTES, UNSTAGED_PIECE_BYTES
    if ask.far and (_entry(ask, name).over_hosts or ask.operation in _MOVING):
        return FAR_SLOT_BYTES // wider, FAR_PIECE_BYTES
    # Others go by chunks in the order in which they reduce: theirs are the bits of one host.
    return CHUNK_BYTES, PIECE_BYTES


def _entry(ask: Ask, name: str) -> Algorithm:
    try:
        return algorithm_of(Request(operation=ask.operation, algorithm=name, n=ask.n, chunks=ask.n**2))
    except ProgramError as error:
        raise UserError(str(error)) from None


@dataclass(frozen=True, slots=True)
class Single:
    """The one native run that a job was, over arrays where they lay."""

    plan: Plan
    call: Call
    addresses: Mapping[int, int]


class PieceRunner:
    """Runs jobs on one executor, staging in the arena what peers must read and cannot where it lies.

    single: the latest job's only run, if it was one, and nothing was copied for it.
    """

    def __init__(self, segment: Segment, executor: Executor, place: int) -> None:
        self._segment = segment
        self._executor = executor
        self._place = place
        self.single: Single | None = None
        self.devices = DeviceStaging(segment)

    def run(self, job: Job, deadline_ns: int) -> None:
        """Run all pieces. Raises what `Executor.run` does, and `CudaFault` with arrays of a device."""
        self.single = None
        arrays = [side.array for side in job.sides if isinstance(side.array, DeviceArray)]
        if not arrays:
            self._run(job, deadline_ns)
            return
        try:
            self.devices.begin(*arrays)
            self._run(job, deadline_ns)
        finally:
            self.devices.end()

    def _run(self, job: Job, deadline_ns: int) -> None:
        if job.layout is None:
            self._run_even(job, deadline_ns)
        else:
            self._run_laid_out(job, job.layout, deadline_ns)

    def _run_even(self, job: Job, deadline_ns: int) -> None:
        shape, count = job.shape, job.count
        lengths = [min(shape.piece, count) * side.blocks for side in job.sides]
        staging = self._allocate(job, lengths)
        for piece, begin in enumerate(range(0, max(count, 1), max(shape.piece, 1))):
            length = min(shape.piece, count - begin)
            addresses: dict[int, int] = {}
            strides = {IN: 0, OUT: 0}
            for side, staged in zip(job.sides, staging, strict=True):
                if staged is None:
                    at, stride = address(side.array) + begin * itemsize(job.dtype), count
                    self._copy_piece(side.load, side.array, side.blocks, begin, begin, length)
                else:
                    at, stride = address_of(staged), staged.size // side.blocks
                    self._copy_piece(side.load, staged, side.blocks, begin, 0, length)
                for buffer in side.buffers:
                    addresses[buffer], strides[buffer] = at, stride if side.blocks > 1 else 0
            call = Call(
                dtype=job.dtype,
                reduction=job.reduction,
                count=length,
                total=count,
                piece=piece,
                in_stride=strides[IN],
                out_stride=strides[OUT],
                digest=job.digest,
            )
            plan = shape.plan if length == shape.piece else shape.last
            self.devices.settle()
            self._executor.run(plan, call, addresses, deadline_ns=deadline_ns)
            if length == count and _nothing_is_copied(job, staging):
                self.single = Single(plan, call, addresses)
            for side, staged in zip(job.sides, staging, strict=True):
                if staged is not None and not side.only_read:
                    self._copy_piece(staged, side.store, side.blocks, 0, begin, length)

    def _run_laid_out(self, job: Job, layout: Layout, deadline_ns: int) -> None:
        pieces = layout.pieces(job.shape.piece)
        most = [
            max(int(p.extents[self._place, 1 if side.buffers[0] in (IN, PUB) else 3]) for p in pieces)
            for side in job.sides
        ]
        staging = self._allocate(job, most)
        for number, piece in enumerate(pieces):
            addresses: dict[int, int] = {}
            staged_flags = {IN: 0, OUT: 0}
            for side, staged in zip(job.sides, staging, strict=True):
                buffer = side.buffers[0]
                addresses[buffer] = address(side.array if staged is None else staged)
                if staged is not None:
                    staged_flags[buffer] = 1
                    self._move_blocks(layout, piece, buffer, side.load, staged, into=True)
            call = Call(
                dtype=job.dtype,
                reduction=job.reduction,
                count=piece.longest,
                total=job.count,
                piece=number,
                in_stride=staged_flags[IN],
                out_stride=staged_flags[OUT],
                layout=piece,
            )
            self.devices.settle()
            self._executor.run(job.shape.plan, call, addresses, deadline_ns=deadline_ns)
            if len(pieces) == 1 and _nothing_is_copied(job, staging):
                self.single = Single(job.shape.plan, call, addresses)
            for side, staged in zip(job.sides, staging, strict=True):
                if staged is not None:
                    self._move_blocks(layout, piece, side.buffers[0], side.store, staged, into=False)

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

    def _allocate(self, job: Job, lengths: Sequence[int]) -> list[Array | None]:
        """Memory in the arena for each side that peers read and cannot read where it lies."""
        return [self._memory_for(job, side, length) for side, length in zip(job.sides, lengths, strict=True)]

    def _memory_for(self, job: Job, side: Side, length: int) -> Array | None:
        arena, array = self._segment.arena, side.array
        if isinstance(array, DeviceArray):
            return self.devices.empty(array, length)
        if job.shape.plan.exposed.isdisjoint(side.buffers) or arena.offset_of(array) is not None:
            return None
        if self._executor.reads_peers and _FOREIGN.issuperset(side.buffers):
            return None
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


def _nothing_is_copied(job: Job, staging: Sequence[Array | None]) -> bool:
    return all(staged is None for staged in staging) and all(
        other is None or other is side.array for side in job.sides for other in (side.load, side.store)
    )
