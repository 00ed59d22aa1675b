"""The machine's kernel and first file system: made once from packages, and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from zbmd.tools.lab.rdma_vm import guest
from zbmd.transport.errors import UserError

# ---- Debian packages that are unpacked, not installed: the kernel and the userland of the machine

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
    """Return the path of a package's file, relative to the root: `./lib/x` is at `usr/lib/x`."""
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


# The initial file system: a cpio archive in the "newc" format.
# Source: Documentation/driver-api/early-userspace/buffer-format.rst of the kernel.

_TRAILER: Final = "TRAILER!!!"
_ALIGN: Final = 4


class Archive:
    """Collects files; parents of each come by themselves, before it."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._names: set[str] = set()

    def file(self, name: str, data: bytes, *, executable: bool = False) -> None:
        """A regular file. name: relative to the root."""
        self._add(name, stat.S_IFREG | (0o755 if executable else 0o644), data)

    def link(self, name: str, target: str) -> None:
        """A symbolic link."""
        self._add(name, stat.S_IFLNK | 0o777, target.encode())

    def folder(self, name: str) -> None:
        """A folder; nothing if it is there."""
        if name not in self._names:
            self._add(name, stat.S_IFDIR | 0o755, b"")

    def console(self) -> None:
        """The device that the first process writes to."""
        self._add("dev/console", stat.S_IFCHR | 0o600, b"", device=(5, 1))

    def whole(self) -> bytes:
        """The whole archive."""
        trailer = _record(_TRAILER, 0, b"", 0, (0, 0))
        return b"".join((*self._parts, trailer))

    def _add(self, name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> None:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            self.folder(str(parent))
        self._names.add(name)
        self._parts.append(_record(name, mode, data, len(self._names), device))


def _record(name: str, mode: int, data: bytes, inode: int, device: tuple[int, int]) -> bytes:
    path = name.encode() + b"\0"
    #        inode  mode  uid gid links time size       device major, minor, of the node major, minor
    numbers = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % number for number in numbers) + path
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGN)


# Kernel modules to load, in the order of their dependencies.

WANTED: Final = (
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "veth",
    "bridge",
    "sch_netem",
    "crc32_generic",
    "crc32c_generic",
    "crc32_pclmul",
    "crc32c_intel",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
)
"""Skip what is not a module of this kernel: it is built into it, or not needed."""
FOLDERS: Final = (
    "arch/x86/crypto",
    "crypto",
    "drivers/char",
    "drivers/infiniband",
    "drivers/net",
    "drivers/virtio",
    "fs",
    "lib",
    "net",
)
"""Return the paths of these and of those that they need, below `kernel/`."""
_DEPENDS: Final = re.compile(rb"(?:^|\x00)depends=([^\x00]*)\x00")


def module_name(path: str) -> str | None:
    """The name of the module in a file of the kernel's package, if it may be wanted."""
    _, found, inside = path.partition("/kernel/")
    if not found or not inside.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or ".ko" not in inside:
        return None
    return _plain(inside.rpartition("/")[2].partition(".ko")[0])


def plain_module(path: str, data: bytes) -> bytes:
    """Its bytes, unpacked if the distribution packs them."""
    return lzma.decompress(data) if path.endswith(".xz") else data


def load_order(modules: Mapping[str, bytes], wanted: Iterable[str] = WANTED) -> list[str]:
    """The wanted modules and all that they need, each behind those that it needs."""
    order: dict[str, None] = {}

    def add(name: str) -> None:
        data = modules.get(name)
        if data is None or name in order:
            return
        found = _DEPENDS.search(data)
        for needed in found[1].decode().split(",") if found is not None and found[1] else ():
            add(_plain(needed))
        order[name] = None

    for name in wanted:
        add(_plain(name))
    return list(order)


def _plain(name: str) -> str:
    return name.replace("-", "_")


RECIPE: Final = 3
"""Counts up when the files made from the same packages change."""
_PYVERBS_AT: Final = "usr/lib/python3/dist-packages"
_LEFT_OUT: Final = ("usr/share/doc", "usr/share/man", "usr/share/lintian")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What QEMU boots."""

    kernel: Path
    initrd: Path


def cache_folder() -> Path:
    """Return the folder of the images."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zbmd" / "rdma-vm"


