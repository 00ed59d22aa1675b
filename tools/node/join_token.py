"""The line that `zbmd-node token` prints, to be pasted on the next host: where members are, and the cookie.

A token is the cookie and a few addresses, in MessagePack behind a checksum, as URL-safe base64. Whoever has
it can join and talk to every node, so it is as secret as the cookie file.
"""

from __future__ import annotations

import base64
import binascii
import shlex
import zlib
from typing import Annotated, Final

import msgspec

from zbmd.actors.cluster.node.client import ASK_S, connect_admin
from zbmd.actors.cluster.node.contracts import ADDRESSES_MAX, TokenReply, TokenRequest
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, format_duration
from zbmd.transport.errors import UserError
from zbmd.transport.handshake.cookie import COOKIE_BYTES_MAX, COOKIE_BYTES_MIN, load_or_create_cookie
from zbmd.transport.tcp.address import TcpAddress, parse_address

TOKEN_CHARS_MAX: Final = 4096
_PREFIX: Final = "zbmd1-"


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What another host needs to join, as one line of text."""

    cookie: Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES_MIN, max_length=COOKIE_BYTES_MAX)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=300)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)
    ]


def write_token(token: Token) -> str:
    """As it is pasted."""
    body = msgspec.msgpack.encode(token)
    return _PREFIX + base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4) + body).decode().rstrip("=")


def read_token(text: str) -> tuple[Token, tuple[TcpAddress, ...]]:
    """A token and its addresses. Raises `UserError` if it was cut or changed on its way."""
    wrong = UserError(
        "--token is not whole: a part of it was lost or changed on its way. Run `zbmd-node token` on a "
        "member again, and paste the whole line."
    )
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > TOKEN_CHARS_MAX:
        raise wrong
    packed = text.removeprefix(_PREFIX)
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        if data[:4] != zlib.crc32(data[4:]).to_bytes(4):
            raise wrong
        token = msgspec.msgpack.decode(data[4:], type=Token)
    except (binascii.Error, msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
        raise wrong from None
    return token, tuple(parse_address(address) for address in token.addresses)


async def print_token(at: str | None) -> None:
    """`zbmd-node token`."""
    async with connect_admin(at) as admin:
        reply = await admin.actor.ask(TokenRequest(), reply=TokenReply, timeout=ASK_S)
    token = write_token(Token(cookie=load_or_create_cookie(), addresses=reply.addresses))
    words = ["zbmd-node", "up", "--join", reply.addresses[0], "--token", token]
    if reply.recovery_budget_ns != RECOVERY_BUDGET_NS_DEFAULT:
        words += ["--recovery-budget", format_duration(reply.recovery_budget_ns)]
    print(shlex.join(words))
