"""The graph of a step: what is traced, what is fused and what is not, and a memory plan without overlaps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.fusion import Target, fuse
from zbmd.training.model.graph.ir import Graph, GraphFlawed, Node, Value
from zbmd.training.model.graph.memory import plan_memory
from zbmd.training.model.graph.trace import trace_step

OURS = GPTConfig(context=16, width=64, heads=1, layers=2)
GPT2 = replace(OURS, family="gpt2", activation="gelu", dropout=0.1)


@pytest.mark.parametrize("config", [OURS, GPT2], ids=["zbmd", "gpt2"])
def test_a_trace_has_each_gradient_once_in_its_shape(config: GPTConfig) -> None:
    graph = trace_step(config, sequences=2, precision="bfloat16").graph
    slots = GPT(config).layout.slots
    assert list(graph.outputs) == ["loss", *(f"grad {slot.name}" for slot in slots)]
    for slot in slots:
        value = graph.values[graph.outputs[f"grad {slot.name}"]]
        assert (value.shape, value.dtype, value.source) == (slot.shape, "bfloat16", "node")
    assert len(set(graph.outputs.values())) == len(graph.outputs)


def test_recomputation_repeats_the_blocks_and_holds_less() -> None:
    kept, again = (trace_step(OURS, sequences=2, recompute=on).graph for on in (False, True))
    phases = Counter(node.phase for node in again.nodes)
    assert phases["recompute"] and not Counter(node.phase for node in kept.nodes)["recompute"]
    assert plan_memory(again).live_bytes < plan_memory(kept).live_bytes


def test_a_flawed_graph_is_named() -> None:
    node = Node(number=0, op="add", inputs=(0, 1), outputs=(1,), unit=0, phase="forward")
    values = {number: Value(number=number, name="", shape=(2,), dtype="float32") for number in range(2)}
    values[0] = Value(number=0, name="", shape=(2,), dtype="float32", source="input")
    with pytest.raises(GraphFlawed, match=r"reads %1 before"):
        Graph(values=values, nodes=(node,), outputs={}).check()
    twice = Node(number=0, op="gelu", inputs=(0,), outputs=(0,), unit=0, phase="forward")
    with pytest.raises(GraphFlawed, match=r"writes %0 a second time"):
        Graph(values=values, nodes=(twice,), outputs={}).check()
    with pytest.raises(GraphFlawed, match=r"the output loss, %1, is never written"):
        Graph(values=values, nodes=(), outputs={"loss": 1}).check()


def _decided(config: GPTConfig, target: Target) -> Counter[tuple[str, bool]]:
    traced = trace_step(config, sequences=2, precision="bfloat16")
    fused = fuse(traced.graph, target=target)
    saved = sum(one.saved_bytes for one in fused.decisions)
    before, after = (one.traffic(one.nodes) for one in (traced.graph, fused.graph))
    assert before - after == saved, "each decision says what it saves"
    assert all(one.reason and one.is_fused == (one.saved_bytes > 0) for one in fused.decisions)
    return Counter((one.ops, one.is_fused) for one in fused.decisions)


def test_sequences_that_the_kernels_of_cuda_cover_are_fused() -> None:
    found = _decided(OURS, "cuda")
    assert found["scores + softmax + mix", True] == 2
    assert found["mix_grad + softmax_grad + scores_grad + pack", True] == 2
    assert found["matmul + add", True] == 4  # two residual additions a block
    assert found["matmul + squared_relu", True] == 2
    assert found["matmul + squared_relu_grad", True] == 2
    assert found["rms_norm_grad + add", True] == 4
    assert found["cross_entropy + cross_entropy_grad", True] == 1
    found = _decided(GPT2, "cuda")
    assert found["matmul + add_bias + gelu", True] == 2
    assert found["matmul + add_bias + dropout", False] == 4
    assert found["matmul + gelu_grad", True] == 2
    assert found["add + layer_norm", True] == 4  # with dropout, the addition is apart from the product
    found = _decided(GPT2, "numpy")
    assert found["matmul + add_bias + dropout + add", True] == 4


def test_attention_without_a_kernel_is_left_as_it_is() -> None:
    graph = trace_step(replace(OURS, heads=2), sequences=2, precision="bfloat16").graph
    fused = fuse(graph, target="cuda")
    reasons = {one.reason for one in fused.decisions if one.kind == "attention"}
    assert reasons == {"heads of 32 features: kernels exist for 64 and 128"}
    assert Counter(node.op for node in fused.graph.nodes)["softmax"] == 2


def _check_plan(graph: Graph) -> None:
    """No two values that are alive at once overlap; each lies in the arena and is planned once."""
    plan, uses, made = plan_memory(graph), graph.uses(), graph.made_at()
    assert plan.live_bytes <= plan.arena_bytes <= plan.separate_bytes
    kept = set(graph.outputs.values())
    assert sorted(n for one in plan.placements for n in one.values) == sorted(made.keys() - kept)
    spans = [
        (made[n], max(uses.get(n, [made[n]])), offset, offset + graph.values[n].nbytes)
        for n, offset in plan.offsets().items()
    ]
    for number, (start, end, low, high) in enumerate(spans):
        assert low >= 0 and high <= plan.arena_bytes and low % 256 == 0
        for other, (start_2, _, low_2, high_2) in enumerate(spans):
            if number != other and start <= start_2 <= end and low < high_2 and low_2 < high:
                is_in_place = start < start_2 == end and (low, high) == (low_2, high_2)
                assert is_in_place, "an op may overwrite an input that ends there, and nothing else"


@pytest.mark.parametrize("target", ["cuda", "numpy"])
@pytest.mark.parametrize("config", [OURS, GPT2], ids=["zbmd", "gpt2"])
def test_values_that_are_alive_at_once_do_not_overlap(config: GPTConfig, target: Target) -> None:
    graph = trace_step(config, sequences=2, precision="bfloat16", recompute=True).graph
    _check_plan(graph)
    _check_plan(fuse(graph, target=target).graph)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of ops with one to three inputs, in place and not, of any sizes."""
    values = {0: Value(number=0, name="x", shape=(8,), dtype="float32", source="input")}
    nodes: list[Node] = []
    for place in range(draw(st.integers(1, 20))):
        inputs = draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=3))
        outputs: list[int] = []
        for _ in range(draw(st.integers(1, 2))):
            outputs.append(len(values))
            shape = (draw(st.sampled_from([8, 64, 65, 1000, 5000])),)
            values[outputs[-1]] = Value(number=outputs[-1], name="", shape=shape, dtype="float32")
        op = draw(st.sampled_from(["add", "matmul"]))
        node = Node(
            number=place, op=op, inputs=tuple(inputs), outputs=tuple(outputs), unit=0, phase="forward"
        )
        nodes.append(node)
    return Graph(values=values, nodes=tuple(nodes), outputs={"loss": nodes[-1].outputs[0]})


@given(graphs())
@settings(max_examples=30, deadline=None)
def test_plans_of_random_graphs_do_not_overlap(graph: Graph) -> None:
    _check_plan(graph.check())
