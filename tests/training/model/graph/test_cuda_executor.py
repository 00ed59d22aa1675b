"""Fused graphs on the modelled device: gradients near numpy's, fewer launches than the tape's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.training.autograd.rng import Noise
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.graph.cuda_executor import CudaGraphRun
from zbmd.training.model.graph.fusion import fuse
from zbmd.training.model.graph.trace import trace_step
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.transport.errors import UserError

OURS = GPTConfig(context=16, width=64, heads=1, layers=1)
GPT2 = replace(OURS, family="gpt2", activation="gelu", dropout=0.1)
NOISE = Noise(3, 1, np.array([5, 9]))
TOKENS = np.random.default_rng(1).integers(0, 256, (2, 17))


def _executor() -> Executor:
    host = ModelHost(devices=1, run_kernel=by_numpy, seed=0, memory_bytes=1 << 34)
    return Executor(host.process(), compile=nothing_compiled)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", [OURS, GPT2], ids=["zbmd", "gpt2"])
def test_a_fused_graph_has_the_gradients_of_numpy(config: GPTConfig, recompute: bool) -> None:
    """Within 4 % of the norm of each parameter, as the tape on a device. Twice: the same bits."""
    run, host = _executor(), GPT(config)
    params, random = host.init(0), np.random.default_rng(0)
    for view in host.layout.views(params):
        view += random.standard_normal(view.shape) * 0.05
    narrow: npt.NDArray[Any] = params.astype(ml_dtypes.bfloat16)
    expected = np.zeros_like(narrow)
    expected_loss = host.loss_and_grads(narrow, expected, TOKENS, global_batch=2, noise=NOISE)
    given: Any = run.upload(narrow)
    room: Any = run.empty(narrow.size, narrow.dtype)
    host.layout.clear_padding(room)
    tape = GPT(config, xp=DeviceModule(run), recompute=recompute)
    before = run.launches
    tape.loss_and_grads(given, room, TOKENS, global_batch=2, noise=NOISE)
    by_tape = run.launches - before
    traced = trace_step(config, sequences=2, precision="bfloat16", recompute=recompute)
    made = CudaGraphRun(traced, fuse(traced.graph, target="cuda").graph, run)
    weights: Any = dict(zip((slot.name for slot in host.layout.slots), host.layout.views(given), strict=True))
    found: list[dict[str, npt.NDArray[Any]]] = []
    for _ in range(2):
        before = run.launches
        assert abs(float(made.run(weights, TOKENS, noise=NOISE)) - expected_loss) < 1e-3
        assert run.launches - before < by_tape
        found.append({name: grad.get() for name, grad in made.grads.items()})
    for slot, wanted in zip(host.layout.slots, host.layout.views(expected), strict=True):
        wide, one = wanted.astype(np.float64), found[0][slot.name]
        assert np.linalg.norm(one.astype(np.float64) - wide) < 0.04 * np.linalg.norm(wide), slot.name
        np.testing.assert_array_equal(one.view(np.uint16), found[1][slot.name].view(np.uint16))


def test_an_op_without_a_kernel_is_named() -> None:
    traced = trace_step(replace(OURS, heads=2), sequences=2, precision="bfloat16")
    with pytest.raises(UserError, match=r"ops without a kernel: mix, .*softmax_grad\. Attention has kernels"):
        CudaGraphRun(traced, fuse(traced.graph, target="cuda").graph, _executor())
