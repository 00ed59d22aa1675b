"""Every kernel of the table compiles for its architectures, within its budget and without spills."""

from __future__ import annotations

import re

import pytest
from support.devices.ptx_programs import compiler

from zbmd.training.ops.cuda.table import KERNELS, compile_source

SOURCES = sorted({(one.source, architecture) for one in KERNELS for architecture in one.architectures})


@pytest.mark.parametrize(("source", "architecture"), SOURCES)
def test_kernels_compile_within_their_budgets(source: str, architecture: str) -> None:
    found = compile_source(compiler(), source, architecture)
    mine = {one.name: one for one in KERNELS if one.source == source and architecture in one.architectures}
    assert set(found.kernels) == set(mine), "a kernel and its entry in the table"
    assert not found.warnings
    for name, report in found.kernels.items():
        kernel = mine[name]
        assert (report.spill_bytes, report.stack_bytes) == (0, 0), name
        assert report.registers <= kernel.registers, f"{name}: {report.registers} registers"
        assert report.registers * kernel.block <= 65_536, f"{name}: not one block fits a multiprocessor"
        assert report.shared_bytes == kernel.shared, f"{name}: {report.shared_bytes} bytes of shared memory"
        assert kernel.shared + kernel.dynamic <= (99 if "sm_80" in kernel.architectures else 227) * 1024, name
    # Sums must not depend on the order in which blocks come.
    assert not re.search(r"\b(atom|red)\.(?!shared::cluster\.async)\S*f(16|32|64)", found.ptx)
