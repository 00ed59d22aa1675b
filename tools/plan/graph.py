"""`zbmd plan graph`: print a step as ops, what of them one kernel computes, and the memory of all values."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from zbmd.tools.cli.options import add_command, add_json
from zbmd.tools.plan.quantities import shown_bytes
from zbmd.training.model.graph.ir import PRECISION
from zbmd.training.ops.cuda.table import MATMUL_PRECISIONS
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from zbmd.training.config import GPTConfig
    from zbmd.training.model.graph.fusion import Decision
    from zbmd.training.model.graph.ir import Graph, Node
    from zbmd.training.model.graph.memory import MemoryPlan

EXAMPLES: Final = (
    "zbmd plan graph --layers 2 --width 128 --heads 2",
    "zbmd plan graph --family gpt2 --activation gelu --layers 12 --width 768 --heads 12 --vocabulary 50257",
    "zbmd plan graph --layers 12 --width 768 --heads 12 --context 1024 --recompute on --json",
    "zbmd plan graph --device cpu --precision float32 --nodes",
)
DESCRIPTION: Final = """Trace one forward and backward pass of a shard, as the engine computes it, to a graph
of ops with shapes; list the sequences that one kernel computes, and those that none does, each with the
reason; list which kernels compute products and attention on each GPU, and why; and lay out all values in one
arena. --device cuda has the kernels of zbmd; --device cpu takes every sequence that is found."""
LAYERS_MOST: Final = 128
"""Of a graph that is printed."""
PRECISIONS: Final = {"bf16": "bfloat16", "float32": "float32"}


class KernelUse(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel that computes products or attention of a step, and how often. gpu: its architecture."""

    gpu: str
    kernel: str
    times: int
    reason: str


class MemoryFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the values that nodes write. live: the most at once; separate: without a plan."""

    arena: int
    live: int
    separate: int


def add_graph(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `graph` to the planners of `zbmd plan`."""
    made = add_command(
        kinds,
        "graph",
        "print a step's ops, what is fused and why, and its memory",
        description=DESCRIPTION,
        examples=EXAMPLES,
    )
    model = made.add_argument_group("model")
    for name, default in (("layers", 5), ("width", 128), ("heads", 2), ("context", 64), ("vocabulary", 256)):
        model.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    model.add_argument(
        "--family", choices=("zbmd", "gpt2"), default="zbmd", help="architecture (default: %(default)s)"
    )
    model.add_argument(
        "--activation", choices=("relu2", "gelu"), default="relu2", help="default: %(default)s"
    )
    model.add_argument("--dropout", type=float, default=0.0, metavar="P", help="default: %(default)s")
    step = made.add_argument_group("step")
    step.add_argument(
        "--sequences-per-shard", type=int, default=2, metavar="N", help="windows (default: %(default)s)"
    )
    step.add_argument("--precision", choices=tuple(PRECISIONS), default="bf16", help="default: %(default)s")
    step.add_argument(
        "--matmul-precision",
        choices=MATMUL_PRECISIONS,
        default="default",
        help="of linear layers (default: %(default)s)",
    )
    step.add_argument("--recompute", choices=("on", "off"), default="off", help="default: %(default)s")
    step.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    made.add_argument("--nodes", action="store_true", help="print all nodes, not those of one block")
    add_json(made)
    made.set_defaults(run_command=_graph)


def _graph(arguments: argparse.Namespace) -> int:
    from zbmd.training.model.graph.fusion import fuse  # they import the model
    from zbmd.training.model.graph.memory import plan_memory
    from zbmd.training.model.graph.trace import trace_step

    config = _config(arguments)
    if arguments.device == "cuda" and arguments.precision != "bf16":
        raise UserError("--precision: expected bf16 with --device cuda, whose kernels compute in it")
    traced = trace_step(
        config,
        sequences=arguments.sequences_per_shard,
        precision=PRECISIONS[arguments.precision],
        recompute=arguments.recompute == "on",
        matmul_precision=arguments.matmul_precision,
    )
    fused = fuse(traced.graph, target="cuda" if arguments.device == "cuda" else "numpy")
    plans = plan_memory(traced.graph), plan_memory(fused.graph)
    kernels = _kernels(fused.graph) if arguments.device == "cuda" else []
    if arguments.json:
        print(_as_json(traced.graph, fused.graph, fused.decisions, kernels, plans))
        return 0
    print(f"{config.family}: {config.layers} layers of {config.width}, {arguments.precision}, ", end="")
    print(f"{arguments.sequences_per_shard} windows of {config.context} tokens")
    units = None if arguments.nodes else {0, 1, config.layers + 1}
    for lines in (
        _nodes(fused.graph, units, config.layers),
        _decisions(fused.decisions),
        *([_kernel_lines(kernels)] if kernels else []),
        _figures(traced.graph, fused.graph, plans),
    ):
        print()
        print("\n".join(lines))
    return 0


def _config(arguments: argparse.Namespace) -> GPTConfig:
    from zbmd.training.config import GPTConfig

    if not 1 <= arguments.layers <= LAYERS_MOST:
        raise UserError(f"--layers: expected 1 to {LAYERS_MOST}, got {arguments.layers}: blocks are alike")
    if not 1 <= arguments.sequences_per_shard <= 1 << 16:
        raise UserError(f"--sequences-per-shard: expected 1 to 65536, got {arguments.sequences_per_shard}")
    names = ("layers", "width", "heads", "context", "vocabulary", "family", "activation", "dropout")
    return GPTConfig(**{name: getattr(arguments, name) for name in names})


