"""Communicators: the blocking collective operations of one group in one epoch.

Call the methods on a data-plane thread: they block, without the GIL while bytes move. Arrays in the arena are
used in place, and so are all that "swap" is given; an array elsewhere is staged through the arena, piece by
piece, if peers must read it; one that is not contiguous is packed and unpacked. Besides numpy arrays,
anything with DLPack on the host or the buffer protocol will do (`arrays.as_array`). A communicator ends with
its epoch: after any error but a bad argument, make the next view's.

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

from collections.abc import Mapping
from typing import Any, Final

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.algorithms.shard_tree import Assignment, Node, shard_tree_nodes
from zbmd.collectives.communicator.coalescing import CoalescedOperations
from zbmd.collectives.communicator.cost_model import Model
from zbmd.collectives.communicator.peer_reading import agree_on_reading
from zbmd.collectives.communicator.pieces import Job, Side, shape_of
from zbmd.collectives.communicator.runs import NO_ROOT, Said
from zbmd.collectives.communicator.tuning import agree_on_model
from zbmd.collectives.device.arrays_in import (
    Placed,
    Target,
    as_bytes,
    as_placed,
    is_block,
    packed,
    require_apart,
    require_size,
)
from zbmd.collectives.programs.layout import gather_layout, reduce_scatter_layout, scatter_layout
from zbmd.collectives.programs.program import IN, OUT, PUB, input_buffer
from zbmd.collectives.programs.reductions import BYTES_CODE, dtype_code, reduction_code
from zbmd.transport.errors import UserError

_REDUCE: Final = Operation.REDUCE.value
_BROADCAST: Final = Operation.BROADCAST.value
_ALL_GATHER: Final = Operation.ALL_GATHER.value
_GATHER: Final = Operation.GATHER.value
_SCATTER: Final = Operation.SCATTER.value
_REDUCE_SCATTER: Final = Operation.REDUCE_SCATTER.value
_BARRIER: Final = Operation.BARRIER.value


class Communicator(CoalescedOperations):
    """The collective operations of `members` at `epoch`, from the side of process `rank`.

    `members` and `rank` are ranks of the job; a `root` is a rank of the group, as `place` is, 0..size-1.

    `peers` maps every other member to its memory. Two communicators of a process that are alive at once need
    different channels (0..15). `hosts` numbers the host of each member, in their order; empty: all on one.
    """

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

    def _all_reduce(self, x: Any, out: Any, op: str, algorithm: str, deadline_ns: int) -> Any:
        given = as_placed(x, "x")
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        if out is None:
            target = Target(given, "x", load=True)
            source = target.flat
        else:
            target = Target(require_size(as_placed(out, "out"), given.dtype, given.size, "out"), "out")
            source = packed(given)
            require_apart(source, target.flat)
        shape = shape_of(self._ask(Operation.ALL_REDUCE, algorithm, source.size, dtype))
        flat = target.flat
        if shape.plan.eager:
            sides = [Side((PUB,), source, 1, source), Side((OUT,), flat, store=flat)]
        elif out is None:
            sides = [Side((IN, OUT), flat, 1, flat, flat)]
        elif IN in shape.plan.exposed and not self._is_readable(source):
            sides = [Side((IN, OUT), flat, 1, source, flat)]
        else:
            sides = [Side((IN,), source, 1, source), Side((OUT,), flat, 1, None, flat)]
        job = Job(shape=shape, sides=sides, count=source.size, dtype=dtype, reduction=reduction)
        self._perform(job, deadline_ns, Said(x, out, op, algorithm, NO_ROOT))
        target.bring_home()
        return x if out is None else out

    def reduce(
        self,
        x: Any,
        root: int,
        out: Any = None,
        *,
        op: str = "sum",
        algorithm: str = "auto",
        deadline_ns: int = 0,
    ) -> Any:
        """Combine every rank's `x`; rank `root` of the group gets the result in `out` (default: `x`).

        Returns the result at the root and None elsewhere, where `x` stays intact and `out` is not used.
        `algorithm`: auto, eager, direct, shared or tree.
        """
        done = self.fast_path.run(_REDUCE, x, out, op, algorithm, root, deadline_ns)
        if done is not None:
            return self._at_root(root, x if out is None else out) if done else self.fast_path_failed()
        given, place = as_placed(x, "x"), self._root(root)
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        at_root, source = place == self.place, packed(given)
        target: Target[Any] | None = None
        if at_root and out is None:
            target = Target(given, "x", load=True)
            source = target.flat
        elif at_root:
            target = Target(require_size(as_placed(out, "out"), given.dtype, given.size, "out"), "out")
            require_apart(source, target.flat)
        shape = shape_of(self._ask(Operation.REDUCE, algorithm, source.size, dtype, root=place))
        first = (PUB,) if shape.plan.eager else (IN,)
        sides = [Side(first, source, 1, source)]
        if target is not None and target.flat is source and not shape.plan.eager:
            sides = [Side((IN, OUT), source, 1, source, source)]
        elif target is not None:
            sides.append(Side((OUT,), target.flat, 1, None, target.flat))
        job = Job(shape=shape, sides=sides, count=source.size, dtype=dtype, reduction=reduction)
        self._perform(job, deadline_ns, Said(x, out, op, algorithm, root))
        if target is None:
            return None
        target.bring_home()
        return x if out is None else out

    def broadcast(self, x: Any, root: int, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Every rank's `x` becomes that of rank `root` of the group. Any dtype without objects.

        `algorithm`: auto, eager, direct or tree.
        """
        done = self.fast_path.run(_BROADCAST, x, None, "sum", algorithm, root, deadline_ns)
        if done is not None:
            return x if done else self.fast_path_failed()
        place = self._root(root)
        given = as_placed(x, "x")
        # The root's array is only read, so it need not be writeable.
        target = None if place == self.place else Target(given, "x", load=True)
        flat = as_bytes(packed(given) if target is None else target.flat, "x")
        shape = shape_of(self._ask(Operation.BROADCAST, algorithm, flat.size, BYTES_CODE, root=place))
        sides = [Side((OUT,), flat, 1, flat, flat, only_read=target is None)]
        if shape.plan.eager:
            sides.append(Side((PUB,), flat, 1, flat))
        job = Job(shape=shape, sides=sides, count=flat.size, dtype=BYTES_CODE)
        self._perform(job, deadline_ns, Said(x, None, "sum", algorithm, root))
        if target is not None:
            target.bring_home()
        return x

    def all_gather(self, x: Any, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0) -> Any:
        """Collect every rank's `x` into `out`, shape (size, *x.shape), in the order of the members.

        `x` may be the rank's own part of `out`. Any dtype without objects. `algorithm`: auto, eager,
        direct or ring.
        """
        if out is None:
            out = self._new(x, lambda shape: (self.size, *shape))
        done = self.fast_path.run(_ALL_GATHER, x, out, "sum", algorithm, NO_ROOT, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        given = as_placed(x, "x")
        result, target = self._output(out, (self.size, *given.shape), given)
        source, flat = as_bytes(packed(given), "x"), as_bytes(target.flat, "out")
        if not is_block(source, flat, self.place * source.size):
            require_apart(source, flat)
        shape = shape_of(self._ask(Operation.ALL_GATHER, algorithm, source.size, BYTES_CODE))
        first = (PUB,) if shape.plan.eager else (IN,)
        sides = [Side(first, source, 1, source), Side((OUT,), flat, self.size, None, flat)]
        job = Job(shape=shape, sides=sides, count=source.size, dtype=BYTES_CODE)
        self._perform(job, deadline_ns, Said(x, out, "sum", algorithm, NO_ROOT))
        target.bring_home()
        return result

    def gather(
        self, x: Any, root: int, out: Any = None, *, algorithm: str = "auto", deadline_ns: int = 0
    ) -> Any:
        """Collect every rank's `x` at rank `root` in `out`, shape (size, *x.shape), in the order of the
        members.

        Returns `out` at the root and None elsewhere, where `out` is not used. At the root `x` may be its part
        of `out`. Any dtype without objects. `algorithm`: auto, eager or direct.
        """
        if out is None and root == self.place:
            out = self._new(x, lambda shape: (self.size, *shape))
        done = self.fast_path.run(_GATHER, x, out, "sum", algorithm, root, deadline_ns)
        if done is not None:
            return self._at_root(root, out) if done else self.fast_path_failed()
        given, place = as_placed(x, "x"), self._root(root)
        source = as_bytes(packed(given), "x")
        layout = gather_layout((source.size,) * self.size, place)
        if place != self.place:
            job = self._laid_out(Operation.GATHER, algorithm, layout, source, None, root=place)
            self._perform(job, deadline_ns, Said(x, out, "sum", algorithm, root))
            return None
        result, target = self._output(out, (self.size, *given.shape), given)
        flat = as_bytes(target.flat, "out")
        if not is_block(source, flat, place * source.size):
            require_apart(source, flat)
        job = self._laid_out(Operation.GATHER, algorithm, layout, source, flat, root=place)
        self._perform(job, deadline_ns, Said(x, out, "sum", algorithm, root))
        target.bring_home()
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
            out = self._new(x, lambda shape: shape[1:])
        done = self.fast_path.run(_SCATTER, x, out, "sum", algorithm, root, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        place = self._root(root)
        source: Placed | None = None
        if place == self.place:
            given = self._blocks_of(as_placed(x, "x"))
            result, target = self._output(out, given.shape[1:], given)
            source = as_bytes(packed(given), "x")
            if not is_block(as_bytes(target.flat, "out"), source, place * target.flat.nbytes):
                require_apart(source, target.flat)
        elif out is None:
            raise UserError(
                f"rank {self.place} is not the root: pass the array that takes its block as `out`"
            )
        else:
            result, target = out, Target(as_placed(out, "out"), "out")
        flat = as_bytes(target.flat, "out")
        layout = scatter_layout((flat.size,) * self.size, place)
        job = self._laid_out(Operation.SCATTER, algorithm, layout, source, flat, root=place)
        self._perform(job, deadline_ns, Said(x, out, "sum", algorithm, root))
        target.bring_home()
        return result

    def reduce_scatter(
        self, x: Any, out: Any = None, *, op: str = "sum", algorithm: str = "auto", deadline_ns: int = 0
    ) -> Any:
        """Combine every rank's `x`, shape (size, …), and keep the block of this rank in `out`, shape (…).

        `out` may be the rank's own block of `x`. `op` as in `all_reduce`. `algorithm`: auto, eager, direct or
        ring.
        """
        if out is None:
            out = self._new(x, lambda shape: shape[1:])
        done = self.fast_path.run(_REDUCE_SCATTER, x, out, op, algorithm, NO_ROOT, deadline_ns)
        if done is not None:
            return out if done else self.fast_path_failed()
        given = as_placed(x, "x")
        dtype, reduction = dtype_code(given.dtype), reduction_code(op, given.dtype)
        self._blocks_of(given)
        result, target = self._output(out, given.shape[1:], given)
        source, flat = packed(given), target.flat
        if not is_block(flat, source, self.place * flat.size):
            require_apart(source, flat)
        ask = self._ask(Operation.REDUCE_SCATTER, algorithm, flat.size, dtype, published=source.size)
        shape = shape_of(ask)
        if shape.plan.eager:
            layout = reduce_scatter_layout((flat.size,) * self.size)
            job = self._laid_out(
                Operation.REDUCE_SCATTER, algorithm, layout, source, flat, dtype=dtype, reduction=reduction
            )
        else:
            sides = [Side((IN,), source, self.size, source), Side((OUT,), flat, 1, None, flat)]
            job = Job(shape=shape, sides=sides, count=flat.size, dtype=dtype, reduction=reduction)
        self._perform(job, deadline_ns, Said(x, out, op, algorithm, NO_ROOT))
        target.bring_home()
        return result

    def barrier(self, *, deadline_ns: int = 0) -> None:
        """Return once every member has called it."""
        done = self.fast_path.run(_BARRIER, None, None, "sum", "auto", NO_ROOT, deadline_ns)
        if done is False:
            self.fast_path_failed()
        if done:
            return
        shape = shape_of(self._ask(Operation.BARRIER, "auto", 0, BYTES_CODE))
        job = Job(shape=shape, sides=[], count=0, dtype=BYTES_CODE)
        self._perform(job, deadline_ns, Said(None, None, "sum", "auto", NO_ROOT))

    def _at_root(self, root: int, result: Any) -> Any:
        return result if root == self.place else None

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
        ask = self._ask(
            Operation.ALL_REDUCE_SHARDS,
            "auto",
            result.size,
            dtype,
            shards=shards,
            assignment=tuple(assignment),
        )
        self._perform(Job(shape=shape_of(ask), sides=sides, count=result.size, dtype=dtype), deadline_ns)
        target.bring_home()
        return out
