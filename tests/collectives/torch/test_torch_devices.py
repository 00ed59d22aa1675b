"""Tensors on devices in process groups: the backend's own code, over the model of CUDA.

The ranks are real processes of `zbmd-node run`'s host, each with a modelled device of its own.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from support.processes.kept_lines import Lines
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

RANKS = 3
TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "programs" / "torch" / "devices" / "on_devices.py"


async def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, dies: int = 0, **environment: str
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    for key, value in {"PYTHONPATH": str(TESTS), **environment}.items():
        monkeypatch.setenv(key, value)
    output = Lines()
    config = HostConfig(
        target=str(PROGRAM), arguments=names, world_size=RANKS, on_loss=OnLoss.SHRINK, preload=("torch",)
    )
    result = await Host(config, output=output, template=template_of(config)).run()
    text = "\n".join(output.lines)
    assert sum(line.endswith(": good") for line in output.lines) == RANKS - dies, text
    assert dies or result.outcome is Outcome.SUCCEEDED, text


@pytest.mark.parametrize("between", ["0", "1"])
async def test_operations_messages_and_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """Tensors pass through the host, or go from device to device."""
    names = ("operations", "messages", "streams", "refused", "late")
    await run(tmp_path, monkeypatch, *names, ZBMD_DEVICE_PATHS=between)


@pytest.mark.parametrize(("on_stream", "between"), [("0", "1"), ("1", "0"), ("1", "1")])
async def test_a_rank_that_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_stream: str, between: str
) -> None:
    """Threads wait for the ends of calls, or streams alone."""
    how = {"ZBMD_WAIT_ON_STREAM": on_stream, "ZBMD_DEVICE_PATHS": between}
    await run(tmp_path, monkeypatch, "streams", "lost", dies=1, **how)


# The seam to `torch.cuda`.


def test_a_rank_has_the_device_that_torch_would_give_it() -> None:
    """By LOCAL_RANK, unless its script has made another one current."""
    from zbmd.collectives.torch.cuda.devices import rank_device

    assert [rank_device(rank, 4, 0) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert rank_device(1, 1, 0) == 0, "CUDA_VISIBLE_DEVICES shows one"
    assert rank_device(1, 4, 3) == 3, "torch.cuda.set_device(3)"
    assert rank_device(None, 4, 0) == 0


def test_pytorch_without_cuda_is_told_what_to_do() -> None:
    """A tensor of CUDA can exist there: a fake one, of a program that is traced."""
    torch: Any = importlib.import_module("torch")
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")

    from zbmd.collectives.torch.cuda.devices import SEAM
    from zbmd.collectives.torch.tensors import TensorBuffer
    from zbmd.transport.errors import UserError

    with fakes.FakeTensorMode():
        fake = torch.empty(3, device="cuda:0")
    if torch.version.cuda is None:
        with pytest.raises(
            UserError, match=r"a tensor is on cuda:0, and this PyTorch, .* was built without CUDA"
        ):
            SEAM.require(fake)
    with pytest.raises(UserError, match="takes those in host memory here"):
        TensorBuffer(fake)
    with pytest.raises(UserError, match=r"on meta: .* and on cuda devices"):
        SEAM.require(torch.empty(3, device="meta"))


def test_the_calls_of_torch_cuda_exist() -> None:
    """Those of `TorchCuda`, in every build of PyTorch."""
    torch: Any = importlib.import_module("torch")

    from zbmd.collectives.torch.cuda.devices import Devices, TorchCuda

    for name, asked in inspect.getmembers(Devices, inspect.isfunction):
        if not name.startswith("_"):
            given = inspect.signature(getattr(TorchCuda, name))
            assert list(given.parameters) == list(inspect.signature(asked).parameters), name
    for name in (
        *("current_device", "current_stream", "device_count", "is_available", "stream"),
        *("is_current_stream_capturing", "ExternalStream"),
    ):
        assert callable(getattr(torch.cuda, name)), name
    assert "stream_ptr" in inspect.signature(torch.cuda.ExternalStream.__new__).parameters
