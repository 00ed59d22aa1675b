"""Messages of ranks to the supervisor of their host (`Asked`), its answers, and messages among ranks.

A packet on a Unix socket, or a value of PyTorch's store (`Hello`, `Plan`), is one message.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.host.process import decoded_packet

PACKET_BYTES_MAX = 64 * 1024
"""A plan lists at most `RANKS_MAX` ranks."""
VARIABLES_MAX = 64


class Attach(msgspec.Struct, frozen=True, array_like=True, tag="attach", kw_only=True):
    """A process asks to be this rank of the supervisor's job. Its process id is the socket's."""

    rank: int


class Detach(msgspec.Struct, frozen=True, array_like=True, tag="detach", kw_only=True):
    """A rank has left the job in order. ends: its process ends now; else it goes on, in no job or another."""

    ends: bool


class Attached(msgspec.Struct, frozen=True, array_like=True, tag="attached", kw_only=True):
    """The process is the rank; variables: what a forked rank finds in its environment."""

    variables: dict[str, str]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused", kw_only=True):
    """The process is not taken; reason: for people."""

    reason: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello", kw_only=True):
    """A rank is here. host: see `host_name`; job, rank, size: those that it is attached to, 0 if to none.

    nonce: tells this call from others of the same rank.
    """

    host: str
    nonce: str
    job: int = 0
    rank: int = 0
    size: int = 0


class _KeepsCookie(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A message that no log and no traceback shows the cookie of."""

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [(name, getattr(self, name)) for name in self.__struct_fields__ if name != "cookie"]

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.__rich_repr__())
        return f"{type(self).__name__}({shown})"


class Plan(_KeepsCookie, frozen=True, array_like=True, tag="plan", kw_only=True):
    """The answer of rank 0 to all ranks' `Hello`. problem: why they cannot meet, for people; else empty.

    stays: all are attached to one job already, as they are to be; hosts: the ranks of each host, where they
    are to attach now; name: of this meeting; cookie: of the job, if it is on several hosts.
    """

    name: str = ""
    stays: bool = False
    hosts: tuple[tuple[int, ...], ...] = ()
    problem: str = ""
    cookie: str = ""


class Order(_KeepsCookie, frozen=True, array_like=True, tag="order", kw_only=True):
    """The task of a supervisor. ranks: of its host; patience_s: how long the other hosts may take.

    Over several hosts: name: of the meeting; hosts: how many, `host` is this one; cookie: of the job; joins:
    addresses of the first host's supervisor, none for that itself.
    """

    ranks: int
    patience_s: float = 0.0
    name: str = ""
    hosts: int = 1
    host: int = 0
    cookie: str = ""
    joins: tuple[str, ...] = ()


Asked: TypeAlias = Attach | Detach
Answer: TypeAlias = Attached | Refused

_asked_decoder: msgspec.msgpack.Decoder[Asked] = msgspec.msgpack.Decoder(Asked)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_hello_decoder = msgspec.msgpack.Decoder(Hello)
_plan_decoder = msgspec.msgpack.Decoder(Plan)
_order_decoder = msgspec.msgpack.Decoder(Order)
encode = msgspec.msgpack.Encoder().encode


def decode_asked(packet: bytes) -> Asked:
    """Decode what a rank sent. Raises `RemoteProtocolError`."""
    asked = decoded_packet(
        _asked_decoder, packet, "a process sent the supervisor of its host no request", PACKET_BYTES_MAX
    )
    if isinstance(asked, Attach) and asked.rank < 0:
        raise RemoteProtocolError(f"a process asks to be rank {asked.rank}: expected 0 or more")
    return asked


def decode_answer(packet: bytes) -> Answer:
    """Decode what the supervisor sent. Raises `RemoteProtocolError`."""
    answer = decoded_packet(
        _answer_decoder, packet, "the supervisor of this host sent no answer", PACKET_BYTES_MAX
    )
    if isinstance(answer, Attached) and len(answer.variables) > VARIABLES_MAX:
        raise RemoteProtocolError(
            f"the supervisor of this host sent {len(answer.variables)} variables: at most {VARIABLES_MAX}"
        )
    return answer


def decode_hello(value: bytes) -> Hello:
    """Decode a rank's value in the store. Raises `RemoteProtocolError`."""
    return decoded_packet(
        _hello_decoder, value, "the store has no rank's greeting where one is due", PACKET_BYTES_MAX
    )


def decode_plan(value: bytes) -> Plan:
    """Decode rank 0's value in the store. Raises `RemoteProtocolError`."""
    return decoded_packet(
        _plan_decoder, value, "the store has no plan of rank 0 where one is due", PACKET_BYTES_MAX
    )


def decode_order(packet: bytes) -> Order:
    """Decode what a supervisor was started for. Raises `RemoteProtocolError`."""
    return decoded_packet(
        _order_decoder, packet, "the supervisor was started for nothing that it knows", PACKET_BYTES_MAX
    )
