"""Sans-I/O: the address of an etcd as users write it, and what is kept there.

    etcd://host:2379[,host:2379…]/name      etcds:// for TLS

Below `/zbmd/name/` are `cluster`, the record of who founded it; `doors/…`, one record of each living member,
with a lease; `witness/…`, who may go on with one half of a view.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from zbmd.actors.bootstrap.readings import parse_join_address
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.tcp.address import TcpAddress

ETCD_PORT = 2379
ENDPOINTS_MAX = 16
NAME_CHARACTERS_MAX = 128
ROOT = "/zbmd"

_URL = re.compile(r"(?P<scheme>etcds?)://(?P<hosts>[^/]+)/(?P<name>[^/].*)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._\-]+(/[A-Za-z0-9._\-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUrl:
    """Where an etcd answers, and the name of the cluster whose records are kept there."""

    endpoints: tuple[TcpAddress, ...]
    name: str
    tls: bool = False

    def __str__(self) -> str:
        hosts = ",".join(str(endpoint) for endpoint in self.endpoints)
        return f"etcd{'s' if self.tls else ''}://{hosts}/{self.name}"

    @property
    def cluster_key(self) -> str:
        """The record of who founded it."""
        return f"{ROOT}/{self.name}/cluster"

    @property
    def members_prefix(self) -> str:
        """What the keys of living members begin with."""
        return f"{ROOT}/{self.name}/doors/"

    @property
    def witness_key(self) -> str:
        """The record of which half may go on."""
        return f"{ROOT}/{self.name}/witness"


def parse_etcd_url(text: str) -> EtcdUrl:
    """Raises `UserError` on what is no address of an etcd."""
    found = _URL.fullmatch(text)
    name = found["name"] if found is not None else ""
    if found is None or _NAME.fullmatch(name) is None or len(name) > NAME_CHARACTERS_MAX:
        raise UserError(
            f"{text[:128]!r} is no address of a store. Write etcd://HOST:PORT[,HOST:PORT]/NAME, with a NAME "
            "of letters, digits, dots, dashes and slashes."
        )
    hosts = found["hosts"].split(",")
    if len(hosts) > ENDPOINTS_MAX:
        raise UserError(f"{text[:128]!r} has more than {ENDPOINTS_MAX} hosts.")
    endpoints = tuple(parse_join_address(host, "the store's address", port=ETCD_PORT) for host in hosts)
    if any(endpoint.port == 0 for endpoint in endpoints):
        raise UserError(f"{text[:128]!r} has a port 0, which nobody answers at.")
    return EtcdUrl(endpoints=endpoints, name=name, tls=found["scheme"] == "etcds")


class ClusterRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who founded the cluster. `generation` grows with every founding under one name."""

    generation: int
    founder: str


class MemberRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A living member: its name, where its links are dialed, and the founding that it belongs to."""

    name: str
    address: str
    generation: int


class WitnessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The half that may go on: the part of `epoch`'s view before that this incarnation of a node is in."""

    generation: int
    epoch: int
    id: int
    incarnation: int


R = TypeVar("R", ClusterRecord, MemberRecord, WitnessRecord)


def read_record(data: bytes, kind: type[R]) -> R:
    """A record of ours. Raises `RemoteProtocolError` on anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the store holds no {kind.__name__}: {error}") from error
