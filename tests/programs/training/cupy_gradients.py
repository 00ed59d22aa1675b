"""Compares the gradients of a model on a GPU with those on the host."""

from __future__ import annotations

import numpy as np

from zbmd.training.autograd.array_module import to_host, xp_for
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT

xp = xp_for("cuda")
config = GPTConfig(context=16, width=32, heads=4, layers=2)
host, device = GPT(config), GPT(config, xp=xp)
params = host.init(0).astype(np.float64)
for view in host.layout.views(params):
    view += np.random.default_rng(view.size).standard_normal(view.shape) * 0.1
tokens = np.random.default_rng(0).integers(0, 256, (3, 17), dtype=np.uint8)
grads, device_grads = np.zeros_like(params), xp.zeros(params.shape)
loss = host.loss_and_grads(params, grads, tokens, global_batch=3)
device_loss = device.loss_and_grads(xp.asarray(params), device_grads, tokens, global_batch=3)
np.testing.assert_allclose(device_loss, loss, rtol=1e-9)
np.testing.assert_allclose(to_host(device_grads), grads, rtol=1e-6, atol=1e-10)
