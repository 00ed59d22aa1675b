"""Find sequences of a graph that one kernel computes, and say for each why it is fused, or why not.

A fused node takes the place of its last node; what only its body reads is never written to memory. Target
`cuda` has the kernels of `zbmd.training.ops.cuda`: a sequence that none of them covers stays as it was.
Target `numpy`, the reference, covers every sequence that is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from zbmd.training.model.graph.ir import ACTIVATIONS, ELEMENTWISE, Graph, Node, Value
from zbmd.training.ops.cuda.operators import DEPTHS

Target = Literal["numpy", "cuda"]
NORMS: Final = ("rms_norm", "layer_norm")
_ATTENTION_GRADIENT: Final = ("mix_grad", "softmax_grad", "scores_grad", "pack")
NORM_GRADIENTS: Final = tuple(f"{name}_grad" for name in NORMS)
_SLOPES: Final = tuple(f"{name}_grad" for name in ACTIVATIONS)
_EPILOGUE: Final = {
    "add_bias": 0,
    **dict.fromkeys(ACTIVATIONS, 1),
    **dict.fromkeys(("add", *_SLOPES), 2),
    "cast": 3,
}
"""Ops that the kernels of products apply before they store, in their order."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. nodes: their numbers; saved_bytes: memory traffic of a step that fusing them saves."""

    kind: str
    ops: str
    nodes: tuple[int, ...]
    unit: int
    phase: str
    is_fused: bool
    reason: str
    saved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph after all passes, and every decision."""

    graph: Graph
    decisions: tuple[Decision, ...]


def fuse(graph: Graph, *, target: Target) -> Fused:
    """Return `graph` with its fusible sequences fused."""
    work = _Work(graph.values.copy(), list(graph.nodes), dict(graph.outputs), target)
    passes: tuple[Callable[[_Pass], None], ...] = (
        _copies,
        _unused,
        _attention,
        _loss,
        _epilogues,
        _residual_norms,
        _norm_gradients,
        _chains,
        _norm_products,
    )
    for one in passes:
        made = _Pass(work)
        one(made)
        made.apply()
    return Fused(work.graph().check(), tuple(work.decisions))


@dataclass(slots=True)
class _Work:
    values: dict[int, Value]
    nodes: list[Node]
    outputs: dict[str, int]
    target: Target
    decisions: list[Decision] = field(default_factory=list)

    def graph(self) -> Graph:
        return Graph(values=self.values, nodes=tuple(self.nodes), outputs=self.outputs)


class _Pass:
    """One walk over the graph: it collects groups that share no node, and applies them at its end."""

    def __init__(self, work: _Work) -> None:
        self.work, self.graph = work, work.graph()
        self.nodes, self.values, self.target = self.graph.nodes, self.graph.values, work.target
        self._uses, self.made_at = self.graph.uses(), self.graph.made_at()
        self._kept = set(self.graph.outputs.values())
        self.grouped: dict[int, int] = {}
        """The group of each position that is in one."""
        self._groups: list[tuple[int, Node]] = []

    def readers(self, value: int) -> list[int]:
        """Return the positions that read `value`."""
        return self._uses.get(value, [])

    def only_reader(self, value: int) -> int | None:
        """Return the one position that reads `value`, if nothing else needs it."""
        readers = self.readers(value)
        return readers[0] if len(readers) == 1 and value not in self._kept else None

    def maker(self, value: int) -> int | None:
        """Return the position that writes `value`, if a node does."""
        return self.made_at.get(value)

    def group(
        self,
        kind: str,
        places: Sequence[int],
        reason: str,
        *,
        op: str = "",
        extra: Node | None = None,
        at_first: bool = False,
    ) -> bool:
        """Fuse the nodes at `places`; return whether that is possible. extra: the node to put there.

        at_first: all that they read is written before the first of them, so that it can be put there.
        """
        places = sorted(places)
        body = tuple(self.nodes[place] for place in places)
        made = {number for node in body for number in node.outputs}
        outside = {n: set(self.readers(n)) - set(places) for n in made}
        outputs = [n for n, readers in outside.items() if n in self._kept or readers]
        is_early = any(reader < places[-1] for readers in outside.values() for reader in readers)
        if (is_early and not at_first) or any(place in self.grouped for place in places):
            return False
        inputs = dict.fromkeys(n for node in body for n in node.inputs if n not in made)
        last = body[-1]
        fused = extra or Node(
            number=last.number,
            op=op or kind,
            inputs=tuple(inputs),
            outputs=tuple(sorted(outputs)),
            unit=last.unit,
            phase=last.phase,
            body=body,
        )
        for place in places:
            self.grouped[place] = len(self._groups)
        self._groups.append((places[0] if at_first else places[-1], fused))
        saved = self.graph.traffic(body) - self.graph.traffic([fused])
        self.decide(kind, body, reason, is_fused=True, saved=saved)
        return True

    def decide(
        self, kind: str, nodes: Sequence[Node], reason: str, *, is_fused: bool = False, saved: int = 0
    ) -> None:
        """Record a decision."""
        self.work.decisions.append(
            Decision(
                kind=kind,
                ops=" + ".join(node.ops for node in nodes),
                nodes=tuple(node.number for node in nodes),
                unit=nodes[-1].unit,
                phase=nodes[-1].phase,
                is_fused=is_fused,
                reason=reason,
                saved_bytes=saved,
            )
        )

    def apply(self) -> None:
        """Put each fused node in its place, and leave out what it stands for."""
        fused_at = dict(self._groups)
        kept: list[Node] = []
        for place, node in enumerate(self.nodes):
            if place in fused_at:
                kept.append(fused_at[place])
            elif place not in self.grouped:
                kept.append(node)
        self.work.nodes = kept


# ---- copies


def _copies(walk: _Pass) -> None:
    """Values never change, so that a copy is its original."""
    renamed: dict[int, int] = {}
    kept: list[Node] = []
    for node in walk.nodes:
        inputs = tuple(renamed.get(number, number) for number in node.inputs)
        if node.op == "copy":
            renamed[node.outputs[0]] = inputs[0]
            saved = walk.graph.traffic([node])
            walk.decide("copy", [node], "values are never overwritten", is_fused=True, saved=saved)
        else:
            kept.append(msgspec.structs.replace(node, inputs=inputs))
    walk.work.nodes = kept
    walk.work.outputs = {name: renamed.get(n, n) for name, n in walk.graph.outputs.items()}
    walk.nodes, walk.grouped = tuple(kept), {}


def _unused(walk: _Pass) -> None:
    """Drop what nothing reads, as the end of a block that is computed again."""
    needed, kept = set(walk.graph.outputs.values()), list[Node]()
    for node in reversed(walk.nodes):
        if needed.isdisjoint(node.outputs):
            saved = walk.graph.traffic([node])
            walk.decide("unused", [node], "nothing reads it, so it is left out", is_fused=True, saved=saved)
        else:
            kept.append(node)
            needed.update(node.inputs)
    walk.work.nodes = kept[::-1]
    walk.nodes = tuple(walk.work.nodes)


# ---- attention and loss


def _attention(walk: _Pass) -> None:
    for place, mix in enumerate(walk.nodes):
        if mix.op != "mix":
            continue
        softmax = walk.maker(mix.inputs[0])
        scores = None if softmax is None else walk.maker(walk.nodes[softmax].inputs[0])
        if softmax is None or scores is None or walk.nodes[softmax].op != "softmax":
            continue
        first = walk.nodes[scores]
        if first.op == "scores" and walk.only_reader(first.outputs[0]) == softmax:
            _fuse_attention(walk, scores, softmax, place)


def _fuse_attention(walk: _Pass, scores: int, softmax: int, mix: int) -> None:
    first, last = walk.nodes[scores], walk.nodes[mix]
    odds, qkv = last.inputs
    depth = walk.values[qkv].shape[1] // 3 // int(first.attributes["heads"])
    nodes = [walk.nodes[place] for place in (scores, softmax, mix)]
    if walk.target == "cuda" and depth not in DEPTHS:
        known = " and ".join(map(str, DEPTHS))
        walk.decide("attention", nodes, f"heads of {depth} features: kernels exist for {known}")
        return
    back = [place for place in walk.readers(odds) if place != mix]
    rest = _gradient_of(walk, back)
    if back and rest is None:
        walk.decide("attention", nodes, "the probabilities are read by something else")
        return
    batch, heads, length, _ = walk.values[odds].shape
    logs = max(walk.work.values) + 1
    sums = "float32" if walk.values[qkv].dtype == "bfloat16" else walk.values[qkv].dtype
    walk.work.values[logs] = Value(number=logs, name=f"%{logs}", shape=(batch, heads, length), dtype=sums)
    forward = msgspec.structs.replace(
        last, op="attention", inputs=first.inputs, outputs=(*last.outputs, logs), body=tuple(nodes)
    )
    reason = "scores and probabilities stay on the chip; the sum of each row is kept"
    if walk.group("attention", (scores, softmax, mix), reason, extra=forward) and rest is not None:
        body = tuple(walk.nodes[place] for place in rest)
        backward = msgspec.structs.replace(
            body[-1],
            op="attention_grad",
            inputs=(body[0].inputs[0], last.outputs[0], logs, *first.inputs),
            attributes=first.attributes,
            body=body,
        )
        walk.group("attention", rest, "probabilities are computed again from the sums", extra=backward)


def _gradient_of(walk: _Pass, back: list[int]) -> list[int] | None:
    """Return the positions of the four nodes of attention's gradient, if `back` are two of them."""
    if len(back) != 2 or [walk.nodes[place].op for place in back] != ["mix_grad", "softmax_grad"]:
        return None
    dscores = walk.only_reader(walk.nodes[back[1]].outputs[0])
    pack = None if dscores is None else walk.only_reader(walk.nodes[dscores].outputs[0])
    if dscores is None or pack is None:
        return None
    found = [*back, dscores, pack]
    return found if tuple(walk.nodes[place].op for place in found) == _ATTENTION_GRADIENT else None


