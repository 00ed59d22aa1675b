"""Batches uploaded beside the step before them, on a device that runs streams late and in any order."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.devices.cuda_model import DeviceRace, ModelHost
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT, Batch
from zbmd.training.model.graph.steps import FusedSteps
from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.module import DeviceModule
from zbmd.transport.cuda.api import CudaFault

CONFIG = GPTConfig(context=16, width=64, heads=1, layers=1)


class _Steps:
    """A model whose weights stay, and the batches of some steps, two of each."""

    def __init__(self, seed: int, steps: int = 3) -> None:
        host = ModelHost(devices=1, run_kernel=by_numpy, seed=seed)
        self.run = Executor(host.process(), compile=nothing_compiled)
        self.model = GPT(CONFIG, xp=DeviceModule(self.run))
        self.steps = self.model.whole_step = FusedSteps(self.model, self.run)
        random = np.random.default_rng(1)
        weights = self.model.init(0) + random.standard_normal(self.model.layout.size).astype(np.float32) / 20
        self.weights: Any = self.run.upload(weights.astype(ml_dtypes.bfloat16))
        self.batches = [
            [self.model.batch(random.integers(0, 256, (1, 17)), global_batch=2) for _ in range(2)]
            for _ in range(steps)
        ]

    def step(self, number: int, *, ahead: bool) -> list[bytes]:
        """Return the bits of the gradients of a step's batches."""
        layout, rooms = self.model.layout, list[Any]()
        if ahead:
            self.steps.follow(self.batches[number], lambda: self._after(number))
        for batch in self.batches[number]:
            rooms.append(self.run.empty(layout.size, ml_dtypes.bfloat16))
            layout.clear_padding(rooms[-1])
            _, play = self.steps(self.weights, rooms[-1], batch, None)
            play()
        return [room.get().tobytes() for room in rooms]

    def _after(self, number: int) -> list[Batch]:
        return self.batches[number + 1] if number + 1 < len(self.batches) else []


@pytest.mark.parametrize("seed", range(4))
def test_uploads_beside_the_step_change_no_bit(seed: int) -> None:
    plain, ahead = _Steps(seed), _Steps(seed + 100)
    for number in range(3):
        wanted = plain.step(number, ahead=False)
        assert wanted[0] != wanted[1]
        assert ahead.step(number, ahead=True) == wanted
    assert ahead.step(1, ahead=True) == plain.step(1, ahead=False), (
        "a step is run again, from its first batch"
    )


def test_the_next_batch_is_on_its_way_before_the_step_has_run() -> None:
    """Its upload is asked for after the launch, and nothing waits for the device in between."""
    found, asked = _Steps(0), list[str]()
    for number in range(2):
        found.step(number, ahead=True)
    api: Any = found.run.api

    def noting(name: str) -> Any:
        original = getattr(api, name)

        def noted(*given: Any) -> Any:
            asked.append("upload" if given[-1] == found.run.uploads else name)
            return original(*given)

        return noted

    for name in ("graph_launch", "memcpy_async", "stream_synchronize"):
        setattr(api, name, noting(name))
    found.steps.follow(found.batches[2])
    room: Any = found.run.empty(found.model.layout.size, ml_dtypes.bfloat16)
    found.steps(found.weights, room, found.batches[2][0], None)[1]()
    assert "graph_launch" in asked and "stream_synchronize" not in asked
    assert asked.index("graph_launch") < len(asked) - 1 - asked[::-1].index("upload"), asked


@pytest.mark.parametrize("forgotten", ["arrived", "taken"])
def test_an_order_that_is_forgotten_is_found(forgotten: str) -> None:
    """Kernels that do not wait for an upload, and an upload that does not wait for the copy before."""
    races = 0
    for seed in range(4):
        found = _Steps(seed)
        api: Any = found.run.api
        wait, skipped = (
            api.stream_wait_event,
            found.run.stream if forgotten == "arrived" else found.run.uploads,
        )

        def waits(stream: int, event: int, wait: Any = wait, skipped: int = skipped) -> None:
            if stream != skipped:
                wait(stream, event)

        api.stream_wait_event = waits
        try:
            for number in range(3):
                found.step(number, ahead=True)
        except DeviceRace:
            races += 1
            with pytest.raises(CudaFault):
                found.run.upload(np.zeros(1, np.float32))
    assert races, "no seed found it"
