"""Communicators: the blocking collective operations of one group in one epoch.

Call the methods on a data-plane thread: they block, without the GIL while bytes move. Arrays in the arena are
used in place, and so are all that an algorithm by slots is given ("swap", most by "shared"); an array
elsewhere is staged through the arena, piece by piece, if peers must read it; one that is not contiguous is
packed and unpacked. Besides numpy arrays, anything with DLPack on the host or the buffer protocol will do
(`arrays.as_array`). A communicator ends with its epoch: after any error but a bad argument, make the next
view's.

An operation with `out` *preserves*: its inputs are intact until it returns. In place it *recomputes*:
after an error the array holds neither input nor result.

All ranks end with identical bits, and a run repeats bit for bit. The order of a reduction is the algorithm's:
"eager", "direct", "shared" and "swap" fold ranks 0..n-1 from the left, "ring" goes round from a rank that
depends on the chunk, the shard tree is a function of the number of shards. 16-bit floats are reduced in
float32 and rounded once (`reductions`).

All operations raise `UserError` on a bad argument (which harms nothing), `MembersLost` (a `PeerLost`),
`OperationAborted`, `DeadlineExceeded`, `Desynchronised`; `ArenaFull` if staging does not fit. `deadline_ns`
is absolute CLOCK_MONOTONIC, 0 for none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.algorithms.shard_tree import Assignment, Node, shard_tree_nodes
from zbmd.collectives.communicator.cost_model import Model
from zbmd.collectives.communicator.group_trials import NOT_TRIED, Reading, agree_on_model, agree_on_reading
from zbmd.collectives.communicator.pieces import Side, sides_of
from zbmd.collectives.communicator.planning import Planner, moved_digest
from zbmd.collectives.communicator.turns import NO_ROOT, Explain, OnFlight, Turns
from zbmd.collectives.communicator.uneven import UnevenOperations
from zbmd.collectives.device.arrays_in import (
    Target,
    as_bytes,
    as_placed,
    is_block,
    new_output,
    output,
    own_block,
    packed,
    reduced_arrays,
    require_apart,
    require_blocks,
    require_size,
)
from zbmd.collectives.device.windows import DevicePaths
from zbmd.collectives.execution.executor import Membership
from zbmd.collectives.execution.remote_executor import make_executor
from zbmd.collectives.native._fast_path import FastPathCalls
from zbmd.collectives.programs.layout import (
    all_to_all_layout,
    gather_layout,
    reduce_scatter_layout,
    scatter_layout,
)
from zbmd.collectives.programs.program import IN, OUT, PUB, input_buffer
from zbmd.collectives.programs.reductions import dtype_code, reduction_code
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.memory.segment import PeerMemory, Segment

_SCATTER: Final = Operation.SCATTER.value
_REDUCE_SCATTER: Final = Operation.REDUCE_SCATTER.value
_ALL_TO_ALL: Final = Operation.ALL_TO_ALL.value
_BARRIER: Final = Operation.BARRIER.value


class Communicator(FastPathCalls):
    """The collective operations of `members` at `epoch`, from the side of process `rank`.

    `members` and `rank` are ranks of the job; a `root` is a rank of the group, as `place` is, 0..size-1.

    `peers` maps every other member to its memory. Two communicators of a process that are alive at once need
    different channels (0..15). `hosts` numbers the host of each member, in their order; empty: all on one.

    An operation turns its arguments into a `Call`. A `Planner` gives the plan of it, and `Turns` carries it
    out in turn, piece by piece (`pieces`), on an `Executor`.
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
        hosts: tuple[int, ...] = (),
    ) -> None:
        if hosts and len(hosts) != len(members):
            raise LocalProtocolError(f"hosts are given for {len(hosts)} of the members {members}")
        self._executor = make_executor(
            Membership(segment=segment, peers=peers, members=members, rank=rank, epoch=epoch, channel=channel)
        )
        self.members = members
        self.rank = rank
        self.epoch = epoch
        self.channel = channel
        self.title = self._executor.title
        self.hosts = hosts
        self.size = len(members)
        self.place = members.index(rank)
        self.reading = NOT_TRIED
        self._segment = segment
        self._planner = Planner(self._executor, hosts)
        self._turns = Turns(self._executor, segment, self._planner, repr(self))
        self._uneven = UnevenOperations(self._planner, self._turns, segment, members, self.place)
        self.flight = self._turns.flight
        self.fast_path = self._turns.fast_path
        self._closed = False
        self._has_peers = True

    def __repr__(self) -> str:
        place = f"epoch {self.epoch} channel {self.channel}"
        return f"<{type(self).__name__} {place}: rank {self.rank} of {self.members}>"

    @property
    def model(self) -> Model:
        """The cost model that "auto" goes by, the same on all ranks."""
        return self._planner.model

    @model.setter
    def model(self, model: Model) -> None:
        self._planner.model = model

    @property
    def on_flight(self) -> OnFlight | None:
        """The observer of operations as they begin and end. Setting one closes the fast path."""
        return self._turns.on_flight

    @on_flight.setter
    def on_flight(self, hears: OnFlight) -> None:
        self.fast_path.open = False
        self._turns.on_flight = hears

    @property
    def on_fault(self) -> Callable[[str], object] | None:
        """Is called when an operation has failed otherwise than by the end of a member or an abort."""
        return self._turns.on_fault

    @on_fault.setter
    def on_fault(self, hears: Callable[[str], object]) -> None:
        self._turns.on_fault = hears

    @property
    def sequence(self) -> int:
        """Runs begun in this epoch; an operation counts once for each of its pieces."""
        return self._executor.sequence

    @property
    def staged_bytes(self) -> int:
        """Bytes of arrays that peers could not read where they lay, and that went through the arena."""
        return self._turns.pieces.staged_bytes

    def has_moved(self, since: int) -> bool:
        """Whether an operation begun when `sequence` was `since` may have written to its arrays."""
        begun = self.sequence - since
        return begun > 1 or (begun == 1 and self._executor.may_have_moved)

    @property
    def lost(self) -> tuple[int, ...]:
        """The members that are known to have ended."""
        return tuple(self.members[place] for place in self._executor.lost_places())

    def explain_with(self, explain: Explain) -> None:
        """Have `explain` say what has happened when an operation fails; see `Explain`."""
        self._turns.explain = explain

    def label(self, text: Callable[[], str]) -> None:
        """Have errors of the next operation name it so: in its caller's words. Ends what flies."""
        self.fast_path.land()
        self._turns.labels.append(text)

    def begin(
        self,
        call: tuple[int, Any, Any, str, int],
        timeout_ns: int,
        text: Callable[[], str],
        landed: Callable[[BaseException | None], object],
    ) -> bool:
        """Begin a small call in the fast path, if it can be; see `FastPath.begin`.

        call: its operation, x, out, op and root. text: as `label` takes it; not known where it has not begun.
        """
        self.fast_path.land_now()
        if self.fast_path.flies:
            return False
        self._turns.labels.append(text)
        operation, x, out, op, root = call
        if self.fast_path.begin(operation, x, out, op, "auto", root, timeout_ns, landed) is not None:
            return True
        self._turns.labels.remove(text)
        return False

    @property
    def labelled(self) -> list[str]:
        """The last operations in their callers' words, the latest first."""
        return [text() for text in reversed(self._turns.labels)]

    def abort(self, reason: str = "it was aborted") -> None:
        """End the running operation with `OperationAborted`, and every later one; from any thread."""
        self._turns.end(reason)
        self._executor.abort()

    def give_up(self, reason: str = "it was aborted") -> None:
        """Abort, wait for the running operation to drain, let the peers know, and unmap their memory.

        The own memory is kept. A peer that waits for this rank, now or later, ends its operation with
        `OperationAborted`.
        """
        self.abort(reason)
        with self._turns.turnstile:
            self._executor.give_up()
            self._executor.unmap_peers()
            self._has_peers = False

    def close(self) -> None:
        """`give_up`, and give back inbox and scratch. Idempotent.

        After a loss call it only once the dead are confirmed dead: their last store may still be under way.
        """
        self.give_up()
        with self._turns.turnstile:
            if not self._closed:
                self._closed = True
                self._executor.release()
                with contextlib.suppress(CudaFault):  # a failed device gives nothing back
                    self._turns.pieces.close()
                self._turns.forget()
                self.fast_path.fail = None  # nothing flies any more, and this is a reference to all

    def tune(self, *, deadline_ns: int = 0) -> Model:
        """Measure the group's link, unless its first member knows such groups; all members must call this.

        From now on "auto" goes by the first member's numbers, on all ranks. Takes some 10 ms, once. On one
        host it is also tried whether they can read each other's ordinary memory (`try_reading`).
        """
        self.try_reading(deadline_ns=deadline_ns)
        self.model = agree_on_model(self, deadline_ns)
        return self.model

    def try_reading(self, *, deadline_ns: int = 0) -> None:
        """Try whether all can read each other's ordinary memory, and from now on do so; all must call this.

        Else, and between hosts, what peers read of arrays outside of the arena is copied there.
        """
        if self.size > 1 and not self._executor.far:
            self.read_peers(agree_on_reading(self, deadline_ns))

    def read_peers(self, found: Reading) -> None:
        """Have the members, who were all in a trial, read each other's ordinary arrays, if all of them can.

        Changes nothing if they do already.
        """
        if self.reading.pids:
            return
        self.reading = found
        if found.pids and self.size > 1 and not self._executor.far:
            with self._turns.turnstile:
                if self._has_peers:
                    self._executor.read_peers([found.pids[member] for member in self.members])

    def connect_devices(self, x: Any, *, deadline_ns: int = 0) -> DevicePaths:
        """Have the members' devices read each other's memory; see `Operations.connect_devices`."""
        return self._turns.connect_devices(self, as_placed(x, "x"), deadline_ns)

    def kill_at(self, sequence: int, point: int) -> None:
        """Fault injection: this process dies by SIGKILL at `point` of the run numbered `sequence`.

        Points are those of `Plan.kill_points`; `sequence + 1` is the next run.
        """
        self._executor.kill_at(sequence, point)
        self.fast_path.kill_at(sequence, point)

    def fast_path_failed(self) -> NoReturn:
        """Raise what became of the fast path's call, which still has the turn."""
        self._turns.fast_path_failed()

    def _all_reduce(self, x: Any, out: Any, op: str, algorithm: str, deadline_ns: int) -> Any:
        given = as_placed(x, "x")
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        source, target = reduced_arrays(given, out)
        call = self._planner.call(Operation.ALL_REDUCE, algorithm, source.size, dtype, reduction)
        plan = self._planner.plan(call)
        sides = sides_of(plan, source, target.flat)
        if out is not None and IN in plan.exposed and not self._turns.pieces.can_be_read(source):
            sides = [Side((IN, OUT), target.flat, 1, source, target.flat)]
        self._turns.perform_sides(call, plan, sides, deadline_ns, x, out)
        target.bring_home()
        return x if out is None else out

    def all_reduce_many(
        self, arrays: Sequence[Any], *, op: str = "sum", algorithm: str = "auto", deadline_ns: int = 0
    ) -> Sequence[Any]:
        """`all_reduce` of every array, in place, small ones together; see
        `zbmd.collectives.communicator.uneven`.

        All ranks give arrays of the same dtypes and sizes in the same order, or all raise `Desynchronised`.
        The arrays share no memory with each other. After an error each holds its input, its result, or, if
        it is longer than `PACK_BYTES_MAX`, neither. Returns `arrays`.
        """
        self._uneven.all_reduce_many(arrays, op, algorithm, deadline_ns)
        return arrays

    def _reduce(self, x: Any, root: int, out: Any, op: str, algorithm: str, deadline_ns: int) -> Any:
        given, at_root = as_placed(x, "x"), self._is_root(root)
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        source, target = reduced_arrays(given, out) if at_root else (packed(given), None)
        call = self._planner.call(Operation.REDUCE, algorithm, source.size, dtype, reduction, root=root)
        self._turns.perform(call, source, target, deadline_ns, x, out)
        return self._at_root(root, x if out is None else out)

    def reduce_scatter(
        self, x: Any, out: Any = None, *, op: str = "sum", algorithm: str = "auto", deadline_ns: int = 0
    ) -> Any:
        """Combine every rank's `x`, shape (size, …), and keep the block of this rank in `out`, shape (…).

        `out` may be the rank's own block of `x`. `op` as in `all_reduce`. `algorithm`: auto, eager, direct or
        ring.
        """
        if out is None:
            out = new_output(x, lambda shape: shape[1:])
        done = self.fast_path.run(_REDUCE_SCATTER, x, out, op, algorithm, NO_ROOT, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        given = as_placed(x, "x")
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        require_blocks(given, self.size)
        result, target = output(out, given.shape[1:], given)
        source, flat = packed(given), target.flat
        if not is_block(flat, source, self.place * flat.size):
            require_apart(source, flat)
        call = self._planner.call(
            Operation.REDUCE_SCATTER, algorithm, flat.size, dtype, reduction, published=source.size
        )
        if self._planner.plan(call).eager:
            call = replace(call, layout=reduce_scatter_layout((flat.size,) * self.size))
        blocks_in = self.size if call.layout is None else 1
        self._turns.perform(call, source, target, deadline_ns, x, out, blocks_in=blocks_in)
        return result

    def reduce_scatter_v(
        self,
        x: Any,
        rows: Sequence[int],
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Any:
        """Combine every rank's `x`, and keep this rank's rows of it in `out`: `rows[r]` for the r-th member.

        `rows` is the same on all ranks and adds up to the first extent of `x`.
        """
        return self._uneven.reduce_scatter(x, rows, out, op, algorithm, deadline_ns)

    def all_reduce_shards(
        self,
        partials: Mapping[Node, Any],
        out: Any,
        *,
        shards: int,
        assignment: Assignment,
        deadline_ns: int = 0,
    ) -> Any:
        """Sum logical shards along their fixed tree (see `algorithms.shard_tree`) into `out` on all ranks.

        `assignment[i]` is the range of shards of `members[i]`. `partials` maps each of this rank's
        `shard_tree_nodes` to its partial sum, of the size and dtype of `out`; a rank without shards passes
        none. `out` must be apart from all partials, which stay intact. The bits are those of
        `reduce_shards` over all shards.
        """
        result = as_placed(out, "out")
        dtype = dtype_code(result.dtype)
        if len(assignment) != self.size:
            raise UserError(f"the assignment names {len(assignment)} ranks, the group has {self.size}")
        nodes = shard_tree_nodes(shards, *assignment[self.place])
        if set(partials) != set(nodes):
            raise UserError(
                f"rank {self.rank} must give the partial sums of {nodes}, not of {sorted(partials)}"
            )
        target = Target(result, "out")
        sides = [Side((OUT,), target.flat, 1, None, target.flat)]
        for k, node in enumerate(nodes):
            partial = as_placed(partials[node], f"partial {node}")
            flat = packed(require_size(partial, result.dtype, result.size, f"partial {node}"))
            require_apart(flat, target.flat)
            sides.append(Side((input_buffer(k),), flat, 1, flat))
        call = self._planner.call(Operation.ALL_REDUCE_SHARDS, "auto", result.size, dtype)
        request = replace(call.request, shards=shards, assignment=tuple(assignment))
        call = replace(call, request=request)
        self._turns.perform_sides(call, self._planner.plan(call), sides, deadline_ns)
        target.bring_home()
        return out

    def _broadcast(self, x: Any, root: int, algorithm: str, deadline_ns: int) -> Any:
        at_root, given = self._is_root(root), as_placed(x, "x")
        # The root's array is only read, so it need not be writeable.
        target = None if at_root else Target(given, "x", load=True)
        flat = as_bytes(packed(given) if target is None else target.flat, "x")
        digest = moved_digest(given.dtype)
        call = self._planner.call(Operation.BROADCAST, algorithm, flat.size, root=root, digest=digest)
        plan = self._planner.plan(call)
        sides = [Side((OUT,), flat, 1, flat, flat, only_read=at_root)]
        if plan.eager:
            sides.append(Side((PUB,), flat, 1, flat))
        self._turns.perform_sides(call, plan, sides, deadline_ns, x)
        if target is not None:
            target.bring_home()
        return x

    def _new_gathered(self, x: Any) -> Any:
        return new_output(x, lambda shape: (self.size, *shape))

    def _all_gather(self, x: Any, out: Any, algorithm: str, deadline_ns: int) -> Any:
        given = as_placed(x, "x")
        result, target = output(out, (self.size, *given.shape), given)
        source = own_block(given, target, self.place)
        digest = moved_digest(given.dtype)
        call = self._planner.call(Operation.ALL_GATHER, algorithm, source.size, digest=digest)
        self._turns.perform(call, source, target, deadline_ns, x, out, blocks_out=self.size)
        return result

    def all_gather_v(self, x: Any, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Every rank's `x`, shape (rows, …) with a number of rows of its own, one after the other: a new
        array.
        """
        return self.all_gather_rows(x, algorithm=algorithm, deadline_ns=deadline_ns)[0]

    def all_gather_rows(
        self, x: Any, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> tuple[Any, tuple[int, ...]]:
        """As `all_gather_v`, with the number of rows of each member, in their order."""
        return self._uneven.all_gather(x, algorithm, deadline_ns)

    def _gather(self, x: Any, root: int, out: Any, algorithm: str, deadline_ns: int) -> Any:
        given, result, target = as_placed(x, "x"), None, None
        if self._is_root(root):
            result, target = output(out, (self.size, *given.shape), given)
        source = as_bytes(packed(given), "x") if target is None else own_block(given, target, self.place)
        layout = gather_layout((source.size,) * self.size, root)
        call = self._planner.call_laid_out(
            Operation.GATHER, algorithm, layout, root=root, digest=moved_digest(given.dtype)
        )
        self._turns.perform(call, source, target, deadline_ns, x, out)
        return result

    def scatter(
        self, x: Any, root: int, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> Any:
        """Rank r of the group gets block r of the `x` of rank `root` in `out`.

        `x`, shape (size, …), is given at the root, where `out` may be its own block of it or be left out; the
        others pass None for `x`, and an `out`, shape (…). Any dtype without objects. `algorithm`: auto, eager
        or direct. Returns `out`.
        """
        if out is None and root == self.place:
            out = new_output(x, lambda shape: shape[1:])
        done = self.fast_path.run(_SCATTER, x, out, "sum", algorithm, root, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        source: Any = None
        if self._is_root(root):
            given = require_blocks(as_placed(x, "x"), self.size)
            result, target = output(out, given.shape[1:], given)
            source = as_bytes(packed(given), "x")
            if not is_block(as_bytes(target.flat, "out"), source, root * target.flat.nbytes):
                require_apart(source, target.flat)
        elif out is None:
            raise UserError(
                f"rank {self.place} is not the root: pass the array that takes its block as `out`"
            )
        else:
            result, target = out, Target(as_placed(out, "out"), "out")
        layout = scatter_layout((target.flat.nbytes,) * self.size, root)
        call = self._planner.call_laid_out(
            Operation.SCATTER, algorithm, layout, root=root, digest=moved_digest(target.flat.dtype)
        )
        self._turns.perform(call, source, target, deadline_ns, x, out)
        return result

    def all_to_all(self, x: Any, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Send block d of `x`, shape (size, …), to the d-th member; block s of `out` comes from the s-th.

        Any dtype without objects. `algorithm`: auto, eager or direct. Returns `out`, of the shape of `x`.
        """
        if out is None:
            out = new_output(x, lambda shape: shape)
        done = self.fast_path.run(_ALL_TO_ALL, x, out, "sum", algorithm, NO_ROOT, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        given = require_blocks(as_placed(x, "x"), self.size)
        result, target = output(out, given.shape, given)
        source = as_bytes(packed(given), "x")
        require_apart(source, target.flat)
        layout = all_to_all_layout(((source.size // self.size,) * self.size,) * self.size)
        call = self._planner.call_laid_out(
            Operation.ALL_TO_ALL, algorithm, layout, digest=moved_digest(given.dtype)
        )
        self._turns.perform(call, source, target, deadline_ns, x, out)
        return result

    def all_to_all_v(
        self,
        x: Any,
        send_rows: Sequence[int],
        receive_rows: Sequence[int],
        out: Any = None,
        *,
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Any:
        """Send `send_rows[d]` rows of `x` to the d-th member, one block after the other, and receive
        `receive_rows[s]` rows from the s-th into `out`, shape (sum(receive_rows), *x.shape[1:]).

        All ranks raise `Desynchronised` if what one sends is not what the other expects, or rows differ in
        size.
        """
        return self._uneven.all_to_all(x, send_rows, receive_rows, out, algorithm, deadline_ns)

    def agree_on(self, text: str, *, deadline_ns: int = 0) -> None:
        """Return if all members have called this with the same text; else all raise `Desynchronised`.

        For what operations do not compare by themselves. It costs a small all-gather.
        """
        self._uneven.agree_on(text, deadline_ns)

    def barrier(self, *, deadline_ns: int = 0) -> None:
        """Return once every member has called it."""
        done = self.fast_path.run(_BARRIER, None, None, "sum", "auto", NO_ROOT, deadline_ns)
        if done is False:
            self.fast_path_failed()
        if not done:
            self._turns.perform(self._planner.call(Operation.BARRIER, "auto", 0), None, None, deadline_ns)

    def _is_root(self, root: int) -> bool:
        """Whether this rank is the root. Raises `UserError` unless that is a rank of the group."""
        if not 0 <= root < self.size:
            raise UserError(f"root={root} is not a rank of this group: expected 0..{self.size - 1}")
        return root == self.place

    def _at_root(self, root: int, result: Any) -> Any:
        return result if root == self.place else None