@contextmanager
def image() -> Generator[Image]:
    """The image of today's packages, made if it is missing; it is kept as long as it is used.

    Raises `PackagesMissing` and `UserError`.
    """
    packages = candidates()
    key = hashlib.sha256(repr((RECIPE, packages)).encode()).hexdigest()[:16]
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        lock = stack.enter_context((cache / f"{key}.lock").open("a"))
        fcntl.flock(lock, fcntl.LOCK_SH)  # which those have, too, whose machines run
        found = cache / key
        if not found.exists():
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not found.exists():
                _make(packages, found)
                _remove_others(cache, key)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield Image(kernel=found / "vmlinuz", initrd=found / "initrd")


def _make(packages: tuple[Package, ...], folder: Path) -> None:
    """All or nothing: what is there under its name is whole."""
    print(f"rdma-vm: making {folder} from {len(packages)} packages", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="rdma-vm-", dir=folder.parent) as scratch:
        new, downloads = Path(scratch) / "new", Path(scratch) / "downloads"
        new.mkdir()
        downloads.mkdir()
        files = download(packages, downloads)
        archive = Archive()
        for name in ("bin", "dev", "host", "proc", "scratch", "sys", "system"):
            archive.folder(name)
        archive.console()
        archive.file("init", guest.INIT.encode(), executable=True)
        (new / "vmlinuz").write_bytes(_add_kernel(archive, files[packages[0].name]))
        _add_busybox(archive, files[BUSYBOX])
        for name in USERLAND:
            _add_package(archive, files[name], is_pyverbs=name == PYVERBS)
        (new / "initrd").write_bytes(archive.whole())
        new.rename(folder)


def _remove_others(cache: Path, key: str) -> None:
    """Images of older packages that no machine is using."""
    for lock in cache.glob("*.lock"):
        if lock.stem == key:
            continue
        with lock.open("a") as held, suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(cache / lock.stem, ignore_errors=True)
            lock.unlink(missing_ok=True)


def _add_kernel(archive: Archive, package: Path) -> bytes:
    """Add its modules; returns the kernel itself."""
    kernel = b""
    modules: dict[str, bytes] = {}
    with files_of(package) as tar:
        for member in tar:
            data = tar.extractfile(member) if member.isreg() else None
            if data is None:
                continue
            if "/boot/vmlinuz-" in member.name:
                kernel = data.read()
            elif name := module_name(member.name):
                modules[name] = plain_module(member.name, data.read())
    if not kernel:
        raise UserError(f"there is no kernel in {package.name}.")
    order = load_order(modules)
    for name in order:
        archive.file(f"modules/{name}.ko", modules[name])
    archive.file("modules/order", "".join(f"{name}\n" for name in order).encode())
    return kernel


def _add_busybox(archive: Archive, package: Path) -> None:
    with files_of(package) as tar:
        for member in tar:
            if merged(member.name).name == "busybox" and member.isreg():
                data = tar.extractfile(member)
                assert data is not None
                archive.file("bin/busybox", data.read(), executable=True)
                return
    raise UserError(f"there is no busybox in {package.name}.")


def _add_package(archive: Archive, package: Path, *, is_pyverbs: bool) -> None:
    """Its files, below a folder which the machine lays over the host's."""
    native = 0
    suffix = f"cpython-{sysconfig.get_config_var('py_version_nodot')}-"
    with files_of(package) as tar:
        for member in tar:
            path = merged(member.name).as_posix()
            if path.startswith(_LEFT_OUT):
                continue
            native += suffix in path
            if is_pyverbs and path.startswith(_PYVERBS_AT):
                path = guest.PYTHON_FOLDER + path.removeprefix(_PYVERBS_AT)
            data = tar.extractfile(member) if member.isreg() else None
            if data is not None:
                archive.file(
                    f"{guest.PACKAGES_FOLDER}/{path}", data.read(), executable=bool(member.mode & 0o100)
                )
            elif member.issym():
                archive.link(f"{guest.PACKAGES_FOLDER}/{path}", member.linkname)
    if is_pyverbs and not native:
        raise PackagesMissing(
            f"{package.name} is built for another Python than {sys.version.split()[0]}: the RDMA machine "
            "wants zbmd in the Python version of the distribution (3.11 on Debian 12)."
        )
