"""Tensors on devices in process groups: the backend's own code, over the model of CUDA.

The ranks are real processes of `zbmd-node run`'s host, each with a modelled device of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

RANKS = 3
TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "programs" / "torch" / "devices" / "on_devices.py"


async def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *, dies: int = 0, **environment: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    for key, value in {"PYTHONPATH": str(TESTS), **environment}.items():
        monkeypatch.setenv(key, value)
    output = Lines()
    config = HostConfig(target=str(PROGRAM), arguments=(name,), world_size=RANKS, on_loss=OnLoss.SHRINK)
    result = await Host(config, output=output).run()
    text = "\n".join(output.lines)
    assert sum(line.endswith(": good") for line in output.lines) == RANKS - dies, text
    assert dies or result.outcome is Outcome.SUCCEEDED, text


@pytest.mark.parametrize("name", ["operations", "messages", "streams", "refused"])
async def test_tensors_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    await run(tmp_path, monkeypatch, name)


async def test_work_that_streams_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await run(tmp_path, monkeypatch, "streams", ZBMD_WAIT_ON_STREAM="1")


@pytest.mark.parametrize("on_stream", ["0", "1"])
async def test_a_rank_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_stream: str) -> None:
    await run(tmp_path, monkeypatch, "lost", dies=1, ZBMD_WAIT_ON_STREAM=on_stream)
