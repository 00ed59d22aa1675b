"""Faults that are planted in the kernels of the table are found: the checks of the interpreter reach them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.devices.kernel_runs import empty, fixed
from support.devices.ptx_programs import compiled

from zbmd.tools.lab import ptx
from zbmd.training.ops.cuda.table import BY_NAME, read_source

MUTATIONS = {
    "a wait for one copy too few": (
        *("matmul_nt_f32", "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
        *(ptx.RaceFound, "still writing"),
    ),
    "no barrier between stages": (
        *("matmul_nt_f32", "__syncthreads();  // tile `step`", "// tile `step`"),
        *(ptx.RaceFound, "still writing|no order"),
    ),
    "a stage that is filled too early": (
        *("matmul_nt_f32", "load(step + STAGES - 1);", "load(step + STAGES);"),
        *(ptx.RaceFound, "no order|still writing"),
    ),
    "no fence before wgmma": ("wgmma_nt_f32", "fence_for_wgmma();", "", ptx.RaceFound, "fence.proxy.async"),
    "sums that are read before the wait": (
        *("wgmma_nt_f32", "wgmma_wait<0>();", "wgmma_wait<1>();"),
        *(ptx.UninitialisedRead, "wgmma has still to write it"),
    ),
    "a buffer of wgmma that is filled too early": (
        *("wgmma_nt_f32", "load(step + STAGES - 2);", "load(step + STAGES - 1);"),
        *(ptx.RaceFound, "still reading|no order"),
    ),
    "an edge that is not checked": (
        *("matmul_nt_f32", "bool wanted = y < rows && x < columns;", "bool wanted = x < columns;"),
        *(ptx.MemoryFault, "is outside matmul_nt_f32_param_[12]"),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_fault_is_found(name: str) -> None:
    entry, before, after, error, message = MUTATIONS[name]
    kernel = BY_NAME[entry]
    # One kernel of the source is enough.
    text = re.sub(rf"^PRODUCT\((?!{entry},).*$", "", read_source(kernel.source), flags=re.MULTILINE)
    assert text.count(before) == 1, "the kernel has changed: plant the fault where it belongs now"
    mutant = compiled(text.replace(before, after), entry, kernel.architectures[-1])
    random = np.random.default_rng(0)
    m, n, k = 40, 24, 320  # five or more steps, so that each stage is used again
    a, b = fixed(random.standard_normal((m, k)), "bf16"), fixed(random.standard_normal((n, k)), "bf16")
    arguments: list[Any] = [ptx.Buffer(empty((m, n)), initialised=False), ptx.Buffer(a), ptx.Buffer(b)]
    arguments += [m, n, k, 0, 0, 0, 1.0, 0]
    with pytest.raises(error, match=message):
        ptx.launch(mutant, grid=1, block=kernel.block, arguments=arguments, shared=kernel.dynamic)
