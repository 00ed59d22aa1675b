"""RDMA links between hosts: listening and dialing. Each is set up over an authenticated TCP link.

Needs pyverbs and a device (`rdma_device.open_device`) on both hosts. Where one of them may lack it, see
`rdma_or_tcp`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from zbmd.transport.connect import rdma_or_tcp as remote_link
from zbmd.transport.connect.rdma_or_tcp import Listener, Rdma, RemoteLink
from zbmd.transport.errors import UserError
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.memory.segment import Segment
from zbmd.transport.rdma.handshake import Memory
from zbmd.transport.rdma.link import RdmaLink
from zbmd.transport.rdma.message_device import RdmaDevice
from zbmd.transport.tcp.address import TcpAddress
from zbmd.transport.tcp.settings import TcpSettings

if TYPE_CHECKING:
    from zbmd.transport.rdma.plane import RdmaPlane

__all__ = ["Listener", "Memory", "OnLink", "dial", "listen", "open_plane"]

OnLink = Callable[[RdmaLink], None]


def open_plane(name: str, address: str | None = None, *, segment: Segment) -> RdmaPlane:
    """The data plane of this process over a device; see `rdma_plane.RdmaPlane`, also for what it raises.

    Raises `UserError`, too, where zbmd was built without libibverbs.
    """
    try:
        from zbmd.transport.rdma.plane import RdmaPlane
    except ImportError as error:
        raise UserError(
            f"memory over RDMA needs libibverbs, and zbmd built where its headers are ({error}): "
            "apt install libibverbs-dev, then install zbmd from its source again."
        ) from error
    return RdmaPlane(name, address, segment=segment)


async def dial(
    address: TcpAddress | str,
    endpoint: Endpoint,
    device: RdmaDevice,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    memory: Memory | None = None,
) -> RdmaLink:
    """Connect to the listener at `address` and return the link.

    memory: gives it regions, if the listener has it, too. timeout_ns: by default the endpoint's
    `deadlines.dial_ns`. Raises as `tcp.dial`, `RdmaRefused` if the peer has no queue pair for us, and
    `UserError` if our device has none, or nothing comes through.
    """
    own = Rdma(device=device, memory=memory, only=True)
    link, _ = await remote_link.dial(address, endpoint, own, settings=settings, timeout_ns=timeout_ns)
    assert isinstance(link, RdmaLink)
    return link


async def listen(
    address: TcpAddress | str,
    on_link: OnLink,
    endpoint: Endpoint,
    device: RdmaDevice,
    *,
    settings: TcpSettings | None = None,
    timeout_ns: int | None = None,
    memory: Memory | None = None,
) -> Listener:
    """Listen at `address`, as `tcp.listen`, for links over `device`; `on_link` is called with each.

    memory: gives those links regions whose dialers have it, too. timeout_ns: from a connection to its link,
    by default the endpoint's `deadlines.hello_ns`.
    """

    def made(link: RemoteLink, why: str) -> None:
        assert isinstance(link, RdmaLink)
        on_link(link)

    own = Rdma(device=device, memory=memory, only=True)
    return await remote_link.listen(address, made, endpoint, own, settings=settings, timeout_ns=timeout_ns)
