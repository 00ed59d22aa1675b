"""The array-module seam: what is asked of a module, and what is said when there is none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from programs import PROGRAMS
from support.devices.array_modules import Witness

from zbmd.training.autograd.array_module import to_host, xp_for
from zbmd.training.config import Activation, GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.clip import global_norm
from zbmd.training.optim.elementwise import AdamW, AdamWConfig, AdamWState
from zbmd.transport.errors import UserError

# What cupy's reference lists with the same meaning; its einsum takes no `out`.
IN_BOTH_MODULES = frozenset(
    {
        "absolute",
        "arange",
        "asarray",
        "copyto",
        "divide",
        "dot",
        "einsum",
        "empty",
        "empty_like",
        "exp",
        "full_like",
        "log",
        "matmul",
        "multiply",
        "ones",
        "reciprocal",
        "sqrt",
        "square",
        "tanh",
        "zeros",
        "zeros_like",
    }
)


@pytest.mark.parametrize("activation", ["relu2", "gelu"])
def test_a_step_asks_only_for_what_both_modules_have(activation: Activation) -> None:
    xp = Witness()
    model = GPT(GPTConfig(context=4, width=8, heads=2, layers=1, activation=activation), xp=xp)
    params = model.init(0)
    grads = np.zeros_like(params)
    tokens = np.arange(10, dtype=np.uint8).reshape(2, 5)
    model.loss_and_grads(params, grads, tokens, global_batch=2)
    old, new = AdamWState(params, grads * 0, grads * 0), AdamWState(*(grads * 0 for _ in range(3)))
    optimizer = AdamW(AdamWConfig(), model.layout, xp=xp)
    optimizer.update(old, new, grads, step=0, learning_rate=global_norm(grads, xp=xp))
    assert xp.asked <= IN_BOTH_MODULES
    assert {"matmul", "einsum", "dot", "sqrt"} <= xp.asked


def test_the_cpu_is_numpy() -> None:
    assert xp_for("cpu") is np
    array = np.zeros(3)
    assert to_host(array) is array


def test_an_unknown_device_is_explained() -> None:
    with pytest.raises(UserError, match=r'unknown device "tpu": use "cpu" or "cuda"'):
        xp_for("tpu")


def test_a_missing_cupy_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UserError, match=r'pip install "zbmd\[gpu\]"'):
        xp_for("cuda")


@pytest.mark.optional
def test_cupy_computes_the_same_gradients() -> None:
    """In a process of its own: the threads and files that CUDA opens stay until their process ends."""
    pytest.importorskip("cupy")
    subprocess.run([sys.executable, PROGRAMS / "training/cupy_gradients.py"], check=True)
