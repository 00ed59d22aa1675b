"""Faults that are planted in the kernels of the table are found: the checks of the interpreter reach them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from support.devices.kernel_runs import empty, fixed, tiled
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
    "TF32: no barrier between stages": (
        *("tf32_nt_f32", "__syncthreads();  // tile `step`", "// tile `step`"),
        *(ptx.RaceFound, "still writing|no order"),
    ),
    "FP8: no fence before wgmma": (
        *("fp8_e4m3_e4m3_bf16", "fence_for_wgmma();", "", ptx.RaceFound, "fence.proxy.async"),
    ),
    "FP8: sums that are read before the wait": (
        *("fp8_e4m3_e4m3_bf16", "wgmma_wait<0>();", "wgmma_wait<1>();"),
        *(ptx.UninitialisedRead, "wgmma has still to write it"),
    ),
    "FP8: a stage that is filled too early": (
        *("fp8_e4m3_e4m3_bf16", "load(step + STAGES - 1);", "load(step + STAGES);"),
        *(ptx.RaceFound, "still reading|no order|still writing"),
    ),
    "FP8: a wait for one copy too few": (
        *("fp8_e4m3_e4m3_bf16", "copy_async_wait<STAGES - 2>();", "copy_async_wait<STAGES - 1>();"),
        *(ptx.RaceFound, "still writing"),
    ),
    "FP8: no barrier before the transposed tile is read": (
        *("fp8_quantise_e4m3_f32", "__syncthreads();  // the transposed", "// the transposed"),
        *(ptx.RaceFound, "no order"),
    ),
    "FP8: no barrier before a tile of blocks is read": (
        *("fp8_tiles_turned_f32", "__syncthreads();  // the tile is there", ""),
        *(ptx.RaceFound, "no order"),
    ),
    "FP8: no barrier before the scales of columns are read": (
        *("fp8_of_rows_f32", "__syncthreads();  // tile `step`", "// tile `step`"),
        *(ptx.PtxError, "no order|still writing|is not initialised"),
    ),
    "FP8: scales of columns that are overwritten while they are read": (
        *("fp8_of_rows_f32", "by_column[step % 2][threadIdx.x] = ", "by_column[0][threadIdx.x] = "),
        *(ptx.PtxError, "no order|initialised"),
    ),
    "FP8: a row of the gradient that is not checked": (
        *("fp8_of_rows_f32", "if (row >= m) continue;", "", ptx.MemoryFault, "is outside"),
    ),
    "FP8: a column of the gradient that is not checked": (
        *("fp8_of_rows_f32", "column < n ? inverse_of", "true ? inverse_of", ptx.MemoryFault, "is outside"),
    ),
    "TMA: a tile that is not waited for": (
        *("tma_nt_f32", "barrier_wait(full + stage * 8, step / STAGES & 1);", ""),
        *(ptx.RaceFound, "earlier write by a bulk copy have no order"),
    ),
    "TMA: a tile that is waited for by halves": (
        *("tma_nt_f32", "barrier_expect(full + stage * 8, STAGE_BYTES);"),
        *("barrier_expect(full + stage * 8, ROWS * DEPTH * 2);", ptx.RaceFound, "still writing"),
    ),
    "TMA: a stage that is given back too early": (
        *("tma_nt_f32", "wgmma_wait<1>();", "wgmma_wait<2>();"),
        *(ptx.RaceFound, "still reading"),
    ),
    "TMA: a stage that is given back by one lane for all": (
        *("tma_nt_f32", "__syncwarp();\n            if (step &&", "if (step &&"),
        *(ptx.RaceFound, "no order"),
    ),
    "TMA: a stage that is filled without a wait": (
        *("tma_nt_f32", "step / STAGES - 1 & 1", "step / STAGES & 1"),
        *(ptx.RaceFound, "still reading|no order"),
    ),
    "TMA: a barrier that copies may not see": (
        *("tma_nt_f32", "barrier_init_fence();", "", ptx.RaceFound, "fence.mbarrier_init"),
    ),
    "attention: no fence before wgmma": (
        *("attention_wgmma_64", "fence_for_wgmma();", "", ptx.RaceFound, "fence.proxy.async"),
    ),
    "attention: scores that are read before the wait": (
        *("attention_wgmma_64", "wgmma_wait<0>();\n        wgmma_done(p);"),
        *("wgmma_wait<1>();\n        wgmma_done(p);", ptx.UninitialisedRead, "wgmma has still to write it"),
    ),
    "attention: a tile that is overwritten while the other warpgroup reads": (
        *("attention_wgmma_64", "__syncthreads();  // both warpgroups", "// both warpgroups"),
        *(ptx.RaceFound, "still reading|no order"),
    ),
    "attention: keys that are not waited for": (
        *("attention_wgmma_64", "copy_async_wait<1>();", "copy_async_wait<2>();"),
        *(ptx.RaceFound, "still writing"),
    ),
    "attention's keys: no fence before wgmma": (
        *(
            "attention_wgmma_keys_grad_64",
            "load(step + 1);\n        copy_async_wait<1>();\n        fence_for_wgmma();",
        ),
        *("load(step + 1);\n        copy_async_wait<1>();", ptx.RaceFound, "fence.proxy.async"),
    ),
    "attention's keys: queries that are not waited for": (
        *("attention_wgmma_keys_grad_64", "load(step + 1);\n        copy_async_wait<1>();"),
        *("load(step + 1);\n        copy_async_wait<2>();", ptx.RaceFound, "still writing"),
    ),
    "attention's keys: a stage that is overwritten while the other warpgroup reads": (
        *("attention_wgmma_keys_grad_64", "__syncthreads();  // both warpgroups are done with the stage", ""),
        *(ptx.RaceFound, "still reading|no order"),
    ),
    "attention's keys: sums that are read before the wait": (
        *("attention_wgmma_keys_grad_64", "wgmma_wait<0>();\n        wgmma_done(dv);"),
        *(
            "wgmma_wait<1>();\n        wgmma_done(dv);",
            ptx.PtxError,
            "wgmma has still to write it|still reading",
        ),
    ),
    "attention's queries: no barrier before a tile is read": (
        *("attention_wgmma_queries_grad_64", "__syncthreads();  // tile j is there", ""),
        *(ptx.RaceFound, "no order|still writing"),
    ),
    "attention's queries: sums that are read before the wait": (
        *("attention_wgmma_queries_grad_64", "wgmma_wait<0>();\n        wgmma_done(dq);"),
        *(
            "wgmma_wait<1>();\n        wgmma_done(dq);",
            ptx.PtxError,
            "wgmma has still to write it|still reading",
        ),
    ),
    "attention's queries: a key whose place is not checked": (
        *("attention_wgmma_queries_grad_64", "bool seen = key <= row && row < length;", "bool seen = true;"),
        *(ptx.MemoryFault, "is outside"),
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
    kinds = "PRODUCT(8|_TMA|_OF|_OF_BLOCKS)?|QUANTISE(_BLOCKS)?|UPDATE"
    pattern = rf"^(({kinds})\((?!{entry},).*|ATTENTION(_GRAD)?\(.*128\))$"
    text = re.sub(pattern, "", read_source(kernel.source), flags=re.MULTILINE)
    operand = "float" if entry.startswith("tf32") else "bf16"
    wanted = f"PRODUCT_OF({operand}, {entry}, float, false, true)"
    text = re.sub(r"^PRODUCTS\(\w+\)$", wanted, text, flags=re.MULTILINE)
    assert text.count(before) == 1, "the kernel has changed: plant the fault where it belongs now"
    mutant = compiled(text.replace(before, after), entry, kernel.architectures[-1])
    blocks, given = 1 + entry.startswith("attention"), _arguments(entry)
    with pytest.raises(error, match=message):
        ptx.launch(mutant, grid=blocks, block=kernel.block, arguments=given, shared=kernel.dynamic)


def _arguments(entry: str) -> list[Any]:
    """Return arguments of a launch, with steps enough that each stage is used again."""
    random = np.random.default_rng(0)
    if entry.startswith("fp8_quantise"):
        q, x = (ptx.Buffer(empty((64, 64), one), initialised=one == "f32") for one in ("u1", "f32"))
        turned, most = ptx.Buffer(empty((64, 64), "u1")), ptx.Buffer(empty(1))
        return [q, turned, most, x, ptx.Buffer(fixed([1.0])), 64, 64]
    if entry.startswith("fp8_tiles"):
        q, scales = ptx.Buffer(empty((64, 64), "u1"), initialised=False), ptx.Buffer(empty(1))
        return [q, scales, ptx.Buffer(fixed(random.standard_normal((64, 64)))), 64, 64]
    if entry.startswith("attention"):
        qkv, bias = fixed(random.standard_normal((200, 192)), "bf16"), fixed(np.zeros((1, 200)))
        if "grad" in entry:
            dy, log, along = fixed(np.ones((200, 64)), "bf16"), fixed(np.ones(200)), fixed(np.ones(200))
            given = [ptx.Buffer(one) for one in (dy, log, along, qkv, bias)]
            return [ptx.Buffer(empty((200, 192), "bf16")), *given, 200, 1, 1, 200]
        results = [ptx.Buffer(empty(shape, kind)) for shape, kind in (((200, 64), "bf16"), ((1, 200), "f32"))]
        return [*results, ptx.Buffer(qkv), ptx.Buffer(bias), 200, 1, 1, 200]
    m, n, k = 40, 32, 640 if entry.startswith("fp8") else 320
    shapes, result = ((m, k), (n, k)), ptx.Buffer(empty((m, n), entry.rpartition("_")[2]), initialised=False)
    if entry.startswith("fp8"):
        a, b = (ptx.Buffer(fixed(random.integers(0, 100, shape), "u1")) for shape in shapes)
        each = (m * 5, n * 5) if "of_rows" in entry else (1, 1)
        scales = [ptx.Buffer(fixed(np.ones(count))) for count in each]
        return [result, a, b, m, n, k, *scales, 0, 0, 0, 0]
    operand = "f32" if entry.startswith("tf32") else "bf16"
    left, right = (fixed(random.standard_normal(shape), operand) for shape in shapes)
    is_tiled = entry.startswith("tma")
    a = tiled(left, 128, 64) if is_tiled else ptx.Buffer(left)
    b = tiled(right, 256, 64) if is_tiled else ptx.Buffer(right)
    return [result, a, b, m, n, k, 0, 0, 0, 1.0, 0]
