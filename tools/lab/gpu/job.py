"""A PyTorch model that the job trains on the GPU: two ranks are killed, and the state keeps its bits.

    zbmd-node run --nproc-per-node 2 zbmd/tools/lab/gpu/job.py OUT

As a script, this file is a rank's program: a perceptron of 1.3 M parameters, which PyTorch differentiates on
GPU r modulo those visible. `survive_kills` runs it undisturbed, and again with a SIGKILL of each rank.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import uvloop

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.tools.bench.run_ranks import RanksOutput
from zbmd.training.autograd.array_module import Array
from zbmd.training.job.data_parallel import DataParallelTask, State, run_task
from zbmd.transport.errors import UserError

RANKS: Final = 2
KILLS: Final = {40: 1, 80: 0}
"""Rank to kill, by the step that was committed."""
PRELOAD: Final = ("zbmd.training.job.data_parallel", "torch", "torch._inductor.config")
"""The last one takes PyTorch 4 s to import, when deterministic algorithms are asked for."""
DETERMINISTIC: Final = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


class Perceptron(DataParallelTask):
    """Learns a random function of 256 numbers on the GPU, by stochastic gradient descent with momentum."""

    steps, examples, shards, samples = 120, 8192, 4, 256
    parameters = ("first", "middle", "last")
    WIDTH = 1024

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        torch.use_deterministic_algorithms(True)
        rank = int(os.environ.get("RANK", "0"))
        self.torch = torch
        self.device = torch.device("cuda", rank % torch.cuda.device_count())
        draw = np.random.default_rng(0)
        x = draw.standard_normal((self.examples, 256)).astype(np.float32)
        y = np.tanh(x @ draw.standard_normal((256, 16)).astype(np.float32) / 16)
        self.x, self.y = (torch.from_numpy(each).to(self.device) for each in (x, y))

    def initial(self) -> dict[str, Array]:
        """Weights, and their momentum."""
        draw, width = np.random.default_rng(1), self.WIDTH
        shapes = {"first": (256, width), "middle": (width, width), "last": (width, 16)}
        found = {
            name: (draw.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
            for name, shape in shapes.items()
        }
        return {**found, **{f"m.{name}": np.zeros_like(each) for name, each in found.items()}}

    def gradient(self, state: State, ids: npt.NDArray[np.int64]) -> tuple[float, Mapping[str, Array]]:
        """Differentiate on the GPU."""
        torch = self.torch
        weights = {
            name: torch.tensor(state[name], device=self.device, requires_grad=True)
            for name in self.parameters
        }
        at = torch.from_numpy(ids).to(self.device)
        hidden = torch.tanh(torch.tanh(self.x[at] @ weights["first"]) @ weights["middle"])
        loss = torch.nn.functional.mse_loss(hidden @ weights["last"], self.y[at])
        loss.backward()
        return float(loss.detach()), {name: each.grad.cpu().numpy() for name, each in weights.items()}

    def update(self, old: State, new: State, gradient: State, step: int) -> None:
        """Momentum, on the processor: that is where the state lies."""
        for name in self.parameters:
            new["m." + name][:] = np.float32(0.9) * old["m." + name] + gradient[name]
            new[name][:] = old[name] - np.float32(0.1) * new["m." + name]


class _Kills:
    """Kills ranks after the steps of `KILLS`, and times what follows."""

    def __init__(self, planned: Mapping[int, int]) -> None:
        self.planned = dict(planned)
        self.recoveries_s: list[float] = []
        self.host: Host | None = None
        self._killed_ns, self._epoch = 0, 0

    def __call__(self, event: HostEvent) -> None:
        if not isinstance(event, RankReport) or event.payload.get("kind") != "step":
            return
        epoch = int(event.payload["epoch"])
        if self._killed_ns and epoch > self._epoch:
            self.recoveries_s.append((int(event.payload["at_ns"]) - self._killed_ns) / 1e9)
            self._killed_ns = 0
        self._epoch = epoch
        due = [step for step in self.planned if step <= int(event.payload["version"])]
        if due and not self._killed_ns:
            assert self.host is not None
            victim = self.planned.pop(min(due))
            self._killed_ns = time.monotonic_ns()
            self.host.send_signal(victim, signal.SIGKILL)


async def _run(out: Path, planned: Mapping[int, int]) -> tuple[dict[str, Any], _Kills]:
    kills = _Kills(planned)
    output = RanksOutput(see=kills)
    config = HostConfig(
        target=__file__,
        arguments=(str(out),),
        world_size=RANKS,
        environment=DETERMINISTIC,
        preload=PRELOAD,
    )
    kills.host = host = Host(config, output=output, observer=output)
    ended = await host.run()
    results = [each for each in output.reports if "state_sha256" in each]
    if ended.exit_code or not results:
        raise UserError("\n".join([f"the ranks failed: {ended.reason}", *output.lines]))
    return results[0], kills


def survive_kills() -> str:
    """Compare a run whose ranks are killed with an undisturbed one. Raises `UserError` where they differ."""
    with tempfile.TemporaryDirectory(prefix="zbmd-gpu-job-") as scratch:
        calm, _ = uvloop.run(_run(Path(scratch, "calm"), {}))
        killed, kills = uvloop.run(_run(Path(scratch, "killed"), KILLS))
    if calm["state_sha256"] != killed["state_sha256"] or len(kills.recoveries_s) != len(KILLS):
        raise UserError(f"{len(kills.recoveries_s)} recoveries, {calm} undisturbed, {killed} after the kills")
    spans = " and ".join(f"{span:.2f}" for span in kills.recoveries_s)
    return (
        f"the same bits after {len(KILLS)} kills; next step committed {spans} s after them; "
        f"loss {calm['loss_last']:.4f}"
    )


if __name__ == "__main__":
    uvloop.run(run_task(Perceptron(), out=Path(sys.argv[1])))
