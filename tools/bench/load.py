"""A training step's work, on a thread of its own: what latencies and notices are measured inside of."""

from __future__ import annotations

import threading
from typing import Final

import numpy as np

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT

WINDOWS: Final = 2
"""Sequences a pass, as in a shard of the demo's training."""


class TrainingLoad:
    """Forward and backward passes of the demo's model, one after the other, between `start` and `stop`.

    numpy releases the GIL in its kernels, so this competes for cores, caches and, between kernels, the GIL,
    as a rank's compute thread does.
    """

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._first_pass = threading.Event()
        self._thread = threading.Thread(target=self._run, name="training-load", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until its first pass is over."""
        self._thread.start()
        self._first_pass.wait()

    def stop(self) -> None:
        """End the thread after the pass under way, and wait for that."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        config = GPTConfig()
        model = GPT(config)
        params = model.init(seed=0)
        grads = np.zeros_like(params)
        tokens = np.random.default_rng(0).integers(0, 256, (WINDOWS, config.context + 1))
        while not self._stop.is_set():
            model.loss_and_grads(params, grads, tokens, global_batch=WINDOWS)
            self._first_pass.set()
