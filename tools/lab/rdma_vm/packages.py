"""Debian packages that are unpacked, not installed: the kernel and the userland of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from zbmd.transport.errors import UserError

KERNEL: Final = "linux-image-amd64"
"""A package without files, which depends on the newest kernel."""
PYVERBS: Final = "python3-pyverbs"
BUSYBOX: Final = "busybox-static"
USERLAND: Final = (
    PYVERBS,
    "libibverbs1",
    "ibverbs-providers",
    "librdmacm1",
    "libnl-3-200",
    "libnl-route-3-200",
    "ibverbs-utils",
    "perftest",
    "libibumad3",
    "libpci3",
)
APT_S_MAX: Final = 300.0
_MERGED: Final = frozenset({"bin", "sbin", "lib", "lib64"})
"""Links into /usr on a system that packages may still take for folders."""


class PackagesMissing(UserError):
    """The machine cannot be made here; says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One version of a package."""

    name: str
    version: str


def require_programs() -> None:
    """Raise `PackagesMissing` unless the programs that make and run the machine are here."""
    wanted = {
        "qemu-system-x86_64": "qemu-system-x86",
        "apt-get": "apt",
        "dpkg-deb": "dpkg",
        "rdma": "iproute2",
        "ip": "iproute2",
    }
    missing = sorted({package for program, package in wanted.items() if shutil.which(program) is None})
    if missing:
        raise PackagesMissing(
            f"the RDMA machine needs what is not installed: apt-get install --no-install-recommends "
            f"{' '.join(missing)} (of Debian or Ubuntu)."
        )


def candidates() -> tuple[Package, ...]:
    """The kernel first, then busybox and the userland, each in the version that apt would download."""
    depends = _apt("apt-cache", "depends", KERNEL).splitlines()
    kernels = [line.split()[-1] for line in depends if "Depends: linux-image" in line]
    if not kernels:
        raise PackagesMissing(
            f"apt knows no {KERNEL}, the kernel of the RDMA machine: run apt-get update. It is Debian's; "
            "other systems do not have it."
        )
    names = (kernels[0], BUSYBOX, *USERLAND)
    versions: dict[str, str] = {}
    name = ""
    for line in _apt("apt-cache", "policy", *names).splitlines():
        if not line.startswith(" "):
            name = line.rstrip(":").partition(":")[0]
        elif line.strip().startswith("Candidate:"):
            versions[name] = line.split()[-1]
    lacking = [each for each in names if versions.get(each, "(none)") == "(none)"]
    if lacking:
        raise PackagesMissing(
            f"apt knows no package {', '.join(lacking)}: run apt-get update. They are Debian 12's."
        )
    return tuple(Package(name=each, version=versions[each]) for each in names)


def download(packages: tuple[Package, ...], folder: Path) -> dict[str, Path]:
    """Download them into `folder`; the file of each by name."""
    # The sandbox's user may not write a folder that is ours.
    _apt(
        "apt-get",
        *("-q", "-q", "-o", "APT::Sandbox::User=root", "download"),
        *(f"{each.name}={each.version}" for each in packages),
        folder=folder,
    )
    return {each.name: next(folder.glob(f"{each.name}_*.deb")) for each in packages}


@contextmanager
def files_of(package: Path) -> Generator[tarfile.TarFile]:
    """The files of a package, one after the other, by names as they are on a system with one /usr."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
            yield tar
        _drain(process.stdout)
    if process.returncode:
        raise UserError(f"{package.name} cannot be unpacked: dpkg-deb ended with {process.returncode}.")


def merged(name: str) -> PurePosixPath:
    """Where a package's file lies, relative to the root: `./lib/x` is at `usr/lib/x`."""
    path = PurePosixPath(name.removeprefix("./").lstrip("/"))
    return PurePosixPath("usr") / path if path.parts and path.parts[0] in _MERGED else path


def _drain(stream: IO[bytes]) -> None:
    while stream.read(1 << 20):
        pass


def _apt(*command: str, folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"LC_ALL": "C"},
            capture_output=True,
            text=True,
            check=False,
            timeout=APT_S_MAX,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"{command[0]} has not ended after {APT_S_MAX:.0f} s: is the network there?"
        ) from error
    if done.returncode:
        print(done.stderr, end="", file=sys.stderr)
        raise PackagesMissing(
            f"{' '.join(command[:2])} failed with {done.returncode}; its words are above. Run apt-get update "
            "and try again."
        )
    return done.stdout
