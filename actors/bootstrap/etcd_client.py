"""A small client of etcd's v3 API, by its JSON gateway: HTTP/1.1, and no gRPC.

h11 reads and writes HTTP; the replies are decoded by msgspec into the few fields that are used, whatever else
they hold. Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and the API's rpc.proto.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from zbmd.actors.bootstrap.environments import parse_join_address
from zbmd.transport.errors import RemoteProtocolError, UserError, ZbmdError
from zbmd.transport.tcp.address import TcpAddress

# --- addresses of an etcd as users write them, and the records that are kept there (sans-I/O) -----------
#
#     etcd://host:2379[,host:2379…]/name      etcds:// for TLS
#
# Below `/zbmd/name/` are `cluster`, the record of who founded it; `doors/…`, one record of each living
# member, with a lease; `witness/…`, who may go on with one half of a view.


ETCD_PORT = 2379
ENDPOINTS_MAX = 16
NAME_CHARACTERS_MAX = 128
ROOT = "/zbmd"

_URL = re.compile(r"(?P<scheme>etcds?)://(?P<hosts>[^/]+)/(?P<name>[^/].*)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._\-]+(/[A-Za-z0-9._\-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUrl:
    """The endpoints of an etcd, and the name of the cluster whose records are kept there."""

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
        """The prefix of the keys of living members."""
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
    """The founder of the cluster. `generation` grows with every founding under one name."""

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


RecordT = TypeVar("RecordT", ClusterRecord, MemberRecord, WitnessRecord)


def read_record(data: bytes, kind: type[RecordT]) -> RecordT:
    """A record of ours. Raises `RemoteProtocolError` on anything else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"the store holds no {kind.__name__}: {error}") from error


REPLY_BYTES_MAX: Final = 1 << 20
READ_BYTES: Final = 1 << 16
KEYS_MAX: Final = 4096
"""Of one answer to `range`."""
REQUEST_S_MAX: Final = 2.0
"""Of one request to one endpoint."""

HTTP_OK: Final = 200
UNAUTHENTICATED: Final = frozenset({16})
"""gRPC's code of a token that has run out."""

R = TypeVar("R", bound=msgspec.Struct)


class EtcdError(ZbmdError):
    """etcd cannot be reached, or refused a request. `code`: gRPC's, 0 if it was not reached."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class KeyValue(msgspec.Struct, frozen=True, kw_only=True):
    """A key with its value, as bytes in base64 on the wire, and the revision at which it was last written."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class _Failure(msgspec.Struct, frozen=True, kw_only=True):
    message: str = ""
    error: str = ""
    code: int = 0


class _Lease(msgspec.Struct, frozen=True, kw_only=True):
    ID: int = 0
    TTL: int = 0


class _Alive(msgspec.Struct, frozen=True, kw_only=True):
    result: _Lease = msgspec.field(default_factory=_Lease)


class _Range(msgspec.Struct, frozen=True, kw_only=True):
    kvs: tuple[KeyValue, ...] = ()


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    response_range: _Range | None = None


class TransactionResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a transaction: whether its conditions held, and the pairs that it read."""

    succeeded: bool = False
    responses: tuple[_Response, ...] = ()

    def found(self) -> tuple[KeyValue, ...]:
        """Return the pairs that it read, in order."""
        return tuple(
            pair
            for response in self.responses
            if response.response_range
            for pair in response.response_range.kvs
        )


class _Token(msgspec.Struct, frozen=True, kw_only=True):
    token: str


class _Nothing(msgspec.Struct, frozen=True, kw_only=True):
    pass


def text64(text: str | bytes) -> str:
    """Bytes as the gateway has them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def after_prefix(prefix: str) -> bytes:
    """The end of the range of all keys that begin with `prefix`."""
    encoded = prefix.encode()
    return encoded[:-1] + bytes([encoded[-1] + 1])


def compare_revision(key: str, revision: int) -> dict[str, Any]:
    """A condition: the key was last written at that revision; 0 if it must not be there."""
    return {"key": text64(key), "target": "MOD", "mod_revision": str(revision), "result": "EQUAL"}


def compare_none(prefix: str) -> dict[str, Any]:
    """A condition: no key begins with `prefix`."""
    end = text64(after_prefix(prefix))
    return {
        "key": text64(prefix),
        "range_end": end,
        "target": "CREATE",
        "create_revision": "0",
        "result": "EQUAL",
    }


def put(key: str, value: bytes, lease: int = 0) -> dict[str, Any]:
    """An operation: write the key; with a lease it goes when that ends."""
    return {"request_put": {"key": text64(key), "value": text64(value), "lease": str(lease)}}


def get(key: str) -> dict[str, Any]:
    """An operation: read the key."""
    return {"request_range": {"key": text64(key)}}


