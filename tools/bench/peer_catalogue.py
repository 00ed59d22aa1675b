"""Catalogue of peers: how each is started in its best documented configuration, and what it needs.

- `openmpi`, `mpich`: numpy arrays through mpi4py, which is what a Python program gets from MPI. One wheel of
  mpi4py serves both: it finds the library at run time (MPI4PY_MPIABI).
- `openmpi-c`, `mpich-c`: the same ping-pong compiled from peers/mpi_pair.c, without any Python.
- `sockets`: plain blocking sockets from one memory to another, and nothing else.
- `memcpy`: within one process, between arrays of numpy, which get huge pages; `memcpy-shared`: between two
  parts of a segment, which has the pages that shared memory gets.
- Open MPI: `--bind-to core`, and the shared-memory or TCP transport alone (its FAQ on shared memory); MPICH
  (ch4:ucx): `-bind-to core`, and for TCP UCX_TLS.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import importlib.util
import ipaddress
import os
import platform
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zbmd.tools.bench.result import Contestant
from zbmd.tools.bench.transport.perftest import BANDWIDTH, LATENCY, MESSAGES
from zbmd.tools.bench.workers import CONTROL, Workers
from zbmd.transport.errors import UserError
from zbmd.transport.native import _native
from zbmd.transport.secure.protection import Protection
from zbmd.transport.secure.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE
from zbmd.transport.tcp.address import PROTECTION_VARIABLE

OURS_OTHERWISE: Final = ("zbmd-none", "zbmd-tls")
"""Ourselves over TCP with another protection than the MAC."""
OF_TCP: Final = (*OURS_OTHERWISE, "sockets", "iperf3")
"""Peers that there are over TCP alone."""
OF_RDMA: Final = ("perftest",)
"""And over RDMA; nobody else is compared there."""
PEERS: Final = (
    *OURS_OTHERWISE,
    "sockets",
    "openmpi",
    "openmpi-c",
    "mpich",
    "mpich-c",
    "gloo",
    "xoscar",
    "iperf3",
    "memcpy",
    "memcpy-shared",
    *OF_RDMA,
)
NOTICE_FLOOR: Final = "notice_floor"
ASK_FLOOR: Final = "ask_floor"
IPERF3_S: Final = 1.0
"""Duration of one turn of iperf3."""
PROBE_S: Final = 30.0
_PYTHON: Final = (sys.executable, "-m")
_PROGRAMS: Final = Path(__file__).resolve().parent / "peers"
ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class PeerMissing(UserError):
    """A peer is not installed; the message holds the command that installs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer that is there, and how it is started."""

    name: str
    version: str
    commands: tuple[tuple[str, ...], ...]
    """One a process to start; `CONTROL` stands for the control address. Empty: it is started in its own way,
    which `told` tells."""
    ranks: int
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    told: str = ""

    def workers(self) -> Workers:
        """Return its processes, to be started."""
        return Workers(self.name, self.commands, ranks=self.ranks, environment=self.environment)

    @property
    def contestant(self) -> Contestant:
        """Return its entry in a result."""
        return Contestant(name=self.name, version=self.version, command=self.shown)

    @property
    def shown(self) -> str:
        """The commands as a shell would take them, with the environment that they are given."""
        if not self.commands:
            return self.told
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return " & ".join(f"{variables} {shlex.join(command)}".strip() for command in self.commands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Context in which a peer is looked up."""

    transport: str
    scratch: Path
    """A directory of this run alone."""
    ranks: int = 2
    collectives: bool = False
    """Whether the ranks time collectives; otherwise two of them send to each other."""

    def program(self, peer: str, *options: str) -> tuple[str, ...]:
        """Return the command of a rank of `peer`."""
        module = "collectives" if self.collectives else "pairs"
        return (*_PYTHON, f"zbmd.tools.bench.peers.{module}", peer, "--control", CONTROL, *options)

    @property
    def fits(self) -> bool:
        """Whether each rank has a core of its own."""
        return self.ranks <= len(os.sched_getaffinity(0))


def find_peer(name: str, site: Site) -> Peer:
    """The peer, ready to start; a C peer is compiled now. Raises `PeerMissing` with the command to run."""
    return _FINDERS[name](name, site)


def _need_command(names: Sequence[str], what: str, install: str) -> str:
    for name in names:
        if found := shutil.which(name):
            return found
    raise PeerMissing(
        f"{what} is not installed: none of {', '.join(names)} is in PATH. Install it: {install}"
    )


