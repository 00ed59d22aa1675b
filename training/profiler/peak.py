"""Measure once how many floating-point operations a second this machine does in matrix products, and how many
bytes a second it copies.

The measurement uses the machine as a job does: as many processes at once as there are ranks and processors
for, each with its BLAS threads. Products are timed by the processor time that they take, and the best one of
each process counts, so other load changes the result little. It is cached in
`$XDG_CACHE_HOME/zbmd/peaks.json`, under everything that it depends on.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from zbmd.training.profiler.accelerators import of_device
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, user_directory, write_atomically

ORDER: Final = 1024
"""Rows and columns of the matrices: 12 MiB in float32, and their product reaches the peak."""
MEASURE_S: Final = 1.0
STREAM_BYTES: Final = 64 << 20
"""Larger than the caches of most processors."""
STREAM_S: Final = 0.3
STREAM_TRIES: Final = 5
"""At least, however long they take."""
TIMEOUT_S: Final = 120.0
FILE_BYTES_MAX: Final = 1 << 20
PEAKS_MAX: Final = 256
PARALLEL_MAX: Final = 1024
THREADS_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
DTYPES: Final = ("float32", "float64")
CPUINFO: Final = Path("/proc/cpuinfo")

Name = Annotated[str, msgspec.Meta(max_length=256)]


class MachineDescription(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """The conditions of a peak. `parallel`: processes that compute at once, each with `threads` of BLAS."""

    processor: Name
    processors: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    blas: Name
    dtype: Name = "float32"
    threads: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    parallel: Annotated[int, msgspec.Meta(ge=1, le=PARALLEL_MAX)] = 1


class Peak(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs a second of all processes together, and bytes a second that they read and write in a copy."""

    machine: MachineDescription
    flops_per_s: Annotated[float, msgspec.Meta(gt=0.0)]
    bytes_per_s: Annotated[float, msgspec.Meta(gt=0.0)] | None = None


