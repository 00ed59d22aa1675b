"""Measurements of this host before a job starts: processors, memory, disk, loopback, clock; and their
judgement.

They run in a process of their own, which has one thread of BLAS, and is ended after `TIMEOUT_S`. Speeds are
the best of several tries by the processor time that they take, so that other work on the host changes them
little. Each processor multiplies matrices of small integers, whose product is exact in float32: a wrong bit
is a broken processor.
"""

from __future__ import annotations

import ctypes
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from zbmd.tools.doctor.report import Finding, Section
from zbmd.training.profiler.peak import THREADS_VARIABLES
from zbmd.transport.errors import UserError

TIMEOUT_S: Final = 30.0
CPUS_MAX: Final = 128
"""Of a larger host so many are measured, spread evenly."""
ORDER: Final = 384
TRIES: Final = 5
CPU_TRIES: Final = 25
"""Of a product, which takes a few milliseconds at most: another guest of the machine may hold up some."""
BLOCK_BYTES: Final = 64 << 20
"""Larger than the caches of most processors."""
LOOPBACK_BYTES: Final = 32 << 20
ROUND_TRIPS: Final = 200
SLOW_CPU: Final = 0.6
"""A processor with less of the median's speed is an outlier."""
MEMORY_MIN, DISK_MIN, LOOPBACK_MIN = 1e9, 5e6, 50e6
"""Bytes a second below which a host is not fit."""
LOOPBACK_US_MAX: Final = 5_000.0
_TIME_ERROR: Final = 5
"""The result of adjtimex for a clock that nothing synchronises."""

Speed = Annotated[float, msgspec.Meta(ge=0.0)]


class CpuSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A processor: FLOPs a second of float32, and how many products were wrong."""

    cpu: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    flops_per_s: Speed
    wrong: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All measurements of a host, speeds in bytes a second. disk_error: empty if the disk can be written.

    clock: whether something synchronises it; quick: processors and memory alone were measured.
    """

    cpus: Annotated[tuple[CpuSpeed, ...], msgspec.Meta(max_length=CPUS_MAX)]
    memory_per_s: Speed
    disk_per_s: Speed
    disk_error: Annotated[str, msgspec.Meta(max_length=512)]
    loopback_per_s: Speed
    loopback_us: Speed
    clock: bool
    quick: bool = False


def measure_host(folder: Path, *, quick: bool = False, timeout_s: float = TIMEOUT_S) -> Measured:
    """Measure this host, with files in `folder`. Raises `UserError` if it takes too long or fails.

    quick: processors and memory alone, which takes half a second.
    """
    environment = {**os.environ, **dict.fromkeys(THREADS_VARIABLES, "1")}
    command = [
        sys.executable,
        "-m",
        "zbmd.tools.doctor.probes",
        os.fspath(folder),
        *(["quick"] if quick else []),
    ]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"the measurements did not end in {timeout_s:.0f} s") from None
    except OSError as error:
        raise UserError(f"the measurements cannot be started: {error.strerror}") from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise UserError(f"the measurements ended with exit code {done.returncode}: {''.join(last)[:256]}")
    return decode_measured(done.stdout)


def decode_measured(data: bytes) -> Measured:
    """Return the measurements that a process has printed. Raises `UserError` for anything else."""
    try:
        return msgspec.json.decode(data, type=Measured)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"the measurements cannot be read: {error}") from None


def judge(found: Measured) -> Iterator[Finding]:
    """Yield a finding for each measurement; `NOT_OK` for a host that a job is better without."""
    speeds = [one.flops_per_s for one in found.cpus]
    usual = statistics.median(speeds) if speeds else 0.0
    wrong = [one.cpu for one in found.cpus if one.wrong]
    slow = [one for one in found.cpus if one.flops_per_s < SLOW_CPU * usual]
    detail = (
        f"{usual / 1e9:.1f} GFLOP/s of float32 in the median of {len(speeds)} processors, all products exact"
    )
    if wrong:
        cpus = ", ".join(map(str, wrong))
        detail = f"cpu {cpus} computed wrong products"
        yield Section.SPEED.not_ok(
            "processors", detail, "do not use this host: a processor or its memory is broken"
        )
    elif slow:
        cpus = ", ".join(f"cpu {one.cpu} {one.flops_per_s / 1e9:.1f}" for one in slow)
        detail = f"{cpus} GFLOP/s, where the median has {usual / 1e9:.1f}"
        yield Section.SPEED.not_ok(
            "processors", detail, "see whether they are throttled (temperature, power)"
        )
    else:
        yield Section.SPEED.ok("processors", detail)
    yield _fast(
        "memory", found.memory_per_s, MEMORY_MIN, "copied", "see whether a module failed, or swap is used"
    )
    if found.quick:
        return
    if found.disk_error:
        yield Section.SPEED.not_ok("disk", found.disk_error, "free space there, or run in another directory")
    else:
        yield _fast(
            "disk", found.disk_per_s, DISK_MIN, "written and synced", "run in a directory on another disk"
        )
    trip = f"a round trip {found.loopback_us:.0f} us"
    if found.loopback_us > LOOPBACK_US_MAX:
        yield Section.SPEED.not_ok("loopback", trip, "see what else keeps the processors of this host busy")
    else:
        yield _fast("loopback", found.loopback_per_s, LOOPBACK_MIN, f"sent; {trip}", "see ip -s link show lo")
    words = "is synchronised" if found.clock else "nothing synchronises it"
    yield Section.SPEED.note(
        "clock", words, "" if found.clock else "for times in logs of several hosts: run chrony"
    )