def _loss(walk: _Pass) -> None:
    for place, node in enumerate(walk.nodes):
        if node.op != "cross_entropy":
            continue
        gradient = walk.only_reader(node.outputs[1])
        if gradient is not None:
            walk.group("loss", (place, gradient), "one pass over the logits", op="cross_entropy_both")


# ---- products


def _epilogues(walk: _Pass) -> None:
    for place, node in enumerate(walk.nodes):
        if node.op != "matmul":
            continue
        chain, reason = [place], ""
        for following, why_not in _following(walk, place):
            if why_not:
                reason = why_not
                if walk.nodes[following].phase == node.phase:
                    nodes = [walk.nodes[one] for one in (*chain, following)]
                    walk.decide("product", nodes, reason)
                break
            chain.append(following)
        if len(chain) > 1:
            walk.group("product", chain, "applied before the product is stored, rounded once")


def _following(walk: _Pass, place: int) -> Iterator[tuple[int, str]]:
    """Yield the element-wise nodes that follow a product, each with why it cannot be fused, or nothing."""
    rank, kept_before = -1, False
    while True:
        node = walk.nodes[place]
        found = _next(walk, node, may_keep=not kept_before and rank < 1)
        if found is None:
            return
        following, is_kept = found
        op = walk.nodes[following].op
        if is_kept:
            kept_before = True
        why = "" if walk.target == "numpy" else _not_covered(walk, node, walk.nodes[following], rank)
        yield following, why
        rank, place = _EPILOGUE.get(op, rank), following