def this_machine(
    *, parallel: int, dtype: str = "float32", environ: Mapping[str, str] | None = None
) -> MachineDescription:
    """Return this machine, used by `parallel` processes with the BLAS threads that the environment gives
    them.

    More processes than fit the processors do not compute faster.
    """
    processors = len(os.sched_getaffinity(0))
    threads = _threads(os.environ if environ is None else environ, processors)
    return MachineDescription(
        processor=_processor(),
        processors=processors,
        blas=_blas(),
        dtype=dtype,
        threads=threads,
        parallel=max(1, min(parallel, processors // threads, PARALLEL_MAX)),
    )


CUDA: Final = "CUDA"
"""In the place of a BLAS, where a device computes."""


def device_machine(name: str, *, sharing: int) -> MachineDescription:
    """Return a device that so many ranks share, which computes in bfloat16."""
    return MachineDescription(
        processor=name[:256], processors=1, blas=CUDA, dtype="bfloat16", parallel=max(1, sharing)
    )


def known_peak(machine: MachineDescription) -> float | None:
    """Return the cached FLOPs a second of `machine`; None if it was not measured or the cache is
    unreadable."""
    found = known(machine)
    return None if found is None else found.flops_per_s


def known(machine: MachineDescription) -> Peak | None:
    """Return the cached measurements of `machine`; None as of `known_peak`. Of a device, its data sheet's."""
    if machine.blas == CUDA:
        found = of_device(machine.processor)
        if found is None:
            return None
        return Peak(machine=machine, flops_per_s=found.peak["bf16"], bytes_per_s=found.bandwidth)
    return next((peak for peak in _cached() if peak.machine == machine), None)


def peak_of(machine: MachineDescription) -> float:
    """Return the FLOPs a second of `machine`, which must be this one; measured if not cached.

    Raises `UserError` if it cannot be measured.
    """
    before = known(machine)
    if before is not None and before.bytes_per_s is not None:
        return before.flops_per_s
    found, stream = measured(machine)
    kept = [peak for peak in _cached() if peak.machine != machine]
    kept = [*kept[1 - PEAKS_MAX :], Peak(machine=machine, flops_per_s=found, bytes_per_s=stream)]
    path = cache_path()
    if path is not None:
        with contextlib.suppress(UserError):  # a home that cannot be written: it is measured again
            write_atomically(path, lambda file: file.write(msgspec.json.encode(kept)))
    return found


def measured(machine: MachineDescription) -> tuple[float, float]:
    """Measure FLOPs and bytes a second, in separate processes: BLAS fixes its number of threads when it is
    loaded.
    """
    environ = dict(os.environ) | {name: str(machine.threads) for name in THREADS_VARIABLES}
    command = [sys.executable, "-m", "zbmd.training.profiler.peak", machine.dtype, str(machine.threads)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(machine.parallel):
            started.append(
                subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
        return _together(started)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the peak of this machine cannot be measured: {error}") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def _together(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[float, float]:
    """Start all once all are warm, and add up their results."""
    watch = threading.Timer(TIMEOUT_S, _kill, (processes,))
    watch.start()
    try:
        flops = stream = 0.0
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it is warm
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
        for process in processes:
            assert process.stdout is not None
            one, other = process.stdout.readline().split()
            flops, stream = flops + float(one), stream + float(other)
        return flops, stream
    finally:
        watch.cancel()


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()


def cache_path(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return `zbmd/peaks.json` in `$XDG_CACHE_HOME` or `~/.cache`; None without a home directory."""
    directory = user_directory(UserFiles.CACHE, environ)
    return None if directory is None else directory / "peaks.json"


def _cached() -> list[Peak]:
    path = cache_path()
    if path is None:
        return []
    try:
        with path.open("rb") as file:
            return decode_peaks(file.read(FILE_BYTES_MAX + 1))
    except OSError:
        return []


def decode_peaks(data: bytes) -> list[Peak]:
    """Return the peaks in a file's bytes; empty if it is damaged, so that they are measured again."""
    try:
        return msgspec.json.decode(data, type=list[Peak])[-PEAKS_MAX:]
    except (ValueError, RecursionError):  # text that is no UTF-8 is no MsgspecError
        return []


def _processor() -> str:
    """Return the processor's name according to the kernel."""
    try:
        text = CPUINFO.read_text(errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model"):
            return value.strip()[:256]
    return os.uname().machine


def _blas() -> str:
    told: Any = np.show_config(mode="dicts")
    found = told.get("Build Dependencies", {}).get("blas", {}) if isinstance(told, dict) else {}
    return f"numpy {np.__version__}, {found.get('name', '?')} {found.get('version', '?')}"[:256]


def _threads(environ: Mapping[str, str], processors: int) -> int:
    for name in THREADS_VARIABLES:
        text = environ.get(name, "")
        if text.isdecimal() and int(text[:9]) > 0:
            return min(int(text[:9]), processors)
    return processors


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the processes: warm up, report it, wait for a line, and print FLOPs and bytes a second."""
    parser = argparse.ArgumentParser(prog="python -m zbmd.training.profiler.peak", description=__doc__)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("threads", type=int)
    given = parser.parse_args(argv)
    dtype = np.dtype(given.dtype)
    a = np.linspace(-1.0, 1.0, ORDER * ORDER, dtype=dtype).reshape(ORDER, ORDER)
    out = np.empty_like(a)
    source, target = np.ones(STREAM_BYTES, np.uint8), np.ones(STREAM_BYTES, np.uint8)
    for _ in range(3):
        np.matmul(a, a, out=out)
    print("warm", flush=True)
    sys.stdin.readline()
    best, until_s = 0.0, time.monotonic() + MEASURE_S
    while best == 0.0 or time.monotonic() < until_s:
        began_s = time.process_time()
        np.matmul(a, a, out=out)
        took_s = (time.process_time() - began_s) / given.threads
        best = max(best, 2.0 * ORDER**3 / max(took_s, 1e-9))
    stream, tries, until_s = 0.0, 0, time.monotonic() + STREAM_S
    while tries < STREAM_TRIES or time.monotonic() < until_s:
        tries += 1
        began_s = time.thread_time()
        np.copyto(target, source)
        stream = max(stream, 2.0 * STREAM_BYTES / max(time.thread_time() - began_s, 1e-9))
    print(best, stream, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
