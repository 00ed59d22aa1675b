"""All transports that the conformance suite of links runs against."""

from __future__ import annotations

from link_harness import LinkHarness, ShmHarness, SimHarness
from tcp_harness import TcpHarness
from tcp_machine import has_ipv6

from zbmd.transport.session import Protection

HARNESSES: tuple[LinkHarness, ...] = (
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
