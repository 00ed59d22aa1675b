"""Communicators: the blocking collective operations of one group in one epoch.

Call the methods on a data-plane thread: they block, without the GIL while bytes move. Arrays in the
arena are used in place; an array elsewhere is staged through the arena, piece by piece, if peers must
read it. A communicator ends with its epoch: after any error but a bad argument, make the next view's.

An operation with `out` *preserves*: its inputs are intact until it returns. In place it *recomputes*:
after an error the array holds neither input nor result.

All ranks end with identical bits. The order of a reduction is the algorithm's: "eager" and "direct" fold
ranks 0..n-1 from the left, "ring" goes round from a chunk-dependent rank, the shard tree is a function of
the number of shards.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from zbmd.collectives.algorithms import Operation, Request
from zbmd.collectives.algorithms.shard_tree import Assignment, Node, shard_tree_nodes
from zbmd.collectives.errors import MembersLost, OperationAborted, ProgramError
from zbmd.collectives.executor import DTYPES, REDUCTIONS, Call
from zbmd.collectives.executors import make_executor
from zbmd.collectives.plan import PIECE_BYTES, PLANS_MAX, Plan, choose_algorithm, chunks_for, plan_of
from zbmd.collectives.program import IN, OUT, PUB, input_buffer
from zbmd.transport._native import address_of, now_ns
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.peer_memory import PeerMemory
from zbmd.transport.segment import Segment

Array: TypeAlias = NDArray[Any]

FLIGHT_RECORDS_MAX = 4096
"""Operations remembered by a communicator."""
WAITING_MAX = 1024
"""Threads that may wait for their turn on one communicator."""
_BYTES_DTYPE = DTYPES.index(np.dtype(np.uint8))


class FlightState(Enum):
    """How far an operation came."""

    RUNNING = "running"
    COMPLETE = "complete"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class FlightRecord:
    """One operation, for the story of a failure. Times: CLOCK_MONOTONIC, ns; `end_ns` is 0 until the end."""

    operation: str
    algorithm: str
    sequence: int
    nbytes: int
    start_ns: int
    end_ns: int = 0
    state: FlightState = FlightState.RUNNING
    error: str = ""


@dataclass(frozen=True, slots=True)
class _Side:
    """An array's part in an operation: `buffers` are its numbers, `array` is flat, `blocks` of equal length.

    `load` is copied in before and `store` copied out after each piece, when the memory used is not theirs.
    """

    buffers: tuple[int, ...]
    array: Array
    blocks: int
    load: Array | None = None
    store: Array | None = None


@dataclass(frozen=True, slots=True)
class _Shape:
    """The plans of one operation: whole pieces of `piece` elements a block, and the last, shorter one."""

    piece: int
    plan: Plan
    last: Plan


OnFlight: TypeAlias = Callable[[FlightRecord, Sequence[Array]], None]
"""Takes an operation as it begins, without results, and again as it ends, with them."""


class _Turnstile:
    """Lets threads through one at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._busy = False
        self._waiting: deque[threading.Lock] = deque()

    @contextmanager
    def turn(self) -> Generator[None]:
        gate = None
        with self._guard:
            if self._busy:
                if len(self._waiting) >= WAITING_MAX:
                    raise LocalProtocolError(f"{WAITING_MAX} threads already wait for this communicator")
                gate = threading.Lock()
                gate.acquire()
                self._waiting.append(gate)
            self._busy = True
        if gate is not None:
            gate.acquire()
        try:
            yield
        finally:
            with self._guard:
                if self._waiting:
                    self._waiting.popleft().release()
                else:
                    self._busy = False


