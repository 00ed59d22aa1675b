"""The doctor's checks of this machine: what it has, what holds, what its limits are."""

from __future__ import annotations

import os
import platform
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from zbmd.actors.view import RANKS_MAX
from zbmd.tools.doctor.report import Finding, FindingState, Section
from zbmd.transport.errors import ZbmdError
from zbmd.transport.handshake.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.host.process import files_of
from zbmd.transport.host.topology import Affinity, Distance, Gpu, HostPages, Topology, nvidia_driver_version
from zbmd.transport.host.topology.cpus import Cache, Cpus, NumaNode
from zbmd.transport.host.topology.kernel_files import format_cpu_list, parse_int, read_text
from zbmd.transport.memory.memfd import available_memory, in_words
from zbmd.transport.memory.placement import ARENA_BYTES_MIN, PAGE_BYTES, place

RANKS_OFTEN = 62  # more than most jobs have: a larger one raises its own limit, as far as the system lets it
SOCKET_BYTES_WANTED = 16 << 20
"""Socket buffer that keeps 25 Gbit/s busy over a round trip of 5 ms."""
FAST_MBPS = 10_000
_BUFFERS = {"tcp_rmem": "receive", "tcp_wmem": "send"}


def machine_findings(topology: Topology) -> Iterator[Finding]:
    """Software, processors, memory."""
    yield _check(
        "Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later"
    )
    kernel_ok = sys.platform == "linux" and hasattr(os, "pidfd_open")
    yield _check("kernel", kernel_ok, platform.release(), "run on Linux 5.3 or later")
    yield _note("processor", _processor(topology.cpus))
    yield _cores(topology.cpus)
    if topology.cpus.caches:
        yield _note("caches", ", ".join(map(_cache, topology.cpus.caches)))
    yield _memory()
    for node in topology.numa_nodes:
        yield _note(f"NUMA node {node.number}", _numa(node))
    yield _pages(topology.pages)
    yield _shared_memory()
    yield _cookie()


def _check(name: str, ok: bool, detail: str, advice: str, section: Section = Section.MACHINE) -> Finding:
    state = FindingState.OK if ok else FindingState.NOT_OK
    return Finding(section=section, name=name, state=state, detail=detail, advice="" if ok else advice)


def _note(name: str, detail: str, advice: str = "", section: Section = Section.MACHINE) -> Finding:
    return Finding(section=section, name=name, state=FindingState.NOTE, detail=detail, advice=advice)


def _processor(cpus: Cpus) -> str:
    parts = [_count(cpus.sockets, "socket"), _count(cpus.cores, "core"), _count(len(cpus.online), "cpu")]
    return f"{cpus.model}: {', '.join(parts)}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cores(cpus: Cpus) -> Finding:
    limits: list[str] = []
    if len(cpus.allowed) < len(cpus.online):
        limits.append(f"the affinity allows cpus {format_cpu_list(cpus.allowed)}")
    if cpus.quota is not None:
        limits.append(f"a cgroup grants {cpus.quota:g} cpus")
    because = f"; {', '.join(limits)}" if limits else ""
    default = min(cpus.usable, RANKS_MAX)
    return _check("cores", True, f"{cpus.usable} usable{because}; {default} is the default for -n", "")


def _cache(cache: Cache) -> str:
    size = f"{cache.nbytes >> 10} KiB" if cache.nbytes < 1 << 20 else f"{cache.nbytes >> 20} MiB"
    kind = "" if cache.kind == "unified" else f" {cache.kind}"
    return f"L{cache.level}{kind} {cache.count} x {size}"


def _memory() -> Finding:
    available = available_memory()
    detail = f"{in_words(available.nbytes)} available, limited by {available.limited_by}"
    return _check("memory", available.nbytes > ARENA_BYTES_MIN, detail, "free memory or raise the limit")


def _numa(node: NumaNode) -> str:
    distances = " ".join(map(str, node.distances))
    return (
        f"cpus {format_cpu_list(node.cpus)}, {in_words(node.memory_bytes)} with "
        f"{in_words(node.free_bytes)} free, distances {distances}"
    )


def _pages(pages: HostPages) -> Finding:
    reserved = ", ".join(
        f"{pool.free} of {pool.total} pages of {in_words(pool.page_bytes)} free"
        for pool in pages.pools
        if pool.total
    )
    shared = pages.transparent_shared
    detail = (
        f"{reserved or 'none reserved'}; transparent ones {pages.transparent or 'unknown'}, "
        f"for shared memory {shared or 'unknown'}"
    )
    return _note("huge pages", detail)