def _fast(name: str, per_s: float, least: float, how: str, advice: str) -> Finding:
    detail = f"{per_s / 1e6:,.0f} MB/s {how}"
    return Section.SPEED.check(
        name,
        per_s >= least,
        f"{detail}" if per_s >= least else f"{detail}; at least {least / 1e6:,.0f} MB/s are expected",
        advice,
    )


# ---- the measurements, in the process of their own


def _cpu(cpu: int, a: np.ndarray, exact: np.ndarray) -> CpuSpeed:
    os.sched_setaffinity(0, {cpu})
    out, best_s, wrong = np.empty_like(exact), float("inf"), 0
    for _ in range(CPU_TRIES):
        began_s = time.thread_time()
        np.matmul(a, a, out=out)
        best_s = min(best_s, time.thread_time() - began_s)
        wrong += not np.array_equal(out, exact)
    return CpuSpeed(cpu=cpu, flops_per_s=2.0 * ORDER**3 / max(best_s, 1e-9), wrong=wrong)


def _processors() -> tuple[CpuSpeed, ...]:
    allowed = sorted(os.sched_getaffinity(0))
    chosen = allowed[:: -(-len(allowed) // CPUS_MAX)]
    whole = np.arange(ORDER * ORDER).reshape(ORDER, ORDER) % 17 - 8
    exact = sum(  # in integers, by another way than BLAS
        (np.multiply.outer(whole[:, k], whole[k]) for k in range(ORDER)), np.zeros_like(whole)
    )
    a = whole.astype(np.float32)
    found = tuple(_cpu(cpu, a, exact.astype(np.float32)) for cpu in chosen)
    os.sched_setaffinity(0, set(allowed))
    return found


def _memory() -> float:
    source, target, best_s = np.ones(BLOCK_BYTES, np.uint8), np.zeros(BLOCK_BYTES, np.uint8), float("inf")
    for _ in range(TRIES):
        began_s = time.thread_time()
        np.copyto(target, source)
        best_s = min(best_s, time.thread_time() - began_s)
    return BLOCK_BYTES / max(best_s, 1e-9)


def _disk(folder: Path) -> tuple[float, str]:
    data, best_s = os.urandom(4 << 20), float("inf")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(TRIES):
                began_s = time.monotonic()
                file.seek(0)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                best_s = min(best_s, time.monotonic() - began_s)
    except OSError as error:
        return 0.0, f"cannot write in {folder}: {error.strerror}"[:512]
    return len(data) / max(best_s, 1e-9), ""


def _loopback() -> tuple[float, float]:
    """Return bytes a second, and the median round trip in us."""

    def answer(server: socket.socket) -> None:
        one, _ = server.accept()
        with one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(ROUND_TRIPS):
                one.sendall(one.recv(1))
            left = LOOPBACK_BYTES
            while left > 0 and (got := len(one.recv(1 << 20))):
                left -= got
            one.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,), daemon=True)
        thread.start()
        with socket.create_connection(server.getsockname()) as one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips_us: list[float] = []
            for _ in range(ROUND_TRIPS):
                began_s = time.monotonic()
                one.sendall(b"x")
                one.recv(1)
                trips_us.append((time.monotonic() - began_s) * 1e6)
            began_s = time.monotonic()
            one.sendall(bytes(LOOPBACK_BYTES))
            one.recv(1)
            took_s = time.monotonic() - began_s
        thread.join()
    return LOOPBACK_BYTES / max(took_s, 1e-9), statistics.median(trips_us)


def _clock() -> bool:
    """Return whether the kernel says that its clock is synchronised."""
    room = ctypes.create_string_buffer(512)  # struct timex, all zeros: nothing is set
    return int(ctypes.CDLL(None).adjtimex(room)) not in (-1, _TIME_ERROR)


def main(folder: str, *, quick: bool = False) -> int:
    """Measure, and print the result as JSON."""
    per_s, error = (0.0, "") if quick else _disk(Path(folder))
    loopback_per_s, loopback_us = (0.0, 0.0) if quick else _loopback()
    found = Measured(
        cpus=_processors(),
        memory_per_s=_memory(),
        disk_per_s=per_s,
        disk_error=error,
        loopback_per_s=loopback_per_s,
        loopback_us=loopback_us,
        clock=_clock(),
        quick=quick,
    )
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], quick=sys.argv[2:] == ["quick"]))
