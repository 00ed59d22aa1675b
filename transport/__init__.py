"""Transport: everything that crosses a process, as frames of links or as bytes of registered memory.

A link carries small framed messages between two processes (`link`, over `shm`, `tcp` or `rdma`); a region is
memory that a peer puts into and gets from (`memory`, over the same three and `cuda`). Processes prove to each
other who they are first (`handshake`, `secure`). `capture` records what machines and links took in and
replays it; `sim` runs the same code in virtual time. This layer imports no other; import-linter holds the
order of its packages. Begin with `link.interface`, `memory.region` and `machine`. The public API is
`__all__`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbmd.transport.cuda.api import (
        CopyRoute,
        CopyRouteChoice,
        CudaApi,
        CudaFault,
        DeviceFacts,
        choose_copy_route,
    )
    from zbmd.transport.cuda.array import DeviceHandle, decode_handle, encode_handle
    from zbmd.transport.cuda.peer import CudaPeer
    from zbmd.transport.cuda.region import CudaRegion, DeviceExports
    from zbmd.transport.cuda.runtime import CudaRuntime
    from zbmd.transport.cuda.staging import DevicePipe
    from zbmd.transport.errors import (
        ArenaFull,
        DeadlineExceeded,
        LinkClosed,
        LinkFull,
        LocalProtocolError,
        OutOfDescriptors,
        OutOfMemory,
        PeerLost,
        ProtocolError,
        RemoteProtocolError,
        UserError,
        ZbmdError,
    )
    from zbmd.transport.identity import Identity
    from zbmd.transport.link.interface import Endpoint, Link, LinkLimits
    from zbmd.transport.memory.arena import empty, from_array
    from zbmd.transport.memory.region import RegionHandle, RemoteRegion
    from zbmd.transport.memory.segment import Segment
    from zbmd.transport.memory.staging import StagedPipe
    from zbmd.transport.memory.transfer import Transfer
    from zbmd.transport.rdma.connect import dial_rdma, listen_rdma, open_rdma_plane
    from zbmd.transport.rdma.handshake import RdmaMemory
    from zbmd.transport.rdma.message_device import open_rdma_device
    from zbmd.transport.tcp.address import TcpAddress, TcpSettings

__all__ = [
    "ArenaFull",
    "CopyRoute",
    "CopyRouteChoice",
    "CudaApi",
    "CudaFault",
    "CudaPeer",
    "CudaRegion",
    "CudaRuntime",
    "DeadlineExceeded",
    "DeviceExports",
    "DeviceFacts",
    "DeviceHandle",
    "DevicePipe",
    "Endpoint",
    "Identity",
    "Link",
    "LinkClosed",
    "LinkFull",
    "LinkLimits",
    "LocalProtocolError",
    "OutOfDescriptors",
    "OutOfMemory",
    "PeerLost",
    "ProtocolError",
    "RdmaMemory",
    "RegionHandle",
    "RemoteProtocolError",
    "RemoteRegion",
    "Segment",
    "StagedPipe",
    "TcpAddress",
    "TcpSettings",
    "Transfer",
    "UserError",
    "ZbmdError",
    "choose_copy_route",
    "decode_handle",
    "dial_rdma",
    "empty",
    "encode_handle",
    "from_array",
    "listen_rdma",
    "open_rdma_device",
    "open_rdma_plane",
]

# A name is imported when it is first used, so that importing the layer stays cheap and needs no extra.
_HOMES = {
    "zbmd.transport.cuda.api": (
        "CopyRoute",
        "CopyRouteChoice",
        "CudaApi",
        "CudaFault",
        "DeviceFacts",
        "choose_copy_route",
    ),
    "zbmd.transport.cuda.array": ("DeviceHandle", "decode_handle", "encode_handle"),
    "zbmd.transport.cuda.peer": ("CudaPeer",),
    "zbmd.transport.cuda.region": ("CudaRegion", "DeviceExports"),
    "zbmd.transport.cuda.runtime": ("CudaRuntime",),
    "zbmd.transport.cuda.staging": ("DevicePipe",),
    "zbmd.transport.errors": (
        "ArenaFull",
        "DeadlineExceeded",
        "LinkClosed",
        "LinkFull",
        "LocalProtocolError",
        "OutOfDescriptors",
        "OutOfMemory",
        "PeerLost",
        "ProtocolError",
        "RemoteProtocolError",
        "UserError",
        "ZbmdError",
    ),
    "zbmd.transport.identity": ("Identity",),
    "zbmd.transport.link.interface": ("Endpoint", "Link", "LinkLimits"),
    "zbmd.transport.memory.arena": ("empty", "from_array"),
    "zbmd.transport.memory.region": ("RegionHandle", "RemoteRegion"),
    "zbmd.transport.memory.segment": ("Segment",),
    "zbmd.transport.memory.staging": ("StagedPipe",),
    "zbmd.transport.memory.transfer": ("Transfer",),
    "zbmd.transport.rdma.connect": ("dial_rdma", "listen_rdma", "open_rdma_plane"),
    "zbmd.transport.rdma.handshake": ("RdmaMemory",),
    "zbmd.transport.rdma.message_device": ("open_rdma_device",),
    "zbmd.transport.tcp.address": ("TcpAddress", "TcpSettings"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
