"""Runs a hello over whatever carries its bytes; the machine decides everything.

`HELLO` is the kind under which captures record the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, assert_never

import msgspec

from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.capture.tap import Tap
from zbmd.transport.handshake.hello import (
    NONCE_BYTES,
    Accept,
    BytesReceived,
    HelloAction,
    HelloEvent,
    HelloMachine,
    Opened,
    PeerClosed,
    Reject,
    SendBytes,
    SetTimer,
    TimerFired,
)
from zbmd.transport.identity import Identity, PeerInfo, Side
from zbmd.transport.link.endpoint import Endpoint
from zbmd.transport.native._native import now_ns

_COOKIE_CHECK = b"zbmd capture: which cookie"
"""Prefix of what is hashed to recognize a cookie in a capture, which never holds the cookie itself."""


def hello_config(
    *, side: Side, identity: Identity, cookie: bytes, nonce: bytes, deadline_ns: int
) -> dict[str, Any]:
    """Return the configuration of a hello as it is recorded, with a check value for the cookie."""
    return {
        "side": side,
        "identity": identity,
        "cookie": cookie,
        "cookie_check": _check(cookie),
        "nonce": nonce,
        "deadline_ns": deadline_ns,
    }


def _check(cookie: bytes) -> bytes:
    return hashlib.sha256(_COOKIE_CHECK + cookie).digest()


def _build(config: Mapping[str, Any]) -> HelloMachine:
    if _check(config["cookie"]) != config["cookie_check"]:
        raise CaptureMismatch(
            "this cookie is not the one of the recorded job: give the job's cookie file with --cookie"
        )
    return HelloMachine(
        side=Side(config["side"]),
        identity=msgspec.convert(config["identity"], Identity),
        cookie=config["cookie"],
        nonce=config["nonce"],
        deadline_ns=config["deadline_ns"],
    )


HELLO: MachineKind[HelloEvent, HelloAction] = register(
    "hello", 2, _build, events=HelloEvent, actions=HelloAction, secrets=("cookie",)
)


class Wire(Protocol):
    """A connection that carries the bytes of a hello."""

    async def send(self, data: bytes, deadline_ns: int) -> None:
        """Send all of `data`. A peer that has gone is no error here: `receive` reports it."""
        ...

    async def receive(self, deadline_ns: int) -> bytes | None:
        """Return what has come, at most one message; empty at the end of the stream, None at the deadline."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HelloResult:
    """The result of an accepted hello."""

    peer: PeerInfo
    surplus: bytes
    """Bytes that the peer sent after its hello."""
    secret: bytes = field(repr=False)
    """See `HelloMachine.session_secret`."""


async def say_hello(
    wire: Wire, endpoint: Endpoint, side: Side, deadline_ns: int, *, peer_uid: int | None, label: str
) -> HelloResult:
    """Run one hello on a connected wire. label: the peer's name in the log. Raises its `HelloError`."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    identity, cookie = endpoint.identity, endpoint.cookie
    machine = HelloMachine(side=side, identity=identity, cookie=cookie, nonce=nonce, deadline_ns=deadline_ns)
    config = hello_config(side=side, identity=identity, cookie=cookie, nonce=nonce, deadline_ns=deadline_ns)
    tap = Tap(endpoint.recorder, HELLO, f"hello/{side.value}/{label}", machine, config)
    try:
        accept = await _drive(wire, tap, Opened(peer_uid=peer_uid), deadline_ns)
        return HelloResult(peer=accept.peer, surplus=accept.surplus, secret=machine.session_secret())
    finally:
        tap.close(machine.state.value)


async def _drive(
    wire: Wire, tap: Tap[HelloEvent, HelloAction], event: HelloEvent, deadline_ns: int
) -> Accept:
    timer_ns = deadline_ns
    # Bounded by the machine: each message moves it on, and the deadline ends it.
    while True:
        for action in tap.handle(event, now_ns=now_ns()):
            match action:
                case SendBytes(data=data):
                    await wire.send(data, timer_ns)
                case SetTimer(at_ns=at_ns):
                    timer_ns = at_ns
                case Accept():
                    return action
                case Reject(error=error):
                    raise error
                case _:
                    assert_never(action)
        event = _event(await wire.receive(timer_ns))


def _event(data: bytes | None) -> HelloEvent:
    if data is None:
        return TimerFired()
    return BytesReceived(data=data) if data else PeerClosed()


async def readable(sock: socket.socket, deadline_ns: int) -> bool:
    """Wait for something to read; False if the monotonic deadline comes first."""
    return await _ready(sock, deadline_ns, writing=False)


async def writable(sock: socket.socket, deadline_ns: int) -> bool:
    """Wait for room to write; False if the monotonic deadline comes first."""
    return await _ready(sock, deadline_ns, writing=True)


async def _ready(sock: socket.socket, deadline_ns: int, *, writing: bool) -> bool:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[bool] = loop.create_future()

    def settle(value: bool) -> None:
        if not ready.done():
            ready.set_result(value)

    timer = loop.call_later(max(0, deadline_ns - now_ns()) / 1e9, settle, False)
    add, remove = (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    add(sock.fileno(), settle, True)
    try:
        return await ready
    finally:
        timer.cancel()
        remove(sock.fileno())
