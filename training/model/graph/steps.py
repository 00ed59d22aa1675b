"""Compute the steps of a model on a device by its fused graph, captured as CUDA graphs.

For each shape of a batch the graph is traced, fused and given memory once. The first run launches node by
node, which loads kernels and allocates. From the second run on, launches are captured for the weights and
gradients at hand, and replayed: a run is one launch, or one for each span of the gradient that the caller
takes early. The batch that follows is uploaded meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import unwatched
from zbmd.training.autograd.tape import GradReady
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.graph.cuda_executor import CudaGraphRun, CudaProgram, SharedMemory
from zbmd.training.model.graph.fusion import fuse
from zbmd.training.model.graph.inputs import BatchInputs
from zbmd.training.model.graph.passes import SHAPES_MAX
from zbmd.training.model.graph.segments import Segment, SegmentedRun, segments_of
from zbmd.training.model.graph.trace import trace_step
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import PendingLoss
from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True)
class _Shape:
    """State for batches of one shape. cut: with the ends of spans, `whole` without."""

    played: SegmentedRun
    inputs: BatchInputs
    shared: SharedMemory
    whole: Sequence[Segment]
    cut: Sequence[Segment]


class FusedSteps:
    """A `WholeStep` of `model`. spans: runs of the flat gradient that are handed over one by one."""

    def __init__(self, model: GPT, executor: Executor, *, spans: Sequence[slice] = ()) -> None:
        self._model, self._run, self._spans = model, executor, spans
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._coming = deque[Batch]()
        """Batches that come next, as far as they are known."""
        self._then: Callable[[], Sequence[Batch]] = tuple

    def follow(self, batches: Sequence[Batch], then: Callable[[], Sequence[Batch]] = tuple) -> None:
        """Note which batches are computed next, in their order: each is uploaded while that before it runs.

        then: returns those that come after these. It is called once these are launched, and may take a while.
        """
        self._coming, self._then = deque(batches), then

    def _upload_next(self) -> None:
        if not self._coming:
            self._coming, self._then = deque(self._then()), tuple
        if self._coming:
            self._shape_of(self._coming[0]).inputs.upload(self._coming[0])

    def __call__(
        self, params: Array, grads: Array, batch: Batch, on_grad_ready: GradReady | None
    ) -> tuple[Array, Callable[[], None]]:
        """See `WholeStep`."""
        shape, run = self._shape_of(batch), self._run
        computed = shape.played.run
        losses = run.empty(computed.losses.size, np.float32)
        given = cast(DeviceArray, params), cast(DeviceArray, grads)
        play = partial(self._play, shape, batch, on_grad_ready, losses, computed.arena, *given)
        return cast(Array, PendingLoss(run, losses, batch.weight)), play

    def close(self) -> None:
        """Forget all graphs, and give their memory back."""
        while self._shapes:
            self._forget(next(iter(self._shapes)))

    def _shape_of(self, batch: Batch) -> _Shape:
        config, key = self._model.config, batch.inputs.shape
        if config.dropout and batch.noise is None:
            raise LocalProtocolError("a step of a model with dropout needs the noise of its samples")
        found = self._shapes.pop(key, None)
        if found is None:
            if len(self._shapes) >= SHAPES_MAX:
                self._forget(next(iter(self._shapes)))
            found = self._traced(*key)
        self._shapes[key] = found
        return found

    def _traced(self, sequences: int, length: int) -> _Shape:
        model = self._model
        with unwatched():
            traced = trace_step(
                model.config,
                sequences=sequences,
                length=length,
                precision="bfloat16",
                recompute=model.recompute,
                matmul_precision=self._run.matmul_precision,
            )
        graph = fuse(traced.graph, target="cuda").graph
        inputs, shared = BatchInputs(self._run, [graph]), SharedMemory(self._run)
        run = CudaGraphRun(CudaProgram(traced, graph, self._run), self._run, inputs, shared)
        whole, cut = (
            segments_of(graph, graph.nodes, model.layout.slots, spans) for spans in ((), self._spans)
        )
        return _Shape(SegmentedRun(run, self._run), inputs, shared, whole, cut)

    def _forget(self, key: tuple[int, ...]) -> None:
        shape = self._shapes.pop(key)
        shape.played.close()
        shape.inputs.close()
        shape.shared.close()

    def _play(
        self,
        shape: _Shape,
        batch: Batch,
        on_grad_ready: GradReady | None,
        losses: DeviceArray,
        _: DeviceArray,
        params: DeviceArray,
        grads: DeviceArray,
    ) -> None:
        """Compute; the arena among the arguments is what the step holds until then."""
        segments, run = shape.whole if on_grad_ready is None else shape.cut, shape.played.run
        shape.inputs.load(batch)
        if self._coming and self._coming[0] is batch:
            self._coming.popleft()

        def bind() -> None:
            layout = self._model.layout
            names = [slot.name for slot in layout.slots]
            given = (cast(list[DeviceArray], layout.views(cast(Array, one))) for one in (params, grads))
            run.bind(*(dict(zip(names, one, strict=True)) for one in given))

        shape.played.play(
            segments, (params.address, grads.address, on_grad_ready is not None), bind, on_grad_ready
        )
        self._run.copy(losses, run.losses)
        self._count_passes()
        self._upload_next()

    def _count_passes(self) -> None:
        """Tell the profiler which passes were asked for: a graph takes the host no time for any of them."""
        model = self._model
        for unit in range(len(model.unit_names)):
            with spans.FORWARD[unit]:
                pass
            with spans.BACKWARD[unit]:
                if model.recompute and 0 < unit <= model.config.layers:
                    with spans.RECOMPUTE:
                        pass