class Communicator:
    """The collective operations of `members` at `epoch`, from the side of process `rank`.

    `peers` maps every other member to its memory. Two communicators of a process that are alive at once
    need different channels (0..15). `deadline_ns` of an operation is absolute CLOCK_MONOTONIC, 0 for none.
    """

    def __init__(
        self,
        *,
        segment: Segment,
        peers: Mapping[int, PeerMemory],
        members: tuple[int, ...],
        rank: int,
        epoch: int,
        channel: int,
    ) -> None:
        self._executor = make_executor(
            segment=segment, peers=peers, members=members, rank=rank, epoch=epoch, channel=channel
        )
        self.members = members
        self.rank = rank
        self.epoch = epoch
        self.channel = channel
        self.size = len(members)
        self.place = members.index(rank)
        self.flight: deque[FlightRecord] = deque(maxlen=FLIGHT_RECORDS_MAX)
        self.on_flight: OnFlight | None = None
        self._segment = segment
        self._turnstile = _Turnstile()
        self._ended = ""
        self._closed = False

    def __repr__(self) -> str:
        return f"<Communicator epoch {self.epoch} channel {self.channel}: rank {self.rank} of {self.members}>"

    @property
    def sequence(self) -> int:
        """Runs begun in this epoch; an operation counts once for each of its pieces."""
        return self._executor.sequence

    def all_reduce(
        self,
        x: Array,
        out: Array | None = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Array:
        """Combine every rank's `x` element by element; all ranks get the result in `out` (default: `x`).

        `x`: any shape, C-contiguous, float32, float64, int32, int64 or uint8, the same on all ranks.
        `op`: sum, prod, min or max. `algorithm`: auto, eager, direct or ring.
        Raises `UserError` on a bad argument, `MembersLost` (a `PeerLost`), `OperationAborted`,
        `DeadlineExceeded` and `Desynchronised`; `ArenaFull` if staging does not fit.
        """
        dtype, reduction = _dtype_code(x), _reduction_code(op)
        target = x if out is None else out
        source = _flat(x, "x")
        flat = source if out is None else _flat_like(out, x.dtype, x.size, "out")
        if out is not None:
            _require_apart(source, flat)
        shape = self._shape(Operation.ALL_REDUCE, algorithm, source.size, x.dtype.itemsize, 1)
        if shape.plan.eager:
            sides = [_Side((PUB,), source, 1), _Side((OUT,), flat, 1)]
        elif out is None:
            sides = [_Side((IN, OUT), flat, 1, flat, flat)]
        elif IN in shape.plan.exposed and self._segment.arena.offset_of(source) is None:
            sides = [_Side((IN, OUT), flat, 1, source, flat)]
        else:
            sides = [_Side((IN,), source, 1, source), _Side((OUT,), flat, 1, None, flat)]
        self._perform(shape, sides, source.size, dtype, reduction, deadline_ns)
        return target

    def broadcast(self, x: Array, root: int, *, algorithm: str = "auto", deadline_ns: int = 0) -> Array:
        """Every rank's `x` becomes that of rank `root` (a member's rank). Any dtype without objects.

        `algorithm`: auto, eager, direct or tree. Raises as `all_reduce`.
        """
        if root not in self.members:
            raise UserError(f"the root {root} is not one of the members {self.members}")
        flat = _as_bytes(x, "x")
        place = self.members.index(root)
        shape = self._shape(Operation.BROADCAST, algorithm, flat.size, 1, 1, root=place)
        sides = [_Side((OUT,), flat, 1, flat, flat)]
        if shape.plan.eager:
            sides.append(_Side((PUB,), flat, 1))
        self._perform(shape, sides, flat.size, _BYTES_DTYPE, 0, deadline_ns)
        return x

    def all_gather(
        self, x: Array, out: Array | None = None, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> Array:
        """Collect every rank's `x` into `out`, shape (size, *x.shape), in the order of the members.

        `x` may be the rank's own part of `out`. Any dtype without objects. `algorithm`: auto, eager,
        direct or ring. Raises as `all_reduce`.
        """
        result = np.empty((self.size, *x.shape), x.dtype) if out is None else out
        source = _as_bytes(x, "x")
        flat = _as_bytes(_flat_like(result, x.dtype, x.size * self.size, "out"), "out")
        if not _is_block(source, flat, self.place):
            _require_apart(source, flat)
        shape = self._shape(Operation.ALL_GATHER, algorithm, source.size, 1, self.size)
        first = (PUB,) if shape.plan.eager else (IN,)
        sides = [_Side(first, source, 1, source), _Side((OUT,), flat, self.size, None, flat)]
        self._perform(shape, sides, source.size, _BYTES_DTYPE, 0, deadline_ns)
        return result

    def reduce_scatter(
        self,
        x: Array,
        out: Array | None = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Array:
        """Combine every rank's `x`, shape (size, …), and keep the block of this rank in `out`, shape (…).

        `out` may be the rank's own block of `x`. `algorithm`: auto, direct or ring. Raises as `all_reduce`.
        """
        dtype, reduction = _dtype_code(x), _reduction_code(op)
        if x.ndim == 0 or x.shape[0] != self.size:
            raise UserError(f"x has shape {x.shape}; its first extent must be the group's size, {self.size}")
        result = np.empty(x.shape[1:], x.dtype) if out is None else out
        source = _flat(x, "x")
        flat = _flat_like(result, x.dtype, x.size // self.size, "out")
        if not _is_block(flat, source, self.place):
            _require_apart(source, flat)
        shape = self._shape(Operation.REDUCE_SCATTER, algorithm, flat.size, x.dtype.itemsize, self.size)
        sides = [_Side((IN,), source, self.size, source), _Side((OUT,), flat, 1, None, flat)]
        self._perform(shape, sides, flat.size, dtype, reduction, deadline_ns)
        return result

    def barrier(self, *, deadline_ns: int = 0) -> None:
        """Return once every member has called it. Raises as `all_reduce`."""
        shape = self._shape(Operation.BARRIER, "auto", 0, 1, 1)
        self._perform(shape, [], 0, _BYTES_DTYPE, 0, deadline_ns)

    def all_reduce_shards(
        self,
        partials: Mapping[Node, Array],
        out: Array,
        *,
        shards: int,
        assignment: Assignment,
        deadline_ns: int = 0,
    ) -> Array:
        """Sum logical shards along their fixed tree (see `algorithms.shard_tree`) into `out` on all ranks.

        `assignment[i]` is the range of shards of `members[i]`. `partials` maps each of this rank's
        `shard_tree_nodes` to its partial sum, of the size and dtype of `out`; a rank without shards passes
        none. `out` must be apart from all partials, which stay intact. The bits are those of
        `reduce_shards` over all shards. Raises as `all_reduce`.
        """
        dtype = _dtype_code(out)
        if len(assignment) != self.size:
            raise UserError(f"the assignment names {len(assignment)} ranks, the group has {self.size}")
        nodes = shard_tree_nodes(shards, *assignment[self.place])
        if set(partials) != set(nodes):
            raise UserError(
                f"rank {self.rank} must give the partial sums of {nodes}, not of {sorted(partials)}"
            )
        target = _flat(out, "out")
        sides = [_Side((OUT,), target, 1, None, target)]
        for k, node in enumerate(nodes):
            flat = _flat_like(partials[node], out.dtype, out.size, f"partial {node}")
            _require_apart(flat, target)
            sides.append(_Side((input_buffer(k),), flat, 1, flat))
        shape = self._shape(
            Operation.ALL_REDUCE_SHARDS,
            "auto",
            target.size,
            out.dtype.itemsize,
            1,
            shards=shards,
            assignment=tuple(assignment),
        )
        self._perform(shape, sides, target.size, dtype, 0, deadline_ns)
        return out

    def abort(self) -> None:
        """End the running operation with `OperationAborted`, and every later one; from any thread."""
        self._ended = self._ended or "it was aborted"
        self._executor.abort()

    def close(self) -> None:
        """Abort, wait for the running operation to drain, give back inbox and scratch. Idempotent.

        A peer that waits for this rank, now or later, ends its operation with `OperationAborted`.

        After a loss call it only once the dead are confirmed dead: their last store may still be under way.
        """
        self.abort()
        with self._turnstile.turn():
            if not self._closed:
                self._closed = True
                self._executor.give_up()
                self._executor.release()

    def kill_at(self, sequence: int, point: int) -> None:
        """Fault injection: this process dies by SIGKILL at `point` of the run numbered `sequence`.

        Points are those of `Plan.kill_points`; `sequence + 1` is the next run.
        """
        self._executor.kill_at(sequence, point)

    def _shape(
        self,
        operation: Operation,
        algorithm: str,
        count: int,
        itemsize: int,
        blocks: int,
        *,
        root: int = 0,
        shards: int = 0,
        assignment: Assignment = (),
    ) -> _Shape:
        return _shape_of(
            operation, algorithm, self.size, self.place, count, itemsize, blocks, root, shards, assignment
        )

    def _perform(
        self, shape: _Shape, sides: list[_Side], count: int, dtype: int, reduction: int, deadline_ns: int
    ) -> None:
        with self._turnstile.turn():
            if self._ended:
                raise OperationAborted(f"{self!r} has ended: {self._ended}. Use the next view's communicator")
            request = shape.plan.request
            record = FlightRecord(
                operation=request.operation.name.lower(),
                algorithm=request.algorithm,
                sequence=self.sequence + 1,
                nbytes=count * DTYPES[dtype].itemsize,
                start_ns=now_ns(),
            )
            self.flight.append(record)
            if self.on_flight is not None:
                self.on_flight(record, ())
            try:
                self._run_pieces(shape, sides, count, dtype, reduction, deadline_ns)
            except BaseException as error:
                record.state, record.error = FlightState.FAILED, str(error)
                self._ended = self._ended or f"{request.operation.name.lower()} failed: {error}"
                if isinstance(error, MembersLost):
                    self._executor.abort()  # the peers have their own notice, and it names the lost
                else:
                    self._executor.give_up()  # whatever it was, they may wait for a part that will not come
                raise
            else:
                record.state = FlightState.COMPLETE
            finally:
                record.end_ns = now_ns()
                if self.on_flight is not None:
                    self.on_flight(record, [side.store for side in sides if side.store is not None])

    def _run_pieces(
        self, shape: _Shape, sides: list[_Side], count: int, dtype: int, reduction: int, deadline_ns: int
    ) -> None:
        staging = self._allocate_staging(shape, sides, min(shape.piece, count))
        itemsize = DTYPES[dtype].itemsize
        for piece, begin in enumerate(range(0, max(count, 1), max(shape.piece, 1))):
            length = min(shape.piece, count - begin)
            plan = shape.plan if length == shape.piece else shape.last
            addresses: dict[int, int] = {}
            strides = {IN: 0, OUT: 0}
            for side, staged in zip(sides, staging, strict=True):
                if staged is None:
                    address = address_of(side.array) + begin * itemsize
                    stride = count
                    _copy_piece(side.load, side.array, side.blocks, begin, begin, length)
                else:
                    address, stride = address_of(staged), staged.size // side.blocks
                    _copy_piece(side.load, staged, side.blocks, begin, 0, length)
                for buffer in side.buffers:
                    addresses[buffer], strides[buffer] = address, stride if side.blocks > 1 else 0
            call = Call(
                dtype=dtype,
                reduction=reduction,
                count=length,
                total=count,
                piece=piece,
                in_stride=strides[IN],
                out_stride=strides[OUT],
            )
            self._executor.run(plan, call, addresses, deadline_ns=deadline_ns)
            for side, staged in zip(sides, staging, strict=True):
                if staged is not None:
                    _copy_piece(staged, side.store, side.blocks, 0, begin, length)

    def _allocate_staging(self, shape: _Shape, sides: list[_Side], length: int) -> list[Array | None]:
        """Memory in the arena for each side that peers read and that does not lie there."""
        arena = self._segment.arena
        return [
            arena.empty(length * side.blocks, side.array.dtype)
            if any(buffer in shape.plan.exposed for buffer in side.buffers)
            and arena.offset_of(side.array) is None
            else None
            for side in sides
        ]


@lru_cache(maxsize=PLANS_MAX)
def _shape_of(
    operation: Operation,
    algorithm: str,
    n: int,
    place: int,
    count: int,
    itemsize: int,
    blocks: int,
    root: int,
    shards: int,
    assignment: Assignment,
) -> _Shape:
    """The plans for `count` elements a block: pieces of at most `PIECE_BYTES` over all blocks."""
    block_bytes = count * itemsize
    name = choose_algorithm(operation, block_bytes) if algorithm == "auto" else algorithm
    if name == "eager" and choose_algorithm(operation, block_bytes) != name:
        raise UserError(f"algorithm 'eager' does not take {block_bytes} bytes; use 'auto'")
    piece = min(count, max(1, PIECE_BYTES // (itemsize * blocks)))

    def plan(elements: int) -> Plan:
        request = Request(
            operation=operation,
            algorithm=name,
            n=n,
            chunks=n,
            root=root,
            shards=shards,
            assignment=assignment,
        )
        try:
            chunks = chunks_for(request, elements * itemsize)
        except ProgramError as error:
            raise UserError(str(error)) from None
        return plan_of(replace(request, chunks=chunks), place)

    whole = plan(piece)
    rest = count % piece if piece else 0
    return _Shape(piece, whole, plan(rest) if rest else whole)


def _copy_piece(
    source: Array | None, target: Array | None, blocks: int, source_begin: int, target_begin: int, length: int
) -> None:
    if source is None or target is None or source is target:
        return
    rows_from = source.reshape(blocks, -1)[:, source_begin : source_begin + length]
    target.reshape(blocks, -1)[:, target_begin : target_begin + length] = rows_from


def _dtype_code(x: Array) -> int:
    try:
        return DTYPES.index(x.dtype)
    except ValueError:
        names = ", ".join(dtype.name for dtype in DTYPES)
        raise UserError(f"no reduction for dtype {x.dtype}; use one of {names}") from None


def _reduction_code(op: str) -> int:
    try:
        return REDUCTIONS.index(op)
    except ValueError:
        raise UserError(f"no reduction {op!r}; use one of {', '.join(REDUCTIONS)}") from None


def _flat(x: Array, name: str) -> Array:
    if not x.flags.c_contiguous:
        raise UserError(f"{name} is not C-contiguous; pass numpy.ascontiguousarray({name})")
    return x.reshape(-1)


def _flat_like(x: Array, dtype: np.dtype[Any], size: int, name: str) -> Array:
    if x.dtype != dtype or x.size != size:
        raise UserError(f"{name} must have {size} elements of {dtype}, not {x.size} of {x.dtype}")
    return _flat(x, name)


def _as_bytes(x: Array, name: str) -> Array:
    if x.dtype.hasobject:
        raise UserError(f"{name} has dtype {x.dtype}, which holds Python objects")
    return _flat(x, name).view(np.uint8)


def _is_block(part: Array, whole: Array, place: int) -> bool:
    """Whether `part` is exactly block `place` of `whole`."""
    return part.size > 0 and address_of(part) == address_of(whole) + place * part.nbytes


def _require_apart(a: Array, b: Array) -> None:
    if np.may_share_memory(a, b):
        raise UserError("input and output overlap; operate in place, or on arrays that are apart")
