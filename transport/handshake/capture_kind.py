"""The hello machine as a kind that can be recorded and replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.handshake.hello import HelloAction, HelloEvent, HelloMachine
from zbmd.transport.identity import Identity, Side

_LABEL = b"zbmd capture: which cookie"


def hello_config(
    *, side: Side, identity: Identity, cookie: bytes, nonce: bytes, deadline_ns: int
) -> dict[str, Any]:
    """The configuration of a hello as it is recorded: of the cookie only what tells whether one is it."""
    return {
        "side": side,
        "identity": identity,
        "cookie": cookie,
        "cookie_check": _check(cookie),
        "nonce": nonce,
        "deadline_ns": deadline_ns,
    }


def _check(cookie: bytes) -> bytes:
    return hashlib.sha256(_LABEL + cookie).digest()


def _build(config: Mapping[str, Any]) -> HelloMachine:
    if _check(config["cookie"]) != config["cookie_check"]:
        raise CaptureMismatch("the cookie is another one than that of the job: name the job's with --cookie")
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
