"""Compilation by NVRTC: results, the report, the cache, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from zbmd.training.ops.cuda.compiler import (
    CompileFailed,
    Compiler,
    CompilerMissing,
    KernelReport,
    UnknownArchitecture,
    parse_report,
)

SOURCE = """
#include "factor.cuh"
extern "C" __global__ void scale(float *x, int n) {
    __shared__ float tile[32];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) x[threadIdx.x] = tile[31 - threadIdx.x] * FACTOR;
}
"""
HEADERS = {"factor.cuh": "#define FACTOR 3.0f\n"}


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_a_source_becomes_ptx_machine_code_and_a_report(tmp_path: Path, architecture: str) -> None:
    found = Compiler(cache=tmp_path).compile(SOURCE, architecture=architecture, headers=HEADERS)
    assert f".target {architecture}" in found.ptx and ".entry scale(" in found.ptx
    assert found.cubin.startswith(b"\x7fELF")
    report = found.kernels["scale"]
    assert 0 < report.registers < 32
    assert (report.shared_bytes, report.stack_bytes, report.spill_bytes) == (128, 0, 0)
    assert found.warnings == ()


def test_spills_and_warnings_are_in_the_report(tmp_path: Path) -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float *x) {
        float kept[96];
        int unused;
    #pragma unroll
        for (int i = 0; i < 96; i++) kept[i] = x[threadIdx.x + i * 1024];
        __syncthreads();
    #pragma unroll
        for (int i = 0; i < 96; i++) x[threadIdx.x * 96 + i] = kept[95 - i] * kept[i];
    }
    """
    found = Compiler(cache=tmp_path).compile(source, architecture="sm_80")
    assert found.kernels["crowded"].spill_bytes > 0
    assert any("unused" in line for line in found.warnings)


def test_a_second_compiler_reads_the_cache(tmp_path: Path) -> None:
    first = Compiler(cache=tmp_path).compile(SOURCE, architecture="sm_80", headers=HEADERS)
    (entry,) = tmp_path.iterdir()
    written = entry.stat().st_mtime_ns
    assert Compiler(cache=tmp_path).compile(SOURCE, architecture="sm_80", headers=HEADERS) == first
    assert entry.stat().st_mtime_ns == written
    for other in (
        {"architecture": "sm_90a", "headers": HEADERS},
        {"architecture": "sm_80", "headers": {"factor.cuh": "#define FACTOR 2.0f\n"}},
        {"architecture": "sm_80", "headers": HEADERS, "options": ["--use_fast_math"]},
    ):
        Compiler(cache=tmp_path).compile(SOURCE, **other)  # type: ignore[arg-type]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_entry_is_compiled_again(tmp_path: Path, damage: str) -> None:
    first = Compiler(cache=tmp_path).compile(SOURCE, architecture="sm_80", headers=HEADERS)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes({"cut": whole[:-9], "changed": whole[:99] + b"?" + whole[100:], "empty": b""}[damage])
    assert Compiler(cache=tmp_path).compile(SOURCE, architecture="sm_80", headers=HEADERS).ptx == first.ptx
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    compiler = Compiler(cache=in_the_way / "below")
    with structlog.testing.capture_logs() as logs:
        first = compiler.compile(SOURCE, architecture="sm_80", headers=HEADERS)
        assert compiler.compile(SOURCE, architecture="sm_80", headers=HEADERS) is first
        compiler.compile(SOURCE, architecture="sm_90a", headers=HEADERS)
    assert [entry["event"] for entry in logs] == ["compiled kernels are kept in memory only"]


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CompilerMissing, match=r"pip install .*nvidia-cuda-nvrtc"):
        Compiler(library=tmp_path / "libnvrtc.so.13")
    compiler = Compiler(cache=tmp_path)
    with pytest.raises(UnknownArchitecture, match=r"sm_80, .*'sm_42'"):
        compiler.compile(SOURCE, architecture="sm_42")
    with pytest.raises(CompileFailed, match=r"kernels\.cu does not compile for sm_80") as failed:
        compiler.compile(SOURCE + "int x = y;", architecture="sm_80", headers=HEADERS)
    assert 'identifier "y" is undefined' in failed.value.log
    assert not list(tmp_path.iterdir())


def test_reports_of_several_kernels_are_told_apart() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : Function properties for b
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, used 1 barriers, 1024 bytes smem
"""
    assert parse_report(log) == {
        "a": KernelReport(registers=255, shared_bytes=0, stack_bytes=8, spill_bytes=16),
        "b": KernelReport(registers=16, shared_bytes=1024, stack_bytes=0, spill_bytes=0),
    }
