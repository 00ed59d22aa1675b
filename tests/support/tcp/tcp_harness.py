"""TCP links for the conformance suite. See `link_harness`."""

from __future__ import annotations

import os
import signal

from support.links.link_harness import (
    COOKIE,
    SMALL,
    Fork,
    Listening,
    OnLink,
    Other,
    PeerScenario,
    RealHarness,
    Who,
)
from support.tcp.tcp_certificates import job_tls
from zbmd.transport.handshake.driver import ByteSocket
from zbmd.transport.link.base import LinkSide
from zbmd.transport.link.interface import Endpoint, LinkLimits
from zbmd.transport.secure.protection import Protection
from zbmd.transport.tcp import connect as tcp
from zbmd.transport.tcp.address import TcpSettings


class TcpHarness(RealHarness):
    """TCP over loopback; once for each way to protect it, and over IPv6."""

    def __init__(
        self, loop: str, *, host: str = "127.0.0.1", protection: Protection = Protection.MAC
    ) -> None:
        self.transport = f"tcp-{protection.value}" + ("6" if ":" in host else "")
        super().__init__(loop)
        self._host = host
        self._protection = protection

    async def listen(self, on_link: OnLink, who: Who) -> tuple[Listening, str]:
        at = tcp.TcpAddress(host=self._host, port=0)
        listener = await tcp.listen(at, on_link, self._endpoint(who), settings=self._settings())
        return listener, str(listener.address)

    async def dial(self, address: str, who: Who) -> LinkSide:
        return await tcp.dial(address, self._endpoint(who), settings=self._settings())

    def run_with_peer(
        self, fork: Fork, scenario: PeerScenario, other: Other, *, ours: LinkLimits = SMALL
    ) -> None:
        self._settings()  # the job's certificates, before there are two processes that would make their own
        super().run_with_peer(fork, scenario, other, ours=ours)

    def die_at_message(self, number: int) -> None:
        send, sent = ByteSocket.send, 0

        async def counted(self: ByteSocket, data: bytes, deadline_ns: int) -> None:
            nonlocal sent
            if sent == number:
                os.kill(os.getpid(), signal.SIGKILL)
            sent += 1
            await send(self, data, deadline_ns)

        ByteSocket.send = counted  # type: ignore[method-assign]

    def _settings(self) -> TcpSettings:
        if self._protection is not Protection.TLS:
            return TcpSettings(protection=self._protection)
        return TcpSettings(protection=self._protection, tls=job_tls())

    def _endpoint(self, who: Who) -> Endpoint:
        return Endpoint(identity=who.identity, cookie=COOKIE, limits=who.limits)
