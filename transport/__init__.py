"""Transport: everything that crosses a process, as frames of links or as bytes of registered memory.

A link carries small framed messages between two processes (`link`, over `shm`, `tcp` or `rdma`); a region is
memory that a peer puts into and gets from (`memory`, over the same three and `cuda`). Processes prove to each
other who they are first (`handshake`, `secure`). `capture` records what machines and links took in and
replays it; `sim` runs the same code in virtual time. This layer imports no other; import-linter holds the
order of its packages. Begin with `link.interface`, `memory.region` and `machine`. The public API is
`__all__`.
"""

from __future__ import annotations

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals()):
    from zbmd.transport.cuda.api import CopyRoute as CopyRoute
    from zbmd.transport.cuda.api import CopyRouteChoice as CopyRouteChoice
    from zbmd.transport.cuda.api import CudaApi as CudaApi
    from zbmd.transport.cuda.api import CudaFault as CudaFault
    from zbmd.transport.cuda.api import DeviceFacts as DeviceFacts
    from zbmd.transport.cuda.api import choose_copy_route as choose_copy_route
    from zbmd.transport.cuda.array import DeviceHandle as DeviceHandle
    from zbmd.transport.cuda.array import decode_handle as decode_handle
    from zbmd.transport.cuda.array import encode_handle as encode_handle
    from zbmd.transport.cuda.peer import CudaPeer as CudaPeer
    from zbmd.transport.cuda.region import CudaRegion as CudaRegion
    from zbmd.transport.cuda.region import DeviceExports as DeviceExports
    from zbmd.transport.cuda.runtime import CudaRuntime as CudaRuntime
    from zbmd.transport.cuda.staging import DevicePipe as DevicePipe
    from zbmd.transport.errors import ArenaFull as ArenaFull
    from zbmd.transport.errors import DeadlineExceeded as DeadlineExceeded
    from zbmd.transport.errors import LinkClosed as LinkClosed
    from zbmd.transport.errors import LinkFull as LinkFull
    from zbmd.transport.errors import LocalProtocolError as LocalProtocolError
    from zbmd.transport.errors import OutOfDescriptors as OutOfDescriptors
    from zbmd.transport.errors import OutOfMemory as OutOfMemory
    from zbmd.transport.errors import PeerLost as PeerLost
    from zbmd.transport.errors import ProtocolError as ProtocolError
    from zbmd.transport.errors import RemoteProtocolError as RemoteProtocolError
    from zbmd.transport.errors import UserError as UserError
    from zbmd.transport.errors import ZbmdError as ZbmdError
    from zbmd.transport.identity import Identity as Identity
    from zbmd.transport.link.interface import Endpoint as Endpoint
    from zbmd.transport.link.interface import Link as Link
    from zbmd.transport.link.interface import LinkLimits as LinkLimits
    from zbmd.transport.memory.arena import empty as empty
    from zbmd.transport.memory.arena import from_array as from_array
    from zbmd.transport.memory.region import RegionHandle as RegionHandle
    from zbmd.transport.memory.region import RemoteRegion as RemoteRegion
    from zbmd.transport.memory.segment import Segment as Segment
    from zbmd.transport.memory.staging import StagedPipe as StagedPipe
    from zbmd.transport.memory.transfer import Transfer as Transfer
    from zbmd.transport.rdma.connect import RdmaMemory as RdmaMemory
    from zbmd.transport.rdma.connect import dial_rdma as dial_rdma
    from zbmd.transport.rdma.connect import listen_rdma as listen_rdma
    from zbmd.transport.rdma.connect import open_rdma_plane as open_rdma_plane
    from zbmd.transport.rdma.message_device import open_rdma_device as open_rdma_device
    from zbmd.transport.tcp.address import TcpAddress as TcpAddress
    from zbmd.transport.tcp.address import TcpSettings as TcpSettings
