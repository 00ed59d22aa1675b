"""The check of sm_90a's kernels, on a modelled GPU that interprets their PTX."""

from __future__ import annotations

import pytest
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import ModelLaunch
from support.devices.kernel_numbers import by_interpreter

from zbmd.tools.lab.gpu.hopper import kernels
from zbmd.training.ops.cuda.executor import Executor, compiled_here
from zbmd.transport.cuda.tiles import DeviceTiles, TileLayout
from zbmd.transport.errors import LocalProtocolError, UserError


def test_the_kernels_for_sm_90a_pass_their_check() -> None:
    host = ModelHost(devices=1, run_kernel=by_interpreter, seed=0)
    told = kernels(Executor(host.process(), compile=compiled_here), size=256, rounds=1)
    assert (
        "TMA tn" in told and "the bits of mma.sync" in told and "FP8" in told and "FP8 of layers tn" in told
    )
    assert "attention" in told and "its gradient" in told


def test_the_check_fails_for_a_kernel_that_computes_nothing() -> None:
    def idle(launch: ModelLaunch) -> None:
        if not launch.kernel.name.startswith("tma"):
            by_interpreter(launch)

    host = ModelHost(devices=1, run_kernel=idle, seed=0)
    with pytest.raises(UserError, match="tma_nn_f32 and matmul_nn_f32 differ by"):
        kernels(Executor(host.process(), compile=compiled_here), size=256, rounds=1)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"element": "f8"}, "expected elements of u8, bf16, f32"),
        ({"columns": 60}, "rows that are a multiple of 16 bytes apart"),
        ({"stride_bytes": 64}, "a stride of no less than a row"),
        ({"box_rows": 257}, "a box of at most 256 rows"),
        ({"box_columns": 128}, "box rows no longer than the swizzle"),
        ({"box_columns": 60}, "box rows of a multiple of 16 bytes"),
        ({"swizzle": 96}, "a swizzle of 0, 32, 64 or 128 bytes"),
        ({"rows": 0}, "1 to 2\\*\\*32 rows"),
    ],
)
def test_a_tensor_map_that_cuda_refuses_is_refused(changes: dict[str, int], rule: str) -> None:
    fields = {"element": "bf16", "rows": 100, "columns": 64, "box_rows": 64, "box_columns": 64} | changes
    with pytest.raises(LocalProtocolError, match=rule):
        TileLayout(**fields)  # type: ignore[arg-type]


def test_a_tensor_map_has_an_aligned_address() -> None:
    layout = TileLayout(element="bf16", rows=1, columns=64, box_rows=64, box_columns=64)
    with pytest.raises(LocalProtocolError, match="an address that is a multiple of 16"):
        DeviceTiles(8, layout)
