"""Which modules of a kernel the machine loads, and in which order: what each says of those it needs."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Mapping
from typing import Final

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
"""What is not a module of this kernel is built into it, or is not asked for."""
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
"""Where they and those that they need lie, below `kernel/`."""
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
