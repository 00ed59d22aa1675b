"""Compute the steps of a model on a device by its fused graph, captured as CUDA graphs.

For each shape of a batch the graph is traced, fused and given memory once. The first run launches node by
node, which loads kernels and allocates. From the second run on, launches are captured for the weights and
gradients at hand, and replayed: a run is one launch, or one for each span of the gradient that the caller
takes early. The batch that follows is uploaded meanwhile.

A run whose ops are watched launches node by node too: no event within a replayed graph says when it was
reached. The kernels and their arguments are the same, and so are the bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, cast

import numpy as np

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import active_watch, unwatched
from zbmd.training.autograd.tape import GradReady
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.graph.cuda_executor import CudaGraphRun
from zbmd.training.model.graph.fusion import fuse
from zbmd.training.model.graph.ir import Graph, Node
from zbmd.training.model.graph.trace import trace_step
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.executor import Graph as CapturedGraph
from zbmd.training.ops.cuda.operators import PendingLoss
from zbmd.transport.errors import LocalProtocolError

SHAPES_MAX: Final = 2
"""Of batches that graphs are kept for; the one that was used longest ago goes."""
CAPTURES_MAX: Final = 32
"""Of one shape: one for each buffer of gradients, with and without early ends."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes that follow each other, and the parameters whose gradients are final after them, by index."""

    nodes: tuple[Node, ...]
    parameters: tuple[int, ...]


@dataclass(slots=True)
class _Shape:
    """State for batches of one shape. captured: by the addresses of weights and gradients."""

    run: CudaGraphRun
    whole: Sequence[Piece]
    cut: Sequence[Piece]
    captured: dict[tuple[int, int, bool], list[CapturedGraph]] = field(default_factory=dict)
    has_run: bool = False


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
            self._shape_of(self._coming[0]).run.upload(self._coming[0])

    def __call__(
        self, params: Array, grads: Array, batch: Batch, on_grad_ready: GradReady | None
    ) -> tuple[Array, Callable[[], None]]:
        """See `WholeStep`."""
        shape, run = self._shape_of(batch), self._run
        losses = run.empty(shape.run.losses.size, np.float32)
        given = cast(DeviceArray, params), cast(DeviceArray, grads)
        play = partial(self._play, shape, batch, on_grad_ready, losses, shape.run.arena, *given)
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
            )
        graph = fuse(traced.graph, target="cuda").graph
        run = CudaGraphRun(traced, graph, self._run)
        return _Shape(run, pieces_of(graph, model, ()), pieces_of(graph, model, self._spans))

    def _forget(self, key: tuple[int, ...]) -> None:
        shape = self._shapes.pop(key)
        self._run.drop(graph for captured in shape.captured.values() for graph in captured)
        shape.run.close()

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
        pieces = shape.whole if on_grad_ready is None else shape.cut
        shape.run.load(batch)
        if self._coming and self._coming[0] is batch:
            self._coming.popleft()
        watch = active_watch()
        if watch is None:
            graphs = self._captured(shape, pieces, params, grads, is_cut=on_grad_ready is not None)
        else:
            graphs = []
            self._bind(shape, params, grads)
        for number, piece in enumerate(pieces):
            if graphs:
                self._run.replay(graphs[number])
            elif watch is None:
                shape.run.launch(piece.nodes)
            else:
                for node in piece.nodes:
                    with watch.kernel(shape.run.described(node)):
                        shape.run.launch((node,))
            if number == len(pieces) - 1:
                self._run.copy(losses, shape.run.losses)
            if on_grad_ready is not None:
                for parameter in piece.parameters:
                    on_grad_ready(parameter)
        shape.has_run = True
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

    def _bind(self, shape: _Shape, params: DeviceArray, grads: DeviceArray) -> None:
        layout = self._model.layout
        named = [
            dict(zip((slot.name for slot in layout.slots), layout.views(cast(Array, one)), strict=True))
            for one in (params, grads)
        ]
        shape.run.bind(*cast(list[dict[str, DeviceArray]], named))

    def _captured(
        self, shape: _Shape, pieces: Sequence[Piece], params: DeviceArray, grads: DeviceArray, *, is_cut: bool
    ) -> list[CapturedGraph]:
        """Return a graph for each piece, captured now if there is none; none before the first run."""
        key = params.address, grads.address, is_cut
        found = shape.captured.get(key)
        if found is not None:
            return found
        self._bind(shape, params, grads)
        if not shape.has_run:
            return []
        if len(shape.captured) >= CAPTURES_MAX:
            self._run.drop(shape.captured.pop(next(iter(shape.captured))))
        made = list[CapturedGraph]()
        for piece in pieces:
            with self._run.capturing() as graph:
                shape.run.launch(piece.nodes)
            made.append(graph)
        shape.captured[key] = made
        return made


def pieces_of(graph: Graph, model: GPT, spans: Sequence[slice]) -> list[Piece]:
    """Return the nodes in pieces: one ends where all gradients in one of `spans` are final."""
    made_at = graph.made_at()
    final: dict[int, list[int]] = {}
    for index, slot in enumerate(model.layout.slots):
        final.setdefault(made_at[graph.outputs[f"grad {slot.name}"]], []).append(index)
    span_of = {
        index: number
        for number, span in enumerate(spans)
        for index, slot in enumerate(model.layout.slots)
        if span.start <= slot.offset < span.stop
    }
    left = {number: list(span_of.values()).count(number) for number in range(len(spans))}
    pieces, nodes, parameters = list[Piece](), list[Node](), list[int]()
    for place, node in enumerate(graph.nodes):
        nodes.append(node)
        done = final.get(place, [])
        parameters += done
        for number in (span_of[index] for index in done if index in span_of):
            left[number] -= 1
        ends = any(left[span_of[index]] == 0 for index in done if index in span_of)
        if ends or place == len(graph.nodes) - 1:
            pieces.append(Piece(tuple(nodes), tuple(parameters)))
            nodes, parameters = [], []
    return pieces
