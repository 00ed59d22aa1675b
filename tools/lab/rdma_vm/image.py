"""The machine's kernel and first file system: made once from packages, and kept in the user's cache."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.tools.lab.rdma_vm import guest
from zbmd.tools.lab.rdma_vm.initrd import Archive
from zbmd.tools.lab.rdma_vm.modules import load_order, module_name, plain_module
from zbmd.tools.lab.rdma_vm.packages import (
    BUSYBOX,
    PYVERBS,
    USERLAND,
    Package,
    PackagesMissing,
    candidates,
    download,
    files_of,
    merged,
)
from zbmd.transport.errors import UserError

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
    """Where images are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "zbmd" / "rdma-vm"


@contextmanager
def image() -> Generator[Image]:
    """The image of today's packages, made if it is not there; nobody removes it meanwhile.

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
