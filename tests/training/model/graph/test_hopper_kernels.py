"""Training on a modelled GPU of compute capability 9.0: which kernels it launches, and what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import ModelLaunch
from support.devices.kernel_numbers import by_interpreter, by_numpy

from zbmd.tools.entry.zbmd import main
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.fusion import fuse
from zbmd.training.model.graph.numpy_executor import GraphRun
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.model.graph.trace import trace_step
from zbmd.training.ops.cuda.executor import Executor, compiled_here
from zbmd.training.ops.cuda.hopper.operands import tile_operands
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.training.ops.cuda.table import BY_NAME, HOPPER, MatmulPrecision
from zbmd.training.optim import SGDConfig, optimizer_for
from zbmd.training.optim.elementwise import AdamWState, update_blocks
from zbmd.training.optim.on_device import DeviceOptimizer
from zbmd.transport.errors import LocalProtocolError

Array = npt.NDArray[Any]
CONFIG = GPTConfig(context=80, width=64, heads=1, layers=1)
SHAPE = ("--context", "80", "--width", "64", "--heads", "1", "--layers", "1", "--sequences-per-shard", "1")
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 1, CONFIG.context + 1))
"""Of two steps: the second is captured and replayed."""
SGD = SGDConfig()


def _weights(model: GPT) -> npt.NDArray[np.float32]:
    params, random = model.init(0).astype(np.float32), np.random.default_rng(0)
    for view in model.layout.views(params):
        view += random.standard_normal(view.shape).astype(np.float32) * np.float32(0.05)
    return params


class _Trained:
    """The losses of the steps, the weights after them, and how often each kernel ran."""

    def __init__(
        self,
        capability: tuple[int, int],
        run_kernel: Callable[[ModelLaunch], None] = by_numpy,
        *,
        matmul_precision: MatmulPrecision = "default",
        is_fused: bool = True,
    ) -> None:
        self.kernels = Counter[str]()

        def counted(launch: ModelLaunch) -> None:
            self.kernels[launch.kernel.name] += 1
            run_kernel(launch)

        host = ModelHost(devices=1, run_kernel=counted, seed=0, memory_bytes=1 << 34)
        host.capability = capability
        run = Executor(host.process(), compile=compiled_here, matmul_precision=matmul_precision)
        model = GPT(CONFIG, xp=DeviceModule(run))
        if is_fused:
            model.whole_step = FusedSteps(model, run, spans=[slice(0, model.layout.size)])
        optimizer = DeviceOptimizer(SGD, update_blocks(model.layout), run)
        start = _weights(model)
        state = [run.upload(start), run.zeros(start.size, np.float32)]
        narrow: Any = run.upload(start.astype(ml_dtypes.bfloat16))
        grads: Any = run.empty(start.size, ml_dtypes.bfloat16)
        model.layout.clear_padding(grads)
        self.losses, self.grads = list[float](), list[Array]()
        """Of each step; of each step, in float32."""
        for step, tokens in enumerate(TOKENS):
            self.losses.append(float(model.loss_and_grads(narrow, grads, tokens, global_batch=1)))
            self.grads.append(grads.get().astype(np.float32))
            optimizer.update(state, narrow, grads, step=step, learning_rate=0.01, grad_scale=1.0)
        self.weights, self.layout = state[0].get(), model.layout


def _on_the_cpu() -> tuple[list[float], Array]:
    model, losses = GPT(CONFIG), list[float]()
    old = AdamWState(_weights(model), *(np.zeros(model.layout.size, np.float32) for _ in range(2)))
    optimizer = optimizer_for(SGD, model.layout)
    for step, tokens in enumerate(TOKENS):
        narrow = old.weights.astype(ml_dtypes.bfloat16)
        grads, new = np.zeros_like(narrow), AdamWState(*(np.zeros_like(old.weights) for _ in range(3)))
        losses.append(model.loss_and_grads(narrow, grads, tokens, global_batch=1))
        optimizer.update(old, new, grads, step=step, learning_rate=0.01, grad_scale=1.0)
        old = new
    return losses, old.weights


def _is_for_hopper(name: str) -> bool:
    return BY_NAME[name].architectures == (HOPPER,)


def _planned(capsys: pytest.CaptureFixture[str], gpu: str, *more: str) -> set[str]:
    capsys.readouterr()
    assert main(["plan", "graph", *SHAPE, *more, "--json"]) == 0
    kernels = msgspec.json.decode(capsys.readouterr().out)["kernels"]
    return {one["kernel"] for one in kernels if one["gpu"] == gpu}


def test_a_job_on_hopper_launches_its_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """Products by tensor maps and attention by wgmma, forward and backward, captured and replayed.

    Their compiled code computes them; numpy the other kernels. What moved in two steps is within 4 % of
    the CPU's in the norm of each parameter, and what ran is what `zbmd plan graph` says.
    """

    def run(launch: ModelLaunch) -> None:
        (by_interpreter if _is_for_hopper(launch.kernel.name) else by_numpy)(launch)

    found = _Trained((9, 0), run)
    products = {name for name in found.kernels if name.startswith(("tma_", "matmul_", "attention"))}
    assert products - {"attention_delta_64"} == _planned(capsys, "sm_90a")
    for name in ("attention_wgmma_64", "attention_wgmma_keys_grad_64", "attention_wgmma_queries_grad_64"):
        assert found.kernels[name] == len(TOKENS)
    assert {"tma_nn_bf16", "tma_tn_bf16", "tma_nt_bf16", "matmul_nt_bf16"} <= products
    losses, weights = _on_the_cpu()
    np.testing.assert_allclose(found.losses, losses, atol=2e-3)
    start = _weights(GPT(CONFIG))
    for slot, *views in zip(
        found.layout.slots, *map(found.layout.views, (start, found.weights, weights)), strict=True
    ):
        before, mine, wanted = (view.astype(np.float64) for view in views)
        assert np.linalg.norm(mine - wanted) < 0.04 * np.linalg.norm(wanted - before), slot.name


def test_other_gpus_launch_the_portable_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """With the same numbers: which kernels compute changes no bit of a product."""
    found = _Trained((8, 6))
    assert not any(map(_is_for_hopper, found.kernels))
    products = {name for name in found.kernels if name.startswith(("tma_", "matmul_", "attention"))}
    assert products - {"attention_delta_64"} == _planned(capsys, "sm_80")
    hopper = _Trained((9, 0))
    assert found.losses == hopper.losses
    np.testing.assert_array_equal(found.weights, hopper.weights)


def _reference(in_fp8: bool) -> tuple[float, dict[str, Array]]:
    """Return the loss of the first step, and its gradients, by the numpy executor of graphs."""
    model = GPT(CONFIG)
    traced = trace_step(
        CONFIG, sequences=1, precision="bfloat16", matmul_precision="fp8" if in_fp8 else "default"
    )
    names = [slot.name for slot in model.layout.slots]
    views = model.layout.views(_weights(model).astype(ml_dtypes.bfloat16))
    weights = dict(zip(names, views, strict=True))
    found = GraphRun(traced, fuse(traced.graph, target="cuda").graph, weights, TOKENS[0]).run()
    grads = {name: found[f"grad {name}"].astype(np.float32) for name in names}
    return float(found["loss"]), grads


def _off(layout: Any, found: Array, wanted: dict[str, Array]) -> dict[str, float]:
    """Return how far each gradient is off, of its norm."""
    views = zip(layout.slots, layout.views(found), strict=True)
    return {
        slot.name: float(np.linalg.norm(view - wanted[slot.name]) / np.linalg.norm(wanted[slot.name]))
        for slot, view in views
    }


def test_layers_of_a_job_multiply_in_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    """Forward, and both gradients, by compiled code, captured and replayed; logits in bf16.

    Gradients are within 8 % of numpy's with the same rounding, which a last bit of bf16 may move to the next
    number of E4M3, and farther from those without it; so are those of the tape, op by op. What ran is what
    `zbmd plan graph` says.
    """

    def run(launch: ModelLaunch) -> None:
        (by_interpreter if launch.kernel.name.startswith("fp8") else by_numpy)(launch)

    found = _Trained((9, 0), run, matmul_precision="fp8")
    taped = _Trained((9, 0), matmul_precision="fp8", is_fused=False)
    beginnings = ("fp8_blocks", "fp8_of", "tma_", "matmul_", "attention")
    products = {name for name in found.kernels if name.startswith(beginnings)}
    planned = _planned(capsys, "sm_90a", "--matmul-precision", "fp8")
    assert products - {"attention_delta_64"} == planned
    assert {"fp8_blocks_bf16", "fp8_of_rows_bf16", "tma_nn_bf16"} <= products
    loss, grads = _reference(in_fp8=True)
    for one in (found, taped):
        assert abs(one.losses[0] - loss) < 2e-3
        assert max(_off(one.layout, one.grads[0], grads).values()) < 0.08
    plain = _off(found.layout, found.grads[0], _reference(in_fp8=False)[1])
    assert 0.1 < max(plain.values()) < 0.2
    assert found.losses[1] < found.losses[0]


def test_a_matrix_that_no_tensor_map_describes_is_named() -> None:
    run = Executor(ModelHost(devices=1, run_kernel=by_numpy).process(), compile=compiled_here)
    a, b = (run.zeros((16, columns), ml_dtypes.bfloat16) for columns in (16, 300))
    with pytest.raises(LocalProtocolError, match="rows that are a multiple of 16 bytes apart"):
        tile_operands("nn", a, b)
