"""Compute the passes of runs of units on a device by fused graphs: what lies between collectives of a mesh.

Where other work lies between the units of a model, as gathers of weights or messages to other stages, a step
is no single graph. Each pass of each run of units is then a graph of its own. Several passes of one run are
under way at once, one for each logical shard: each has memory of its own for what its backward pass reads, at
fixed addresses, and all share the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from zbmd.training.autograd import spans
from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.op_watch import unwatched
from zbmd.training.autograd.tape import GradReady
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.graph.cuda_executor import NOTHING, CudaGraphRun, CudaProgram, SharedMemory
from zbmd.training.model.graph.fusion import fuse
from zbmd.training.model.graph.inputs import BatchInputs
from zbmd.training.model.graph.ir import ACTIVATIONS_IN, ACTIVATIONS_OUT, PASSES, SLOPE_IN, SLOPE_OUT, Node
from zbmd.training.model.graph.segments import Segment, SegmentedRun, nodes_of_pass, segments_of
from zbmd.training.model.graph.trace import slots_of_units, trace_units
from zbmd.training.model.tensor_parallel import ParallelGPT, PartOfGPT, gathered_sums
from zbmd.training.ops.cuda.device_array import DeviceArray
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.operators import PendingLoss, joined_sums
from zbmd.transport.errors import LocalProtocolError

SHAPES_MAX: Final = 2
"""Of batches that graphs are kept for; those of the one that was used longest ago go."""
FORWARD, BACKWARD, WEIGHTS = (PASSES[phase] for phase in ("forward", "backward", "weights"))


@dataclass(frozen=True, slots=True)
class _Shape:
    """State for batches of one shape. runs: by the units and whether gradients of weights are apart."""

    shared: SharedMemory
    runs: dict[tuple[range, bool], tuple[CudaProgram, list[FusedPass]]]


class FusedPass:
    """Room for the passes of one run of units over a batch; see `FusedUnits`."""

    def __init__(self, owner: FusedPasses, shared: SharedMemory, program: CudaProgram, units: range) -> None:
        self._owner, self._executor = owner, owner.executor
        self._splits = bool(nodes_of_pass(program.graph, WEIGHTS))
        self._slots = slots_of_units(owner.model, units)
        inputs = BatchInputs(self._executor, [program.graph])
        self._inputs, run = inputs, CudaGraphRun(program, self._executor, inputs, shared)
        self._played = SegmentedRun(run, self._executor)
        self._run = run
        self._segments = dict[tuple[int, tuple[tuple[int, int], ...]], Sequence[Segment]]()
        self._own = dict[str, DeviceArray]()
        self._bound = dict[str, DeviceArray]()
        self._weights = self._grads = list[DeviceArray]()
        self._losses: DeviceArray | None = None
        self._batch: Batch | None = None
        self.is_free = True

    @property
    def holds(self) -> Sequence[Array]:
        """See `UnitPass`."""
        return [cast(Array, self._run.arena)]

    def forward(self, batch: Batch, weights: Sequence[Array], x: Array | None) -> Array:
        """Compute the output, or a loss that is known after `backward`."""
        self._weights = _on_device(weights)
        self._batch, self._run.loss_weight = batch, batch.weight
        self._inputs.load(batch)
        self._bound.clear()
        self._take(ACTIVATIONS_IN, x)
        self._play(FORWARD)
        self._let_go()
        made = self._run.output(ACTIVATIONS_OUT)
        if made is not None:
            self._owner.lasting.add(made.address)
            return cast(Array, made)
        self._losses = self._executor.empty(self._run.losses.size, self._run.losses.dtype)
        return cast(Array, PendingLoss(self._executor, self._losses, batch.weight))

    def backward(
        self,
        weights: Sequence[Array],
        grads: Sequence[Array],
        slope: Array,
        on_grad_ready: GradReady | None = None,
        ends: Sequence[slice] = (),
    ) -> Array | None:
        """See `UnitPass`."""
        self._weights, self._grads = _on_device(weights), _on_device(grads)
        made = self._run.output(SLOPE_OUT)
        if self._losses is None:
            self._take(SLOPE_IN, slope)
        elif float(slope) != 1.0:
            raise LocalProtocolError(
                f"a loss scale of {float(slope):g} was given: gradients of bf16 on a device need none"
            )
        self._play(BACKWARD, on_grad_ready, ends)
        if not self._splits:
            self._let_go()
        if self._losses is not None:
            self._executor.copy(self._losses, self._run.losses)
            self._losses = None
        if made is not None:
            self._owner.lasting.add(made.address)
        return cast(Array | None, made)

    def weight_gradient(self, on_grad_ready: GradReady | None = None, ends: Sequence[slice] = ()) -> None:
        """See `UnitPass`."""
        self._play(WEIGHTS, on_grad_ready, ends)
        self._let_go()

    def leave(self) -> None:
        """See `UnitPass`."""
        self._let_go()
        self.is_free, self._losses = True, None

    def _let_go(self) -> None:
        """Keep no weights or gradients alive: they may be those of other units by the next pass."""
        self._weights, self._grads = [], []
        self._run.let_go()

    def close(self) -> None:
        """Give all memory back."""
        self._played.close()
        self._inputs.close()

    def _take(self, name: str, given: Array | None) -> None:
        """Bind an input, whose copy lies where it always does unless it does so itself."""
        if given is None:
            return
        array = cast(DeviceArray, given)
        if array.address not in self._owner.lasting:
            own = self._own.get(name)
            if own is None:
                own = self._own[name] = self._executor.empty(array.shape, array.dtype)
            self._executor.copy(own, array)
            array = own
        self._bound[name] = array

    def _exchange(self, node: Node) -> None:
        """Take part in what ranks along `tp` exchange; the device reads what came in its order."""
        model, run, batch = self._owner.model, self._run, self._batch
        assert isinstance(model, ParallelGPT) and batch is not None and batch.targets is not None
        outputs, inputs = run.arrays(node.outputs), run.arrays(node.inputs)
        if node.op == "join_sums":
            every = gathered_sums(model.group, inputs[0].get())
            log_sums, losses = joined_sums(every, batch.targets, model.config.vocabulary)
            self._executor.upload(log_sums, outputs[1])
            self._executor.upload(losses, run.losses)
            return
        blocking: Any = model.group.blocking
        (made,), (given,), size = outputs, inputs, model.group.size
        with spans.COMM:
            if node.op == "all_gather":
                blocking.all_gather(given, out=made.reshape(size, *given.shape))
            elif node.op == "reduce_scatter":
                blocking.reduce_scatter(given.reshape(size, *made.shape), out=made)
            else:
                self._executor.copy(made, given)
                blocking.all_reduce(made)

    def _play(self, number: int, on_grad_ready: GradReady | None = None, ends: Sequence[slice] = ()) -> None:
        cuts = () if on_grad_ready is None else tuple((one.start, one.stop) for one in ends)
        grads = self._grads if number != FORWARD else []
        every = (*self._weights[:1], *grads[:1], *self._bound.values())
        key = (number, cuts, self._run.loss_weight, *(one.address for one in every))

        def bind() -> None:
            names = [slot.name for slot in self._slots]
            by_name = dict(zip(names, grads, strict=True)) if grads else NOTHING
            self._run.bind(dict(zip(names, self._weights, strict=True)), by_name, self._bound)

        if (number, cuts) not in self._segments:
            graph, cut = self._run.graph, [slice(*one) for one in cuts]
            nodes = nodes_of_pass(graph, number)
            self._segments[number, cuts] = segments_of(graph, nodes, self._slots, cut)
        self._played.play(self._segments[number, cuts], key, bind, on_grad_ready, self._exchange)


class FusedPasses:
    """`FusedUnits` of `model`, computed by `executor`."""

    def __init__(self, model: GPT, executor: Executor) -> None:
        self.model, self.executor = model, executor
        self.lasting: Final = set[int]()
        """The addresses of outputs, which stay as long as this object."""
        self._shapes = dict[tuple[int, ...], _Shape]()

    def begin(self, units: range, batch: Batch, *, splits: bool = False) -> FusedPass:
        """See `FusedUnits`: room that nothing uses, the same again in each step."""
        if self.model.config.dropout and batch.noise is None:
            raise LocalProtocolError("a step of a model with dropout needs the noise of its samples")
        shape = self._shape_of(batch.inputs.shape)
        if (units, splits) not in shape.runs:
            shape.runs[units, splits] = self._traced(batch.inputs.shape, units, splits), []
        program, rooms = shape.runs[units, splits]
        found = next((room for room in rooms if room.is_free), None)
        if found is None:
            found = FusedPass(self, shape.shared, program, units)
            rooms.append(found)
        found.is_free = False
        return found

    def close(self) -> None:
        """Forget all graphs, and give their memory back."""
        while self._shapes:
            self._forget(next(iter(self._shapes)))

    def _shape_of(self, key: tuple[int, ...]) -> _Shape:
        found = self._shapes.pop(key, None)
        if found is None:
            if len(self._shapes) >= SHAPES_MAX:
                self._forget(next(iter(self._shapes)))
            found = _Shape(SharedMemory(self.executor), {})
        self._shapes[key] = found
        return found

    def _traced(self, shape: tuple[int, ...], units: range, splits: bool) -> CudaProgram:
        model = self.model
        with unwatched():
            traced = trace_units(
                model.config,
                units,
                sequences=shape[0],
                length=shape[1],
                precision="bfloat16",
                recompute=model.recompute,
                matmul_precision=self.executor.matmul_precision,
                splits=splits,
                part=(model.part, model.shards.parts) if isinstance(model, PartOfGPT) else (0, 1),
            )
        graph = fuse(traced.graph, target="cuda").graph
        return CudaProgram(traced, graph, self.executor, keeps=True)

    def _forget(self, key: tuple[int, ...]) -> None:
        shape = self._shapes.pop(key)
        for _, rooms in shape.runs.values():
            for room in rooms:
                room.close()
        shape.shared.close()
        self.lasting.clear()


def _on_device(arrays: Sequence[Array]) -> list[DeviceArray]:
    return cast(list[DeviceArray], list(arrays))