def _next(walk: _Pass, node: Node, *, may_keep: bool) -> tuple[int, bool] | None:
    """Return the element-wise node that reads the output of `node` first, and whether others read it too."""
    (made,) = node.outputs
    only = walk.only_reader(made)
    if only is not None:
        is_fitting = walk.nodes[only].op in ELEMENTWISE and _same_size(walk, made, only)
        return (only, False) if is_fitting and only not in walk.grouped else None
    readers = walk.readers(made)
    if may_keep and readers and walk.nodes[readers[0]].op in ACTIVATIONS and readers[0] not in walk.grouped:
        return readers[0], True
    return None


def _same_size(walk: _Pass, value: int, place: int) -> bool:
    return walk.values[value].shape == walk.values[walk.nodes[place].outputs[0]].shape


def _not_covered(walk: _Pass, before: Node, node: Node, rank: int) -> str:
    """Return why the kernels of products do not apply `node` at their end, or nothing."""
    if node.op not in _EPILOGUE:
        return f"no epilogue of the products has {node.op}"
    if _EPILOGUE[node.op] <= rank:
        return f"the epilogue has no {node.op} after {before.op}"
    if node.op in ("add", *_SLOPES):
        other = next((n for n in node.inputs if n not in before.outputs), node.inputs[0])
        if node.op in _SLOPES and rank >= 0:
            return "the epilogue multiplies a product alone by a slope"
        if node.op in _SLOPES and node.inputs[0] not in before.outputs:
            return "the product is what the activation was given"
        if walk.values[other].dtype != "bfloat16":
            return "the epilogue adds rows of bfloat16 only"
    return ""


