"""The doctor's checks of this machine: its parts and limits, its network and links, optional dependencies."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import statistics
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.actors.contracts import fingerprints
from zbmd.actors.view import RANKS_MAX
from zbmd.tools.doctor.report import Extra, Finding, PairLink, Section
from zbmd.training.autograd.array_module import xp_for
from zbmd.transport.clock.deadlines import Deadlines
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.handshake.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.host.link_choice import (
    INTERFACES_VARIABLE,
    Capabilities,
    InterfaceFilter,
    choose_link,
    interface_words,
    parse_interface_filter,
    rank_interfaces,
)
from zbmd.transport.host.process import files_of
from zbmd.transport.host.topology import (
    INSTALL_VERBS,
    Affinity,
    Distance,
    Gpu,
    HostFacts,
    HostPages,
    Interface,
    InterfaceKind,
    Topology,
    nvidia_driver_version,
)
from zbmd.transport.host.topology.cpus import Cache, Cpus, NumaNode
from zbmd.transport.host.topology.kernel_files import format_cpu_list, parse_int, read_text
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint, Link
from zbmd.transport.memory.memfd import ARENA_BYTES_MIN, PAGE_BYTES, available_memory, in_words, place
from zbmd.transport.native._native import now_ns
from zbmd.transport.shm.connect import dial, listen

RANKS_OFTEN = 62  # more than most jobs have: a larger one raises its own limit, as far as the system lets it
SOCKET_BYTES_WANTED = 16 << 20
"""Socket buffer that keeps 25 Gbit/s busy over a round trip of 5 ms."""
FAST_MBPS = 10_000
_BUFFERS = {"tcp_rmem": "receive", "tcp_wmem": "send"}


def machine_findings(topology: Topology) -> Iterator[Finding]:
    """Software, processors, memory."""
    yield Section.MACHINE.check(
        "Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or later"
    )
    kernel_ok = sys.platform == "linux" and hasattr(os, "pidfd_open")
    yield Section.MACHINE.check("kernel", kernel_ok, platform.release(), "run on Linux 5.3 or later")
    yield Section.MACHINE.note("processor", _processor(topology.cpus))
    yield _cores(topology.cpus)
    if topology.cpus.caches:
        yield Section.MACHINE.note("caches", ", ".join(map(_cache, topology.cpus.caches)))
    yield _memory()
    for node in topology.numa_nodes:
        yield Section.MACHINE.note(f"NUMA node {node.number}", _numa(node))
    yield _pages(topology.pages)
    yield _shared_memory()
    yield _cookie()


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
    return Section.MACHINE.ok("cores", f"{cpus.usable} usable{because}; {default} is the default for -n")


def _cache(cache: Cache) -> str:
    size = f"{cache.nbytes >> 10} KiB" if cache.nbytes < 1 << 20 else f"{cache.nbytes >> 20} MiB"
    kind = "" if cache.kind == "unified" else f" {cache.kind}"
    return f"L{cache.level}{kind} {cache.count} x {size}"


def _memory() -> Finding:
    available = available_memory()
    detail = f"{in_words(available.nbytes)} available, limited by {available.limited_by}"
    return Section.MACHINE.check(
        "memory", available.nbytes > ARENA_BYTES_MIN, detail, "free memory or raise the limit"
    )


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
    return Section.MACHINE.note("huge pages", detail)


def _shared_memory() -> Finding:
    """Made and let go as a segment is, so this shows what an arena really gets."""
    try:
        placed = place("zbmd-doctor", head_bytes=PAGE_BYTES, arena_bytes=ARENA_BYTES_MIN)
    except (ZbmdError, OSError) as error:
        return Section.MACHINE.not_ok("shared memory", str(error), "allow memfd_create, and free memory")
    os.close(placed.fd)
    got = placed.placement
    where = "" if got.numa_node is None else f" of NUMA node {got.numa_node}"
    detail = f"works; an arena of {in_words(ARENA_BYTES_MIN)} lies in {got.pages.value} pages{where}"
    return Section.MACHINE.ok("shared memory", detail, "; ".join(got.notes))


def _cookie() -> Finding:
    try:
        load_or_create_cookie()
    except ZbmdError as error:
        return Section.MACHINE.not_ok("cookie", str(error), "give this user a home that can be written")
    return Section.MACHINE.ok("cookie", str(cookie_path()))


# --- accelerators ---------------------------------------------------------------------------------------


def accelerator_findings(topology: Topology, affinities: tuple[Affinity, ...]) -> Iterator[Finding]:
    """Each GPU and the network devices near it."""
    section = Section.ACCELERATORS
    if not topology.gpus:
        yield section.note("GPU", "none of NVIDIA or AMD; jobs compute on the processor")
        return
    version = nvidia_driver_version()
    if version is not None:
        yield section.note("NVIDIA driver", version)
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
        return Section.ACCELERATORS.ok(name, detail)
    advice = (
        f"not usable: no driver is bound to it; install {gpu.vendor}'s"
        if gpu.driver is None
        else "not usable here: this container was not given it"
    )
    return Section.ACCELERATORS.note(name, detail, advice)


# --- limits ---------------------------------------------------------------------------------------------


def limit_findings(topology: Topology, root: Path = Path("/")) -> Iterator[Finding]:
    """Check the limits that the system sets for a process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files_of(RANKS_OFTEN)
    most = soft if soft == resource.RLIM_INFINITY else hard
    allowed = "any number" if most == resource.RLIM_INFINITY else str(most)
    detail = f"{soft} allowed, up to {allowed} on demand; {RANKS_MAX} ranks need {files_of(RANKS_MAX)}"
    enough = most == resource.RLIM_INFINITY or most >= needed
    yield Section.LIMITS.check("open files", enough, detail, f"ulimit -n {needed}")
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
        return Section.LIMITS.ok("real-time priority", detail)
    return Section.LIMITS.note(
        "real-time priority",
        f"refused ({refused[0].strerror}): on a busy machine a death may be noticed after 10 ms, not 0.2 ms",
        "ulimit -r 1, or give the interpreter CAP_SYS_NICE",
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
        return Section.LIMITS.ok("TCP buffers", detail)
    values = " ".join(f"net.ipv4.{name}='4096 131072 {SOCKET_BYTES_WANTED}'" for name in short)
    return Section.LIMITS.note("TCP buffers", detail, f"for this network: sysctl -w {values}")


# --- optional dependencies ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Package:
    """A Python package, by the name it is imported by."""

    module: str
    distributions: tuple[str, ...]
    purpose: str
    install: str


PACKAGES: Final = (
    _Package(
        module="cupy",
        distributions=("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy-rocm-5-0", "cupy"),
        purpose="computing on GPUs",
        install="pip install 'zbmd[gpu]'",
    ),
    _Package(
        module="pyverbs", distributions=("pyverbs",), purpose="RDMA between hosts", install=INSTALL_VERBS
    ),
    _Package(
        module="torch",
        distributions=("torch",),
        purpose="the torch.distributed backend",
        install="pip install 'zbmd[torch]'",
    ),
    _Package(
        module="matplotlib",
        distributions=("matplotlib",),
        purpose="pictures of runs (zbmd plot)",
        install="pip install 'zbmd[plot]'",
    ),
)
PROGRAMS: Final = (
    ("iperf3", "the speed of the network, to compare with", "apt install iperf3"),
    ("mpirun", "benchmarks against Open MPI or MPICH", "apt install openmpi-bin"),
    ("nvidia-smi", "a look at NVIDIA GPUs", "install it with NVIDIA's driver"),
)


def find_extras(topology: Topology) -> tuple[Extra, ...]:
    """Every optional part; nothing is imported."""
    use_of = {
        "cupy": any(gpu.usable for gpu in topology.gpus),
        "pyverbs": bool(topology.rdma_devices),
        "nvidia-smi": any(gpu.vendor == "NVIDIA" and gpu.usable for gpu in topology.gpus),
    }
    packages = [
        Extra(
            name=each.module,
            purpose=each.purpose,
            install=each.install,
            version=_version(each),
            needed=use_of.get(each.module, False),
        )
        for each in PACKAGES
    ]
    programs = [
        Extra(
            name=name,
            purpose=purpose,
            install=install,
            version=shutil.which(name),
            needed=use_of.get(name, False),
        )
        for name, purpose, install in PROGRAMS
        if name != "nvidia-smi" or use_of[name]
    ]
    return (*packages, *programs)


def extra_findings(extras: tuple[Extra, ...], topology: Topology) -> Iterator[Finding]:
    """Yield a line for each part; a part that this machine cannot use is not reported as missing."""
    for extra in extras:
        if extra.version is not None:
            problem = _cupy_problem(topology) if extra.name == "cupy" else None
            detail = f"{extra.version}: {extra.purpose}" + ("" if problem is None else f": {problem}")
            yield Section.EXTRAS.check(extra.name, problem is None, detail, "")
        else:
            why = "missing, and this machine has use for it" if extra.needed else "not installed"
            yield Section.EXTRAS.note(extra.name, f"{why}: {extra.purpose}", extra.install)


def _cupy_problem(topology: Topology) -> str | None:
    """Why cupy does not compute although there is a GPU to compute on."""
    if not any(gpu.usable for gpu in topology.gpus):
        return None
    try:
        xp_for("cuda")
    except UserError as error:
        return str(error)
    return None


def _version(package: _Package) -> str | None:
    """The installed version; None if it cannot be imported. A distribution's own package has no metadata."""
    try:
        if importlib.util.find_spec(package.module) is None:
            return None
    except (ImportError, ValueError):
        return None
    for distribution in package.distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "installed"


# --- network --------------------------------------------------------------------------------------------

ROUND_TRIPS: Final = 200
PROBE_FRAME: Final = b"doctor"


def read_interface_filter(environment: Mapping[str, str]) -> tuple[InterfaceFilter, Finding | None]:
    """Return the user's choice of interfaces, and a finding if it names none."""
    text = environment.get(INTERFACES_VARIABLE)
    if text is None:
        return InterfaceFilter(), None
    try:
        return parse_interface_filter(text), None
    except UserError as error:
        return InterfaceFilter(), Section.NETWORK.not_ok(INTERFACES_VARIABLE, str(error))


def network_findings(topology: Topology, wanted: InterfaceFilter) -> Iterator[Finding]:
    """Each interface, and the one that links to other hosts would use."""
    for each in topology.interfaces:
        yield Section.NETWORK.note(each.name, _interface(each))
    ranked = [
        each
        for each in rank_interfaces(topology.interfaces, wanted)
        if each.kind is not InterfaceKind.LOOPBACK
    ]
    name = "to other hosts"
    if ranked:
        because = f" ({INTERFACES_VARIABLE}={wanted})" if wanted.names else ""
        yield Section.NETWORK.ok(name, f"{interface_words(ranked[0])} is the first choice{because}")
    elif wanted.names:
        names = ", ".join(each.name for each in topology.interfaces)
        detail = f"{INTERFACES_VARIABLE}={wanted} admits no interface that is up and has an address"
        yield Section.NETWORK.not_ok(name, detail, f"unset it, or name one of: {names}")
    else:
        detail = "no interface is up and has an address: jobs stay on this host"
        yield Section.NETWORK.note(name, detail)


def _interface(interface: Interface) -> str:
    parts = ["up" if interface.up else "down", interface.kind.value]
    if interface.speed_mbps is not None:
        parts.append(f"{interface.speed_mbps / 1000:g} Gbit/s")
    parts.append(f"mtu {interface.mtu}")
    if interface.driver is not None:
        parts.append(interface.driver)
    if interface.place is not None:
        node = "" if interface.place.numa_node is None else f" on NUMA node {interface.place.numa_node}"
        parts.append(f"{interface.place.address}{node}")
    return ", ".join((*parts, *interface.addresses))


# --- links ----------------------------------------------------------------------------------------------


def local_link(facts: HostFacts, can: Capabilities) -> PairLink:
    """The link of each two ranks of this host."""
    between = ("any rank here", "any other")
    try:
        return PairLink(between=between, choice=choose_link(facts, facts, can))
    except UserError as error:
        return PairLink(between=between, choice=None, error=str(error))


def link_findings(links: tuple[PairLink, ...]) -> Iterator[Finding]:
    """Each pair's link and its reason, and what would make it better."""
    for link in links:
        name = " - ".join(link.between)
        if link.choice is None:
            yield Section.LINKS.not_ok(name, link.error)
            continue
        detail = f"{link.choice.transport.value}: {link.choice.reason}"
        if link.choice.no_rdma:
            detail += f"; no RDMA: {link.choice.no_rdma}"
        yield Section.LINKS.ok(name, detail, "; ".join(link.choice.better))


async def probe_finding(deadlines: Deadlines) -> Finding:
    """Whether a link can really be made here: listen, dial, hello, and frames to and fro."""
    name = "a link made now"
    try:
        median_ns = await _round_trip_ns(deadlines)
    except (ZbmdError, OSError, TimeoutError) as error:
        detail = f"{type(error).__name__}: {error}"
        return Section.LINKS.not_ok(name, detail, "allow unix sockets, memfd and eventfd")
    detail = f"shm between two ends in this process: {median_ns / 1000:.0f} us a frame's round trip"
    return Section.LINKS.ok(name, f"{detail}, median of {ROUND_TRIPS}")


async def _round_trip_ns(deadlines: Deadlines) -> float:
    address = f"zbmd-doctor-{os.getuid()}-{os.getpid()}"
    accepted: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
    listener = listen(address, accepted.set_result, _endpoint("doctor-listener", deadlines))
    links: list[Link] = []
    try:
        links.append(await dial(address, _endpoint("doctor-dialer", deadlines)))
        async with asyncio.timeout(deadlines.dial_ns / 1e9):
            links.append(await accepted)
            return statistics.median([await _round_trip(*links) for _ in range(ROUND_TRIPS)])
    finally:
        for link in links:
            link.close()
        listener.close()
        await listener.wait_closed()


async def _round_trip(a: Link, b: Link) -> int:
    back = asyncio.get_running_loop().create_future()
    b.on_frame = lambda *_: b.send(PROBE_FRAME)
    a.on_frame = lambda *_: back.set_result(None)
    started_ns = now_ns()
    a.send(PROBE_FRAME)
    await back
    return now_ns() - started_ns


def _endpoint(name: str, deadlines: Deadlines) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1, contracts=fingerprints())
    return Endpoint(identity=identity, cookie=load_or_create_cookie(), deadlines=deadlines)