def _as_json(
    traced: Graph,
    fused: Graph,
    decisions: tuple[Decision, ...],
    kernels: list[KernelUse],
    plans: tuple[MemoryPlan, MemoryPlan],
) -> str:
    figures = [
        MemoryFigures(arena=one.arena_bytes, live=one.live_bytes, separate=one.separate_bytes)
        for one in plans
    ]
    return msgspec.json.encode(
        {
            "traced": {"nodes": len(traced.nodes), "traffic": traced.traffic(traced.nodes)},
            "graph": fused,
            "traffic": fused.traffic(fused.nodes),
            "decisions": decisions,
            "kernels": kernels,
            "memory": {"traced": figures[0], "fused": figures[1], "placements": plans[1].placements},
        }
    ).decode()


def _nodes(graph: Graph, units: set[int] | None, layers: int) -> Iterator[str]:
    """Yield a line a node of `units`, by default of all."""
    yield f"{'node':>5}  {'unit':9} {'phase':9}  computation"
    for node in graph.nodes:
        if units is None or node.unit in units:
            yield f"{node.number:5}  {_unit(node, layers):9} {node.phase:9}  {_computation(graph, node)}"
    if units is not None and layers > 1:
        yield "       the other blocks are like blocks.0 (--nodes prints all)"


def _unit(node: Node, layers: int) -> str:
    names = {0: "embed", layers + 1: "head"}
    return names.get(node.unit, f"blocks.{node.unit - 1}")


def _computation(graph: Graph, node: Node) -> str:
    made = ", ".join(str(graph.values[number]) for number in node.outputs)
    given = ", ".join(graph.values[number].name for number in node.inputs)
    body = f"  [{node.ops}]" if node.body else ""
    attributes = (node.body[0] if node.body else node).attributes
    shown = "".join(f" {attributes[name]}" for name in ("form", PRECISION) if name in attributes)
    return f"{made} = {node.op}{shown}({given}){body}"


def _decisions(decisions: tuple[Decision, ...]) -> Iterator[str]:
    """Yield a line for all decisions that are alike."""
    alike: dict[tuple[bool, str, str], list[int]] = {}
    for one in decisions:
        alike.setdefault((one.is_fused, one.ops, one.reason), []).append(one.saved_bytes)
    yield f"{'':5} {'times':>5}  {'saved':>9}  sequence: reason"
    for (is_fused, ops, reason), saved in sorted(alike.items(), key=lambda one: (-one[0][0], -sum(one[1]))):
        total = shown_bytes(sum(saved)) if is_fused else ""
        yield f"{'fused' if is_fused else 'kept':5} {len(saved):5}  {total:>9}  {ops}: {reason}"


def _kernels(graph: Graph) -> list[KernelUse]:
    """Return what computes products and attention, by the rule that the engine launches them by."""
    from zbmd.training.ops.cuda.table import PORTABLE

    found = Counter(
        (gpu, *one) for gpu in PORTABLE for node in graph.nodes for one in _used(graph, node, gpu)
    )
    return [
        KernelUse(gpu=gpu, kernel=kernel, times=times, reason=reason)
        for (gpu, kernel, reason), times in found.items()
    ]


def _used(graph: Graph, node: Node, gpu: str) -> Iterator[tuple[str, str]]:
    """Yield the kernels of a node, each with the reason, if it is a product or attention."""
    from zbmd.training.ops.cuda.table import FP8, choose_attention, choose_product, product_kernel

    first = node.body[0] if node.body else node
    if first.op == "matmul":
        made = graph.values[node.outputs[-1]]
        form, given = str(first.attributes["form"]), graph.values[first.inputs[0]].shape
        depth = given[0 if form[0] == "t" else 1] if first.attributes.get(PRECISION) == FP8 else 0
        choice = choose_product(gpu, made.shape[-1], fp8_depth=depth)
        yield product_kernel(choice, form, "bf16" if made.dtype == "bfloat16" else "f32"), choice.reason
    elif node.op in ("attention", "attention_grad"):
        is_forward = node.op == "attention"
        rows, width = graph.values[node.inputs[0] if is_forward else node.outputs[0]].shape  # qkv's
        choice = choose_attention(gpu, rows // int(node.attributes["batch"]))
        depth = width // (3 * int(node.attributes["heads"]))
        parts = ("",) if is_forward else ("_keys_grad", "_queries_grad")
        for part in parts:
            yield f"{choice.prefix}{part}_{depth}", choice.reason


def _kernel_lines(kernels: list[KernelUse]) -> Iterator[str]:
    yield f"{'GPU':7} {'times':>5}  kernel: reason"
    for one in kernels:
        yield f"{one.gpu:7} {one.times:5}  {one.kernel}: {one.reason}"


def _figures(traced: Graph, fused: Graph, plans: tuple[MemoryPlan, MemoryPlan]) -> Iterator[str]:
    yield f"{'':7} {'nodes':>6}  {'traffic':>9}  {'arena':>9}  {'live':>9}  {'separate':>9}"
    for name, graph, plan in (("traced", traced, plans[0]), ("fused", fused, plans[1])):
        sizes = (graph.traffic(graph.nodes), plan.arena_bytes, plan.live_bytes, plan.separate_bytes)
        shown = "  ".join(f"{shown_bytes(size):>9}" for size in sizes)
        yield f"{name:7} {len(graph.nodes):6}  {shown}"
