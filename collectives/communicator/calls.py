"""Pieces that the operations of a communicator are made of: arguments in, jobs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from zbmd.collectives.algorithms.catalogue import Operation
from zbmd.collectives.algorithms.shard_tree import Assignment
from zbmd.collectives.communicator.pieces import Ask, Job, Side, shape_of
from zbmd.collectives.communicator.runs import Runs
from zbmd.collectives.device.arrays import DeviceArray, new_array
from zbmd.collectives.device.arrays_in import Placed, PlacedT, Target, as_placed, require_size
from zbmd.collectives.programs.layout import Layout
from zbmd.collectives.programs.program import IN, OUT, PUB
from zbmd.collectives.programs.reductions import BYTES_CODE
from zbmd.transport.errors import UserError


class Calls(Runs):
    """One member's end of a group, with what turns a call's arguments into a job."""

    def _ask(
        self,
        operation: Operation,
        algorithm: str,
        count: int,
        dtype: int,
        *,
        published: int = 0,
        root: int = 0,
        shards: int = 0,
        assignment: Assignment = (),
    ) -> Ask:
        return Ask(
            operation=operation,
            algorithm=algorithm,
            n=self.size,
            place=self.place,
            count=count,
            dtype=dtype,
            published=published,
            root=root,
            shards=shards,
            assignment=assignment,
            hosts=self.hosts,
            model=self.model,
            eager_bytes_max=self._executor.eager_bytes_max,
            far=self._executor.far,
            reads_peers=self._executor.reads_peers,
            override=self._override,
        )

    def _root(self, root: int) -> int:
        """Return `root`. Raises `UserError` unless it is a rank of the group."""
        if not 0 <= root < self.size:
            raise UserError(f"root={root} is not a rank of this group: expected 0..{self.size - 1}")
        return root

    def _output(self, out: Any, shape: tuple[int, ...], like: Placed) -> tuple[Any, Target[Any]]:
        """What the caller gets back, and the array to write: `out`, or, if it is None, a new one of `shape`
        with the dtype of `like`, where that lies.
        """
        dtype, size = like.dtype, int(np.prod(shape, dtype=np.int64))
        if out is not None:
            return out, Target(require_size(as_placed(out, "out"), dtype, size, "out"), "out")
        if isinstance(like, DeviceArray):
            made = new_array(like, shape, dtype)
            return made.given, Target(made.operand(), "out")
        result = np.empty(shape, dtype)
        return result, Target(result, "out")

    @staticmethod
    def _new(x: Any, like: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Any:
        """A new array for the result of a plain `x`; None for any other.

        It is made before the fast path is asked, which takes calls whose arrays are all there.
        """
        return np.empty(like(x.shape), x.dtype) if type(x) is np.ndarray else None

    def _is_readable(self, x: Placed) -> bool:
        """Whether peers can read it where it lies."""
        if isinstance(x, DeviceArray):
            return False
        return self._executor.reads_peers or self._segment.arena.offset_of(x) is not None

    def _blocks_of(self, x: PlacedT) -> PlacedT:
        """`x` itself. Raises `UserError` unless its first extent is the group's size."""
        if x.ndim == 0 or x.shape[0] != self.size:
            raise UserError(f"x has shape {x.shape}; its first extent must be the group's size, {self.size}")
        return x

    def _laid_out(
        self,
        operation: Operation,
        algorithm: str,
        layout: Layout,
        source: Placed | None,
        target: Placed | None,
        *,
        dtype: int = BYTES_CODE,
        reduction: int = 0,
        root: int = 0,
    ) -> Job:
        """The job over blocks that lie by a layout; a side that this rank has no part in is None."""
        published = layout.published_max
        shape = shape_of(
            self._ask(operation, algorithm, layout.longest, dtype, published=published, root=root)
        )
        sides: list[Side] = []
        if source is not None:
            sides.append(Side((PUB if shape.plan.eager else IN,), source, 1, source))
        if target is not None:
            sides.append(Side((OUT,), target, 1, None, target))
        return Job(
            shape=shape, sides=sides, count=layout.longest, dtype=dtype, reduction=reduction, layout=layout
        )
