"""Prints the page faults of a training pass, once memory is kept."""

from __future__ import annotations

import resource

import numpy as np

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.step.recipe import keep_freed_memory

keep_freed_memory()
model = GPT(GPTConfig(layers=2))
params = model.init(0)
grads, tokens = np.zeros_like(params), np.zeros((2, 65), np.uint8)
before = 0
for passed in range(15):
    if passed == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.loss_and_grads(params, grads, tokens, global_batch=2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
