"""The choice of a rank's device, and the errors of devices that cannot be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.tools.train.command import recipe_of
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job.mesh import Mesh
from zbmd.training.optim import OPTIMIZERS
from zbmd.training.sharded import devices
from zbmd.training.sharded.devices import (
    DeviceChoice,
    Devices,
    device_bytes,
    open_device,
    open_for_generation,
)
from zbmd.training.sharded.options import TrainOptions
from zbmd.transport.errors import UserError

MODEL = GPTConfig(width=64, heads=1, layers=1, context=16)
RECIPE = TrainOptions(out=Path("out"), model=MODEL, precision="bfloat16", device="cuda")


def _open(recipe: TrainOptions = RECIPE, *, mesh: str = "dp=1", ranks: int = 1) -> tuple[Any, str]:
    return open_device(recipe, recipe.model, Mesh.parse(mesh, ranks), None)


def _changed(**changes: Any) -> TrainOptions:
    return msgspec.structs.replace(RECIPE, **changes)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ModelHost:
    """A machine with two modelled GPUs."""
    made = ModelHost(devices=2, run_kernel=by_numpy, memory_bytes=1 << 29)
    monkeypatch.setattr(devices, "FOUND", [Devices(lambda: 2, made.process, nothing_compiled)])
    return made


def test_a_gpu_is_opened_and_named(host: ModelHost) -> None:
    executor, shown = _open(_changed(device="cuda:1"))
    assert shown == "device cuda:1 (Modelled GPU, 0000:02:00.0)"
    assert executor.api.device == 1
    assert _open(_changed(device="cpu")) == (None, "")
    assert open_for_generation("cpu", MODEL) is None
    found = open_for_generation("auto", replace(MODEL, heads=8))
    assert found is not None and found.name == "Modelled GPU"


def test_ranks_of_a_host_take_gpus_in_turn() -> None:
    def choice(rank: int, *, each: int, count: int, device: str = "cuda") -> tuple[int, int]:
        launched = RankEnvironment(
            rank=rank, world_size=8, local_world_size=each, job=1, incarnation=1, node_address=""
        )
        found = DeviceChoice.of(device, count, launched)
        return found.index, found.sharing

    assert [choice(rank, each=4, count=4) for rank in (0, 3, 4, 6)] == [(0, 1), (3, 1), (0, 1), (2, 1)]
    assert [choice(rank, each=8, count=3)[1] for rank in range(3)] == [3, 3, 2]
    assert choice(5, each=8, count=3, device="cuda:2") == (2, 8)


def test_meshes_that_gpus_train_on_fit_by_their_shards(host: ModelHost) -> None:
    """A state of a rank is smaller, the more ranks share it; what does not fit is refused."""
    wide = replace(MODEL, width=512, heads=8, layers=4)
    needed = [
        sum(device_bytes(_changed(zero=zero, model=wide), wide, Mesh.parse(mesh, 4)))
        for zero, mesh in ((0, "dp=4"), (1, "dp=4"), (2, "dp=4"), (3, "dp=4"))
    ]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == 4
    small = replace(MODEL, width=128, heads=2, layers=2)
    for mesh in ("fsdp=4", "dp=2,fsdp=2", "dp=2,pp=2", "fsdp=2,pp=2", "pp=2,tp=2"):
        assert _open(_changed(mesh=mesh, model=small), mesh=mesh, ranks=4)[0] is not None
    with pytest.raises(UserError, match="multiple of 8 on each of 2 ranks along tp, not 264"):
        _open(_changed(model=replace(small, vocabulary=264)), mesh="tp=2", ranks=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "float32"}, "give --precision bf16"),
        ({"actors": True}, "omit --offload, --actors"),
        ({"model": replace(MODEL, width=128, heads=4)}, "not 32: choose --heads 2 or 1"),
        ({"model": replace(MODEL, width=32, heads=2)}, "not 16: choose a --width that is a multiple of 64"),
        ({"model": replace(MODEL, vocabulary=257)}, "multiple of 8, not 257"),
        ({"training": TrainingConfig(steps=1, optimizer=OPTIMIZERS["muon"])}, "muon has no CUDA kernel"),
        ({"device": "cuda:2"}, "2 GPUs are visible here, cuda:0 to cuda:1"),
        (
            {"training": TrainingConfig(steps=1, sequences_per_shard=32768)},
            r"1 rank needs .* \(each .* of state, .* of gradients, .* of activations\), and Modelled GPU has",
        ),
    ],
)
def test_a_recipe_that_gpus_cannot_train_says_why(
    host: ModelHost, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _open(_changed(**changes))
    if "cuda:" not in changes.get("device", ""):
        executor, shown = _open(_changed(**changes, device="auto"))
        assert executor is None and shown.startswith("device cpu: ")


def test_fp8_needs_a_gpu_that_has_it(host: ModelHost) -> None:
    in_fp8 = _changed(matmul_precision="fp8")
    host.capability = (8, 6)
    with pytest.raises(
        UserError, match=r"fp8 needs a GPU of compute capability 9\.0, and Modelled GPU has 8\.6"
    ):
        _open(in_fp8)
    host.capability = (9, 0)
    executor, _ = _open(in_fp8)
    assert executor.matmul_precision == "fp8"
    for device in ("cpu", "auto"):
        with pytest.raises(UserError, match=f"expected --device cuda, got {device}"):
            _changed(matmul_precision="fp8", device=device).check()


def test_drivers_and_devices_that_are_too_old_are_named(host: ModelHost) -> None:
    host.driver = 12040
    with pytest.raises(UserError, match=r"supports CUDA 12.4.* compiled by 13.0.* version 580"):
        _open()
    host.driver, host.capability = 13000, (7, 0)
    with pytest.raises(UserError, match=r"compute capability 7.0"):
        _open()


def test_a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "FOUND", [Devices(lambda: 0)])
    with pytest.raises(UserError, match=r"--device cuda: no GPU is visible.*CUDA_VISIBLE_DEVICES"):
        _open()
    assert open_for_generation("auto", MODEL) is None
    with pytest.raises(UserError, match="no GPU is visible"):
        open_for_generation("cuda", MODEL)


def test_devices_that_do_not_exist() -> None:
    with pytest.raises(UserError, match=r"--device: hip is not supported yet: kernels exist as CUDA C\+\+"):
        recipe_of(["--device", "hip"])
    with pytest.raises(UserError, match="expected cpu, cuda, cuda:N or auto, got 'gpu'"):
        recipe_of(["--device", "gpu"])
    assert recipe_of(["--device", "cuda:3"]).device == "cuda:3"


def test_a_rank_leaves_a_gpu_that_failed_for_the_one_with_the_fewest_ranks() -> None:
    def chosen(rank: int, lost: str, device: str = "cuda") -> tuple[int, int]:
        launched = RankEnvironment(rank=rank, world_size=5, job=1, incarnation=2, node_address="")
        failed = devices.lost_devices({"ZBMD_LOST_DEVICES": lost})
        found = DeviceChoice.of(device, 3, launched, failed)
        return found.index, found.sharing

    assert [chosen(rank, "") for rank in range(5)] == [(0, 2), (1, 2), (2, 1), (0, 2), (1, 2)]
    assert chosen(0, "0") == (2, 2), "one rank is on cuda:2, two are on cuda:1"
    assert chosen(1, "0") == (1, 2), "a healthy one is kept"
    assert chosen(0, "0,2") == (1, 3)
    for device, lost in (("cuda", "0,1,2"), ("cuda:1", "1")):
        with pytest.raises(UserError, match="failed"):
            chosen(1, lost, device)