def _shared_memory() -> Finding:
    """Made and let go as a segment is, so this tells what an arena really gets."""
    try:
        placed = place("zbmd-doctor", head_bytes=PAGE_BYTES, arena_bytes=ARENA_BYTES_MIN)
    except (ZbmdError, OSError) as error:
        return _check("shared memory", False, str(error), "allow memfd_create, and free memory")
    os.close(placed.fd)
    got = placed.placement
    where = "" if got.numa_node is None else f" of NUMA node {got.numa_node}"
    return Finding(
        section=Section.MACHINE,
        name="shared memory",
        state=FindingState.OK,
        detail=f"works; an arena of {in_words(ARENA_BYTES_MIN)} lies in {got.pages.value} pages{where}",
        advice="; ".join(got.notes),
    )


def _cookie() -> Finding:
    try:
        load_or_create_cookie()
    except ZbmdError as error:
        return _check("cookie", False, str(error), "give this user a home that can be written")
    return _check("cookie", True, str(cookie_path()), "")


# --- accelerators ---------------------------------------------------------------------------------------


def accelerator_findings(topology: Topology, affinities: tuple[Affinity, ...]) -> Iterator[Finding]:
    """Each GPU and the network devices near it."""
    section = Section.ACCELERATORS
    if not topology.gpus:
        yield _note("GPU", "none of NVIDIA or AMD; jobs compute on the processor", section=section)
        return
    version = nvidia_driver_version()
    if version is not None:
        yield _note("NVIDIA driver", version, section=section)
    for number, gpu in enumerate(topology.gpus):
        yield _gpu(f"gpu{number}", gpu, affinities)


def _gpu(name: str, gpu: Gpu, affinities: tuple[Affinity, ...]) -> Finding:
    parts = [f"{gpu.model} at {gpu.place.address}"]
    if gpu.memory_bytes is not None:
        parts.append(in_words(gpu.memory_bytes))
    if gpu.place.numa_node is not None:
        parts.append(f"NUMA node {gpu.place.numa_node}")
    by_distance: dict[Distance, list[str]] = {}
    for each in affinities:
        if each.gpu == name:
            by_distance.setdefault(each.distance, []).append(each.device)
    near = "; ".join(f"{d.value} {' '.join(by_distance[d])}" for d in Distance if d in by_distance)
    detail = ", ".join(parts) + (f"; to the network: {near}" if near else "")
    if gpu.usable:
        return _check(name, True, detail, "", Section.ACCELERATORS)
    advice = (
        f"not usable: no driver is bound to it; install {gpu.vendor}'s"
        if gpu.driver is None
        else "not usable here: this container was not given it"
    )
    return _note(name, detail, advice, Section.ACCELERATORS)


# --- limits ---------------------------------------------------------------------------------------------


def limit_findings(topology: Topology, root: Path = Path("/")) -> Iterator[Finding]:
    """Check the limits that the system sets for a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_of(RANKS_OFTEN)
    most = soft if soft == resource.RLIM_INFINITY else hard
    allowed = "any number" if most == resource.RLIM_INFINITY else str(most)
    detail = f"{soft} allowed, up to {allowed} on demand; {RANKS_MAX} ranks need {files_of(RANKS_MAX)}"
    enough = most == resource.RLIM_INFINITY or most >= needed
    yield _check("open files", enough, detail, f"ulimit -n {needed}", Section.LIMITS)
    yield _realtime()
    yield _socket_buffers(topology, root)


def _realtime() -> Finding:
    """Asked of the kernel as the life threads ask: root, a capability or a limit may allow it."""
    refused: list[OSError] = []

    def ask() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
        except OSError as error:
            refused.append(error)

    thread = threading.Thread(target=ask, name="doctor")  # it alone changes, and ends
    thread.start()
    thread.join()
    if not refused:
        detail = "granted to the threads that notice deaths"
        return _check("real-time priority", True, detail, "", Section.LIMITS)
    return _note(
        "real-time priority",
        f"refused ({refused[0].strerror}): on a busy machine a death may be noticed after 10 ms, not 0.2 ms",
        "ulimit -r 1, or give the interpreter CAP_SYS_NICE",
        Section.LIMITS,
    )


def _socket_buffers(topology: Topology, root: Path) -> Finding:
    folder = root / "proc/sys/net/ipv4"
    found = {name: parse_int((read_text(folder / name) or "").split("\t")[-1]) for name in _BUFFERS}
    words = {name: "unknown" if most is None else in_words(most) for name, most in found.items()}
    detail = ", ".join(f"to {verb} {words[name]}" for name, verb in _BUFFERS.items())
    detail += " at most a connection"
    short = [name for name, most in found.items() if most is not None and most < SOCKET_BYTES_WANTED]
    fast = any(each.up and (each.speed_mbps or 0) >= FAST_MBPS for each in topology.interfaces)
    if not short or not fast:
        return _check("TCP buffers", True, detail, "", Section.LIMITS)
    values = " ".join(f"net.ipv4.{name}='4096 131072 {SOCKET_BYTES_WANTED}'" for name in short)
    return _note("TCP buffers", detail, f"for this network: sysctl -w {values}", Section.LIMITS)