class EtcdClient:
    """Asks one endpoint after the other until one answers. Use from one event loop.

    environment: ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY and ETCDCTL_USER (`name:password`) mean what they
    mean to etcdctl. Raises `UserError` if h11 is not installed or a file of these cannot be read.
    """

    def __init__(self, url: EtcdUrl, environment: Mapping[str, str] = os.environ) -> None:
        self.url = url
        try:
            self._h11: Any = importlib.import_module("h11")
        except ImportError:
            raise UserError("a store in etcd needs h11: pip install 'zbmd[etcd]'") from None
        self._user = environment.get("ETCDCTL_USER", "")
        self._token = ""
        self._first = 0
        self._ssl = _context(environment) if url.tls else None

    async def range(self, prefix: str) -> tuple[KeyValue, ...]:
        """All keys that begin with `prefix`, in order, at most KEYS_MAX."""
        end = text64(after_prefix(prefix))
        body = {"key": text64(prefix), "range_end": end, "limit": str(KEYS_MAX)}
        return (await self._call("kv/range", body, _Range)).kvs

    async def transaction(
        self,
        compare: Sequence[Mapping[str, Any]],
        success: Sequence[Mapping[str, Any]],
        failure: Sequence[Mapping[str, Any]] = (),
    ) -> TransactionResult:
        """Do `success` if all conditions hold, else `failure`, and nothing in between."""
        body = {"compare": list(compare), "success": list(success), "failure": list(failure)}
        return await self._call("kv/txn", body, TransactionResult)

    async def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        await self._call("kv/deleterange", {"key": text64(key)}, _Nothing)

    async def grant(self, ttl_s: int) -> int:
        """A new lease; it ends `ttl_s` seconds after it was last kept alive."""
        return (await self._call("lease/grant", {"TTL": str(ttl_s)}, _Lease)).ID

    async def keep_alive(self, lease: int) -> bool:
        """Prolong a lease; False if it has ended."""
        return (await self._call("lease/keepalive", {"ID": str(lease)}, _Alive)).result.TTL > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and all keys that have it."""
        await self._call("lease/revoke", {"ID": str(lease)}, _Nothing)

    async def _call(self, path: str, body: Mapping[str, Any], reply: type[R]) -> R:
        """Ask each endpoint once. A request whose reply was lost may have been carried out."""
        if self._user and not self._token:
            await self._authenticate()
        try:
            return await self._ask_all(path, body, reply)
        except EtcdError as error:
            if not self._user or error.code not in UNAUTHENTICATED:
                raise
            await self._authenticate()
            return await self._ask_all(path, body, reply)

    async def _authenticate(self) -> None:
        name, _, password = self._user.partition(":")
        self._token = ""
        self._token = (
            await self._ask_all("auth/authenticate", {"name": name, "password": password}, _Token)
        ).token

    async def _ask_all(self, path: str, body: Mapping[str, Any], reply: type[R]) -> R:
        failures: list[str] = []
        count = len(self.url.endpoints)
        for at in range_from(self._first, count):
            endpoint = self.url.endpoints[at]
            try:
                async with asyncio.timeout(REQUEST_S_MAX):
                    status, data = await self._ask(endpoint, path, msgspec.json.encode(body))
                self._first = at
                return decode_reply(status, data, reply)
            except (OSError, TimeoutError, self._h11.ProtocolError, RemoteProtocolError) as error:
                failures.append(f"{endpoint}: {str(error) or type(error).__name__}")
        raise EtcdError(f"no etcd answers {path}: {'; '.join(failures)}")

    async def _ask(self, endpoint: TcpAddress, path: str, body: bytes) -> tuple[int, bytes]:
        """One request on a connection of its own: the status and the whole body."""
        reader, writer = await asyncio.open_connection(
            endpoint.host, endpoint.port, ssl=self._ssl, limit=READ_BYTES
        )
        try:
            connection = self._h11.Connection(self._h11.CLIENT)
            headers = [("Host", str(endpoint)), ("Content-Length", str(len(body))), ("Connection", "close")]
            headers += [("Content-Type", "application/json")]
            headers += [("Authorization", self._token)] if self._token else []
            request = self._h11.Request(method="POST", target=f"/v3/{path}", headers=headers)
            writer.write(connection.send(request) + connection.send(self._h11.Data(data=body)))
            writer.write(connection.send(self._h11.EndOfMessage()))
            await writer.drain()
            return await self._answer(connection, reader)
        finally:
            writer.transport.abort()

    async def _answer(self, connection: Any, reader: asyncio.StreamReader) -> tuple[int, bytes]:
        status, parts, size = 0, list[bytes](), 0
        while True:
            event = connection.next_event()
            if event is self._h11.NEED_DATA:
                connection.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, self._h11.Response):
                status = event.status_code
            elif isinstance(event, self._h11.Data):
                size += len(event.data)
                if size > REPLY_BYTES_MAX:
                    raise OSError(f"an answer of more than {REPLY_BYTES_MAX} bytes")
                parts.append(bytes(event.data))
            elif isinstance(event, self._h11.EndOfMessage):
                return status, b"".join(parts)


def range_from(first: int, count: int) -> list[int]:
    """All of `count` places, from `first` on."""
    return [(first + step) % count for step in range(count)]


def decode_reply(status: int, data: bytes, reply: type[R]) -> R:
    """Decode an answer. Raises `EtcdError` for a refusal, `RemoteProtocolError` for anything else."""
    try:
        if status == HTTP_OK:
            return msgspec.json.decode(data, type=reply, strict=False)
        failure = msgspec.json.decode(data, type=_Failure, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"an answer that etcd does not give (HTTP {status}): {error}") from error
    said = (failure.message or failure.error)[:256]
    raise EtcdError(f"etcd refused the request: {said} (HTTP {status})", code=failure.code)


def _context(environment: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=environment.get("ETCDCTL_CACERT") or None)
        if certificate := environment.get("ETCDCTL_CERT"):
            context.load_cert_chain(certificate, environment.get("ETCDCTL_KEY") or None)
    except OSError as error:
        raise UserError(f"ETCDCTL_CACERT, ETCDCTL_CERT or ETCDCTL_KEY cannot be used: {error}.") from error
    return context
