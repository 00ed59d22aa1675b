"""Optional dependencies: whether each is installed, whether this machine can use it, how to install it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from zbmd.tools.doctor.report import Extra, Finding, FindingState, Section
from zbmd.training.autograd.array_module import xp_for
from zbmd.transport.errors import UserError
from zbmd.transport.host.facts import INSTALL_VERBS
from zbmd.transport.host.topology import Topology


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
    """One line each; what this machine has no use for is told apart from what it lacks."""
    for extra in extras:
        if extra.version is not None:
            problem = _cupy_problem(topology) if extra.name == "cupy" else None
            state = FindingState.OK if problem is None else FindingState.NOT_OK
            detail = f"{extra.version}: {extra.purpose}"
            yield _finding(extra, state, detail if problem is None else f"{detail}: {problem}", "")
        elif extra.needed:
            yield _finding(
                extra,
                FindingState.NOTE,
                f"missing, and this machine has use for it: {extra.purpose}",
                extra.install,
            )
        else:
            yield _finding(extra, FindingState.NOTE, f"not installed: {extra.purpose}", extra.install)


def _finding(extra: Extra, state: FindingState, detail: str, advice: str) -> Finding:
    return Finding(section=Section.EXTRAS, name=extra.name, state=state, detail=detail, advice=advice)


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
