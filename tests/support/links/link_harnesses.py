"""All transports that the conformance suite of links runs against."""

from __future__ import annotations

from support.links.link_harness import LinkHarness, ShmHarness, SimHarness
from support.rdma.rdma_harness import RdmaHarness
from support.rdma.rdma_world import given_devices
from support.tcp.tcp_harness import TcpHarness
from support.tcp.tcp_machine import has_ipv6
from zbmd.transport.secure.protection import Protection

OVER_RDMA: tuple[LinkHarness, ...] = (RdmaHarness("uvloop"),)
WITHOUT_DEVICES: tuple[LinkHarness, ...] = (
    ShmHarness("asyncio"),
    ShmHarness("uvloop"),
    ShmHarness("uvloop", spins=True),
    ShmHarness("uvloop", lends=True),
    TcpHarness("asyncio"),
    TcpHarness("uvloop"),
    TcpHarness("uvloop", protection=Protection.TLS),
    *([TcpHarness("uvloop", host="::1", protection=Protection.NONE)] if has_ipv6() else []),
    SimHarness(),
)
HARNESSES = OVER_RDMA if given_devices() else WITHOUT_DEVICES
"""Where RDMA devices are given, the suites are about these: the others have been through them elsewhere."""
