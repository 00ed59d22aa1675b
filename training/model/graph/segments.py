"""Segments of a traced tape: what is launched as one CUDA graph, between what graphs cannot hold.

A segment ends where its pass does, where ranks exchange something, and where gradients are final that the
caller takes early. Each is captured once for the arrays at hand, and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from zbmd.training.autograd.op_watch import active_watch
from zbmd.training.autograd.parameter_layout import ParameterSlot
from zbmd.training.autograd.tape import GradReady
from zbmd.training.model.graph.cuda_executor import CudaGraphRun
from zbmd.training.model.graph.ir import EXCHANGES, GRADIENT, PASSES, Graph, Node
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.executor import Graph as CapturedGraph
from zbmd.transport.errors import LocalProtocolError

CAPTURES_MAX: Final = 32
"""Of one run: one for each buffer of gradients and weights, pass by pass, with and without early ends."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes that follow each other, and the parameters whose gradients are final after them, by index."""

    nodes: tuple[Node, ...]
    parameters: tuple[int, ...]
    exchange: Node | None = None
    """The node after them that ranks along `tp` take part in, if there is one."""


def nodes_of_pass(graph: Graph, number: int) -> Sequence[Node]:
    """Return the nodes of one of `PASSES`, in their order."""
    return [node for node in graph.nodes if PASSES[node.phase] == number]


def segments_of(
    graph: Graph, nodes: Sequence[Node], slots: Sequence[ParameterSlot], spans: Sequence[slice] = ()
) -> list[Segment]:
    """Return `nodes` in segments: one ends at an exchange, or where all gradients of a span are final.

    slots: the parameters, which follow each other; spans count elements from the first one on.
    """
    made_by = {number: place for place, node in enumerate(nodes) for number in node.outputs}
    final: dict[int, list[int]] = {}
    for index, slot in enumerate(slots):
        place = made_by.get(graph.outputs[GRADIENT + slot.name])
        if place is not None:
            final.setdefault(place, []).append(index)
    span_of = {
        index: number
        for number, span in enumerate(spans)
        for index, slot in enumerate(slots)
        if span.start <= slot.offset - slots[0].offset < span.stop
    }
    left = {number: list(span_of.values()).count(number) for number in range(len(spans))}
    found, held, parameters = list[Segment](), list[Node](), list[int]()
    for place, node in enumerate(nodes):
        exchange = node if node.op in EXCHANGES else None
        if exchange is None:
            held.append(node)
        done = final.get(place, [])
        parameters += done
        for number in (span_of[index] for index in done if index in span_of):
            left[number] -= 1
        ends = any(left[span_of[index]] == 0 for index in done if index in span_of)
        if ends or exchange is not None or place == len(nodes) - 1:
            found.append(Segment(tuple(held), tuple(parameters), exchange))
            held, parameters = [], []
    return found


class SegmentedRun:
    """Plays segments of one run, as captured graphs if its program has run before."""

    def __init__(self, run: CudaGraphRun, executor: Executor) -> None:
        self.run: Final = run
        self._executor = executor
        self._captured = dict[tuple[object, ...], list[CapturedGraph]]()

    def play(
        self,
        segments: Sequence[Segment],
        key: tuple[object, ...],
        bind: Callable[[], None],
        on_grad_ready: GradReady | None = None,
        exchange: Callable[[Node], None] | None = None,
    ) -> None:
        """Compute segments, which follow each other. `bind` names the arrays that `key` tells apart.

        exchange: performs a node that ranks along `tp` take part in. The first time that any run of the
        program computes these, they are launched node by node, which loads kernels and allocates; so they are
        while ops are watched, since no event within a replayed graph says when it was reached. The kernels
        and their arguments are the same, and so are the bits.
        """
        if not segments:
            return
        watch, graphs = active_watch(), list[CapturedGraph]()
        if watch is None:
            graphs = self._graphs(segments, key, bind)
        else:
            bind()
        for number, segment in enumerate(segments):
            if watch is not None:
                for node in segment.nodes:
                    with watch.kernel(self.run.described(node)):
                        self.run.launch((node,))
            elif not graphs:
                self.run.launch(segment.nodes)
            elif segment.nodes:
                self._executor.replay(graphs[number])
            if segment.exchange is not None:
                (exchange or _refused)(segment.exchange)
            if on_grad_ready is not None:
                for parameter in segment.parameters:
                    on_grad_ready(parameter)
        self.run.program.warm.update(node.number for segment in segments for node in segment.nodes)

    def close(self) -> None:
        """Destroy what was captured, once the device is done with it."""
        self._executor.drop(one for graphs in self._captured.values() for one in graphs if one.number)
        self._captured.clear()

    def _graphs(
        self, segments: Sequence[Segment], key: tuple[object, ...], bind: Callable[[], None]
    ) -> list[CapturedGraph]:
        """Return a graph for each segment, captured now if there is none; none before the first run."""
        found = self._captured.get(key)
        if found is not None:
            return found
        bind()
        if any(node.number not in self.run.program.warm for segment in segments for node in segment.nodes):
            return []
        if len(self._captured) >= CAPTURES_MAX:
            oldest = self._captured.pop(next(iter(self._captured)))
            self._executor.drop(one for one in oldest if one.number)
        made = list[CapturedGraph]()
        for segment in segments:
            if not segment.nodes:  # an exchange follows another one
                made.append(CapturedGraph())
                continue
            with self._executor.capturing() as graph:
                self.run.launch(segment.nodes)
            made.append(graph)
        self._captured[key] = made
        return made


def _refused(node: Node) -> None:
    raise LocalProtocolError(f"{node.op} is exchanged along tp, and the model is not divided")
