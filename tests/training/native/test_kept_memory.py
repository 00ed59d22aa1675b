"""Freed memory is kept: a step that repeats touches no new pages."""

from __future__ import annotations

import subprocess
import sys

FAULTS_PER_PASS = """
import resource
import numpy as np
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.step.recipe import keep_freed_memory

keep_freed_memory()
model = GPT(GPTConfig(layers=2))
params = model.init(0)
grads, tokens = np.zeros_like(params), np.zeros((2, 65), np.uint8)
for passed in range(15):
    if passed == 5:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    model.loss_and_grads(params, grads, tokens, global_batch=2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


def test_a_repeated_pass_has_hardly_a_page_fault() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS_PER_PASS], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 20.0, "without keep_freed_memory there are over 200"