def need_module(module: str, what: str, install: str) -> None:
    """Raise `PeerMissing` if a module is not installed here."""
    if importlib.util.find_spec(module) is None:
        raise PeerMissing(f"{what} is not installed in {sys.prefix}. Install it: {install}")


def _first_line(command: Sequence[str], containing: str = "") -> str:
    """The first line of a command's output that holds a text; empty if there is none."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PROBE_S,
        check=False,
    )
    lines = done.stdout.decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if containing in line), "")


def _openmpi(name: str, site: Site) -> Peer:
    install = "apt-get install openmpi-bin libopenmpi-dev"
    mpirun = _need_command(("mpirun.openmpi", "mpirun"), "Open MPI", install)
    version = _first_line([mpirun, "--version"])
    if "Open" not in version:
        raise PeerMissing(f"{mpirun} is not Open MPI's ({version}). Install it: {install}")
    btl = "self,tcp" if site.transport == "tcp" else "self,vader"
    start = [mpirun, "-n", str(site.ranks), "--mca", "pml", "ob1", "--mca", "btl", btl]
    start += ["--bind-to", "core"] if site.fits else ["--oversubscribe", "--bind-to", "none"]
    start += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    environment = {**ONE_THREAD, "MPI4PY_MPIABI": "openmpi"}
    return _mpi(name, start, version, environment, ("mpicc.openmpi", "mpicc"), install, site)


def _mpich(name: str, site: Site) -> Peer:
    install = "apt-get install mpich libmpich-dev"
    mpirun = _need_command(("mpirun.mpich", "mpiexec.hydra"), "MPICH", install)
    version = "MPICH " + _first_line([mpirun, "--version"], "Version:").removeprefix("Version:").strip()
    environment = {**ONE_THREAD, "MPI4PY_MPIABI": "mpich"}
    if site.transport == "tcp":
        environment["UCX_TLS"] = "tcp,self"
    if not name.endswith("-c"):
        environment["LD_LIBRARY_PATH"] = _mpich_abi_library(site.scratch)
    start = [mpirun, "-n", str(site.ranks), *(["-bind-to", "core"] if site.fits else [])]
    return _mpi(name, start, version, environment, ("mpicc.mpich", "mpicc"), install, site)


def _mpich_abi_library(scratch: Path) -> str:
    """A directory with libmpi.so.12, as MPICH's ABI calls the library that is libmpich.so.12 in Debian."""
    directory = scratch / "mpich-abi"
    directory.mkdir(exist_ok=True)
    link = directory / "libmpi.so.12"
    listed = _first_line(["/sbin/ldconfig", "-p"], "libmpich.so.12 ").rpartition("=> ")[2]
    if listed and not link.is_symlink():
        link.symlink_to(listed)
    return os.pathsep.join(filter(None, (str(directory), os.environ.get("LD_LIBRARY_PATH", ""))))


def _mpi(
    name: str,
    start: list[str],
    version: str,
    environment: dict[str, str],
    compilers: Sequence[str],
    install: str,
    site: Site,
) -> Peer:
    if name.endswith("-c"):
        compiled = _compile("mpi_pair.c", name, compilers, (), install, site.scratch)
        program: tuple[str, ...] = (str(compiled), CONTROL)
        del environment["MPI4PY_MPIABI"]
    else:
        need_module("mpi4py", "mpi4py", "pip install 'zbmd[bench]'")
        program = site.program("mpi4py")
    commands = ((*start, *program),)
    return Peer(name=name, version=version, commands=commands, ranks=site.ranks, environment=environment)


