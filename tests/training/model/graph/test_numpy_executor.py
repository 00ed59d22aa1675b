"""Graphs run by numpy: fused they have the bits of the tape; in an arena, those without one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from zbmd.training.autograd.rng import Noise
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.fusion import Target, fuse
from zbmd.training.model.graph.ir import Graph
from zbmd.training.model.graph.memory import MemoryPlan, plan_memory
from zbmd.training.model.graph.numpy_executor import GraphRun
from zbmd.training.model.graph.trace import Traced, trace_step

Array = npt.NDArray[Any]
OURS = GPTConfig(context=16, width=64, heads=1, layers=2)
GPT2 = replace(OURS, family="gpt2", activation="gelu", dropout=0.1)
BOTH = pytest.mark.parametrize("config", [OURS, GPT2], ids=["zbmd", "gpt2"])
NOISE = Noise(3, 1, np.array([5, 9]))
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 17))


def _params(config: GPTConfig, dtype: npt.DTypeLike) -> Array:
    model, random = GPT(config), np.random.default_rng(0)
    params = model.init(0)
    for view in model.layout.views(params):
        view += random.standard_normal(view.shape) * 0.05
    return params.astype(dtype)


def _by_tape(config: GPTConfig, params: Array) -> dict[str, Array]:
    model, grads = GPT(config), np.zeros_like(params)
    loss = model.loss_and_grads(params, grads, TOKENS, global_batch=2, noise=NOISE)
    named = zip(model.layout.slots, model.layout.views(grads), strict=True)
    return {"loss": np.asarray(loss)} | {f"grad {slot.name}": view for slot, view in named}


def _by_graph(
    config: GPTConfig, traced: Traced, graph: Graph, params: Array, plan: MemoryPlan | None = None
) -> dict[str, Array]:
    layout = GPT(config).layout
    weights = {slot.name: view for slot, view in zip(layout.slots, layout.views(params), strict=True)}
    return GraphRun(traced, graph, weights, TOKENS, noise=NOISE, plan=plan).run()


def _largest_error(found: dict[str, Array], expected: dict[str, Array]) -> float:
    """Return the largest difference, of each output in its norm."""
    wide = {name: one.astype(np.float64) for name, one in expected.items()}
    return max(
        float(np.linalg.norm(found[name].astype(np.float64) - one) / np.linalg.norm(one))
        for name, one in wide.items()
    )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("target", ["numpy", "cuda"])
@BOTH
def test_a_fused_graph_has_the_bits_of_the_tape(config: GPTConfig, target: Target, recompute: bool) -> None:
    params = _params(config, np.float32)
    traced = trace_step(config, sequences=2, recompute=recompute)
    fused = fuse(traced.graph, target=target).graph
    found, expected = _by_graph(config, traced, fused, params), _by_tape(config, params)
    assert float(found["loss"]) == float(expected["loss"].astype(np.float32))
    for name in expected.keys() - {"loss"}:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert _largest_error(_by_graph(config, traced, traced.graph, params), expected) < 1e-5


@BOTH
def test_bfloat16_is_rounded_where_it_is_written(config: GPTConfig) -> None:
    """Both are near the tape, which computes in float32; the fused graph rounds less often."""
    params = _params(config, ml_dtypes.bfloat16)
    traced, expected = trace_step(config, sequences=2, precision="bfloat16"), _by_tape(config, params)
    unfused = _largest_error(_by_graph(config, traced, traced.graph, params), expected)
    fused = fuse(traced.graph, target="cuda").graph
    assert 0.0 < _largest_error(_by_graph(config, traced, fused, params), expected) < 0.04
    assert 0.0 < unfused < 0.04


@pytest.mark.parametrize("is_fused", [False, True])
@BOTH
def test_an_arena_that_forgets_changes_no_bit(config: GPTConfig, is_fused: bool) -> None:
    """Every byte is NaN until it is written, and again after its last use."""
    params = _params(config, ml_dtypes.bfloat16)
    traced = trace_step(config, sequences=2, precision="bfloat16", recompute=True)
    graph = fuse(traced.graph, target="numpy").graph if is_fused else traced.graph
    expected = _by_graph(config, traced, graph, params)
    found = _by_graph(config, traced, graph, params, plan_memory(graph))
    for name, one in expected.items():
        np.testing.assert_array_equal(found[name], one, err_msg=name)


def test_an_arena_whose_values_overlap_is_seen() -> None:
    params, traced = _params(OURS, np.float32), trace_step(OURS, sequences=2)
    plan = plan_memory(traced.graph)
    together = tuple(msgspec.structs.replace(one, offset=0) for one in plan.placements)
    wrong = msgspec.structs.replace(plan, placements=together)
    expected = _by_graph(OURS, traced, traced.graph, params)
    found = _by_graph(OURS, traced, traced.graph, params, wrong)
    assert not np.array_equal(found["grad embed.weight"], expected["grad embed.weight"])