# ---- rows and elements


def _residual_norms(walk: _Pass) -> None:
    for place, node in enumerate(walk.nodes):
        before = walk.maker(node.inputs[0]) if node.op in NORMS else None
        if before is None or "add" not in walk.nodes[before].ops.split(" + "):
            continue
        nodes = [walk.nodes[before], node]
        if walk.nodes[before].op != "add":
            walk.decide("residual + norm", nodes, "a row is whole only after all tiles of its product")
        elif {walk.values[number].dtype for number in nodes[0].inputs} != {"bfloat16"} and (
            walk.target == "cuda"
        ):
            walk.decide("residual + norm", nodes, "the kernels add rows of bfloat16 only")
        else:
            walk.group("residual + norm", (before, place), "the row is read once")


def _norm_gradients(walk: _Pass) -> None:
    """Add the gradient that comes along the residual path to that of a norm, before it is stored."""
    for place, node in enumerate(walk.nodes):
        if node.op not in NORM_GRADIENTS:
            continue
        added = walk.only_reader(node.outputs[0])
        if added is None or walk.nodes[added].op != "add" or walk.target == "numpy":
            continue
        nodes = [node, walk.nodes[added]]
        (other,) = (number for number in nodes[1].inputs if number != node.outputs[0])
        if walk.values[other].dtype != "bfloat16":
            walk.decide("norm gradient", nodes, "the kernels add rows of bfloat16 only")
        elif (walk.maker(other) or 0) < place:
            walk.group("norm gradient", (place, added), "the sum is stored, rounded once", at_first=True)


def _chains(walk: _Pass) -> None:
    seen: set[int] = set()
    for place, node in enumerate(walk.nodes):
        if place in seen or node.op not in ELEMENTWISE:
            continue
        chain, at = [place], _next(walk, node, may_keep=False)
        while at is not None:
            chain.append(at[0])
            at = _next(walk, walk.nodes[at[0]], may_keep=False)
        if len(chain) == 1 or not seen.isdisjoint(chain):
            continue
        seen.update(chain)
        nodes = [walk.nodes[one] for one in chain]
        if walk.target == "cuda":
            walk.decide("elements", nodes, "no kernel has this chain")
        else:
            walk.group("elements", chain, "what lies between is not written")


def _norm_products(walk: _Pass) -> None:
    for node in walk.nodes:
        last = node.body[-1] if node.body else node
        if last.op not in NORMS:
            continue
        readers = [walk.nodes[place] for place in walk.readers(last.outputs[0])]
        into = next((one for one in readers if one.ops.startswith("matmul")), None)
        if into is not None:
            walk.decide(
                "norm + product",
                [last, into],
                "the weight's gradient reads the normalised rows, so they are written in any case",
            )