def _compile(
    source: str, name: str, compilers: Sequence[str], options: Sequence[str], install: str, scratch: Path
) -> Path:
    """Compile a program of ours into `scratch`. Raises `PeerMissing` if no compiler is there or it fails."""
    program = scratch / name
    compiler = _need_command(compilers, f"the C compiler that {name} needs", install)
    done = subprocess.run(
        [compiler, "-O2", *options, "-o", str(program), str(_PROGRAMS / source)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode != 0:
        words = done.stdout.decode(errors="replace").strip()
        raise PeerMissing(f"{compiler} cannot compile {source}: {words}\nInstall it: {install} gcc libc6-dev")
    return program


def compile_floor(scratch: Path, name: str = NOTICE_FLOOR) -> Path:
    """The program that measures the floor of a death notice, or of an ask. Raises `PeerMissing`."""
    headers = Path(_native.__file__).resolve().parents[2]
    options = ("-I", str(headers), "-pthread")
    return _compile(f"{name}.c", name, ("cc", "gcc"), options, "apt-get install gcc libc6-dev", scratch)


def _gloo(name: str, site: Site) -> Peer:
    need_module("torch", "PyTorch, which has gloo,", "pip install 'zbmd[torch]'")
    store = str(site.scratch / "gloo-store")  # made by gloo
    where = ("--ranks", str(site.ranks), "--store", store) if site.collectives else ("--at", store)
    commands = tuple(site.program("gloo", "--rank", str(rank), *where) for rank in range(site.ranks))
    environment = ONE_THREAD if site.collectives else {**ONE_THREAD, "GLOO_SOCKET_IFNAME": "lo"}
    version = _version("torch")
    return Peer(name=name, version=version, commands=commands, ranks=site.ranks, environment=environment)


def _xoscar(name: str, site: Site) -> Peer:
    need_module("xoscar", "xoscar", "pip install 'zbmd[bench]'")
    command = (*_PYTHON, "zbmd.tools.bench.peers.xoscar_pair", "--control", CONTROL)
    return Peer(name=name, version=_version("xoscar"), commands=(command,), ranks=1, environment=ONE_THREAD)


def _iperf3(name: str, site: Site) -> Peer:
    program = _need_command(("iperf3",), "iperf3", "apt-get install iperf3")
    version = _first_line([program, "--version"])
    return Peer(name=name, version=version, commands=(), ranks=0, told=shlex.join(iperf3_client("PORT")))


def iperf3_client(port: str) -> list[str]:
    """The command of one turn of iperf3, against a server on this port of loopback."""
    return ["iperf3", "-c", "127.0.0.1", "-p", port, "-l", "1M", "-t", f"{IPERF3_S:g}", "-J"]


def _perftest(name: str, site: Site) -> Peer:
    program = _need_command((LATENCY,), "perftest", "apt-get install perftest")
    version = _first_line([program, "--version"])
    told = f"{LATENCY} | {MESSAGES} | {BANDWIDTH} -t WINDOW -F -n COUNT -s BYTES"
    return Peer(name=name, version=version, commands=(), ranks=0, told=told)


def _sockets(name: str, site: Site) -> Peer:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    commands = tuple(site.program(name, "--at", port, "--rank", rank) for rank in ("0", "1"))
    return Peer(name=name, version=f"Python {platform.python_version()}", commands=commands, ranks=2)


def _memcpy(name: str, site: Site) -> Peer:
    commands = (site.program(name),)
    return Peer(name=name, version=_version("numpy"), commands=commands, ranks=1, environment=ONE_THREAD)


def _ours(name: str, site: Site) -> Peer:
    protection = Protection(name.removeprefix("zbmd-"))
    environment = {**ONE_THREAD, PROTECTION_VARIABLE: protection.value}
    if protection is Protection.TLS:
        _make_certificate(site.scratch)
        cert, key = str(site.scratch / "cert.pem"), str(site.scratch / "key.pem")
        environment |= {CERT_VARIABLE: cert, KEY_VARIABLE: key, CA_VARIABLE: cert}
    told = f"{PROTECTION_VARIABLE}={protection.value}"
    return Peer(name=name, version=_version("zbmd"), commands=(), ranks=2, environment=environment, told=told)


def _make_certificate(folder: Path) -> None:
    """A certificate for 127.0.0.1 that is its own authority, and its key, as PEM files in `folder`."""
    from cryptography import x509  # all of X.509, for one peer
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "zbmd bench")])
    now = dt.datetime.now(dt.UTC)
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(addresses, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key.pem").write_bytes(private)


def _version(package: str) -> str:
    return f"{package} {importlib.metadata.version(package)}"


_FINDERS: Final[dict[str, Callable[[str, Site], Peer]]] = {
    "zbmd-none": _ours,
    "zbmd-tls": _ours,
    "sockets": _sockets,
    "openmpi": _openmpi,
    "openmpi-c": _openmpi,
    "mpich": _mpich,
    "mpich-c": _mpich,
    "gloo": _gloo,
    "xoscar": _xoscar,
    "iperf3": _iperf3,
    "memcpy": _memcpy,
    "memcpy-shared": _memcpy,
    "perftest": _perftest,
}
