"""Contracts: typed messages with an id and a version.

A contract is a frozen `msgspec.Struct`, an array on the wire whose first element is `"id/version"`. Both
versions of one id may be live in a cluster. A class that declares `compatible_from=v` also decodes what
older peers send as version v and later: the fields they lack take their defaults, so added fields must
have one and go last.

Schemas are closed: no `Any`, no raw values and no recursion, so a message can nest no deeper than its
contract (`SCHEMA_DEPTH_MAX`); and msgspec refuses an array that claims more elements than the frame has
bytes left. With the cap on a frame, decoding is bounded before it begins.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Union, dataclass_transform

import msgspec
import structlog
from msgspec import inspect as schema

from zbmd.actors.errors import ContractError, ContractMismatch, InvalidMessage, UnknownContract
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.identity import MAX_CONTRACTS

SCHEMA_DEPTH_MAX = 16
CONTRACT_ID_CHARS_MAX = 58  # with "/65535" behind it a hello takes it
VERSION_MAX = 65_535

_log = structlog.get_logger("zbmd.contracts")
_ID = re.compile(r"[A-Za-z0-9_.:<>-]+")
_registry: dict[tuple[str, int], type[Contract]] = {}
_generation = object()
"""Another with every registration, so that decoders know when to look again.

A thread may import a module, and declare its contracts, while others decode. So a decoder reads this before
the registry, which might otherwise lack what this stands for. It is no number: two threads that count up at
once may bring one back.
"""


def _checked_id(given: str | None, qualified: str) -> str:
    if given is None:
        if len(qualified) <= CONTRACT_ID_CHARS_MAX:
            return qualified
        digest = hashlib.blake2b(qualified.encode(), digest_size=8).hexdigest()
        return f"{qualified[-(CONTRACT_ID_CHARS_MAX - 17) :]}-{digest}"
    if not _ID.fullmatch(given) or len(given) > CONTRACT_ID_CHARS_MAX:
        raise ContractError(
            f"{qualified}: id {given!r} is not 1 to {CONTRACT_ID_CHARS_MAX} letters, digits or _.:<>-"
        )
    return given


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class ContractMeta(msgspec.StructMeta):
    """Turns `class Add(Contract, id="calc.add", version=2)` into a tagged struct and registers it.

    Without `id` the class's qualified name is the id, shortened with its hash if it is too long.
    `telemetry=True`: only the latest matter, so a full mailbox may drop the oldest of them.
    `parting=True`: the last of its sender; that its receiver has parted before is no news.
    """

    __zbmd_telemetry__: bool
    __zbmd_parting__: bool

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        id: str | None = None,
        version: int = 1,
        compatible_from: int | None = None,
        telemetry: bool = False,
        parting: bool = False,
    ) -> ContractMeta:
        qualified = f"{namespace['__module__']}:{namespace['__qualname__']}"
        contract_id = _checked_id(id, qualified)
        oldest = version if compatible_from is None else compatible_from
        if not 1 <= oldest <= version <= VERSION_MAX:
            raise ContractError(f"{qualified}: versions {oldest}..{version}; give 1..{VERSION_MAX}, in order")
        cls = super().__new__(
            mcls, name, bases, namespace, tag=f"{contract_id}/{version}", array_like=True, frozen=True
        )
        cls.__zbmd_telemetry__ = telemetry
        cls.__zbmd_parting__ = parting
        if any(isinstance(base, ContractMeta) for base in bases):
            _register(cls, contract_id, version, oldest)  # type: ignore[arg-type]
        return cls


class Contract(msgspec.Struct, metaclass=ContractMeta):
    """The base of every message. Subclass it with fields; see the module's text for ids and versions."""


class _Identity(msgspec.Struct, frozen=True):
    id: str
    version: int
    oldest: int


_identities: dict[type[Contract], _Identity] = {}


def _register(cls: type[Contract], contract_id: str, version: int, oldest: int) -> None:
    global _generation
    key = (contract_id, version)
    known = _registry.get(key)
    if known is not None:
        # The same definition run again (a reloaded module, a class local to a function) takes its place.
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ContractError(
                f"contract {contract_id}/{version} is already {known.__module__}.{known.__qualname__}; "
                f"give {cls.__module__}.{cls.__qualname__} another id or version"
            )
        del _identities[known]
    elif len(_registry) >= MAX_CONTRACTS:
        raise ContractError(f"{MAX_CONTRACTS} contracts are registered; are classes made in a loop?")
    _registry[key] = cls
    _identities[cls] = _Identity(id=contract_id, version=version, oldest=oldest)
    _generation = object()


def contract_tag(contract: type[Contract] | Contract) -> str:
    """`"id/version"` of a contract or of a message."""
    return str(contract.__struct_config__.tag)


def is_parting(tag: str) -> bool:
    """Whether nobody has to know that a message of the contract `tag`, `"id/version"`, was not taken."""
    contract_id, _, version = tag.rpartition("/")
    contract = _registry.get((contract_id, int(version))) if version.isdecimal() else None
    return contract is not None and contract.__zbmd_parting__


def registered() -> Mapping[tuple[str, int], type[Contract]]:
    """Return all contracts of this process by (id, version)."""
    return MappingProxyType(_registry)


# Fingerprints.


@cache
def fingerprint(contract: type[Contract]) -> str:
    """64 bits, in hex, of the contract's schema: field names, types, constraints and which have defaults.

    Raises `ContractError` if the schema is not closed. Kept: each link compares those of all contracts.
    """
    return hashlib.blake2b(_describe(contract).encode(), digest_size=8).hexdigest()


def fingerprints() -> dict[str, str]:
    """`"id/version"` to fingerprint for all contracts of this process, for comparing at hello."""
    return {f"{i}/{v}": fingerprint(cls) for (i, v), cls in sorted(_registry.items(), key=lambda kv: kv[0])}


def check_fingerprints(peer: str, theirs: Mapping[str, str]) -> None:
    """Raise `ContractMismatch` if `peer` has another schema under an id and version that we have too."""
    for (contract_id, version), cls in list(_registry.items()):
        tag = f"{contract_id}/{version}"
        other = theirs.get(tag)
        if other is not None and other != fingerprint(cls):
            raise ContractMismatch(
                f"{peer} has another schema for {tag} ({other}, here {fingerprint(cls)}): "
                "one of the two runs changed code; give the changed contract a new version"
            )


def _describe(contract: type[Contract]) -> str:
    try:
        info = schema.type_info(contract)
    except Exception as error:
        raise ContractError(f"{contract_tag(contract)}: its field types cannot be read: {error}") from error
    return _describe_type(info, (contract_tag(contract),), frozenset())


def _describe_type(info: schema.Type, path: tuple[str, ...], above: frozenset[type]) -> str:
    where = ".".join(path)
    if len(path) > SCHEMA_DEPTH_MAX:
        raise ContractError(f"{where}: nests deeper than {SCHEMA_DEPTH_MAX}")
    if isinstance(info, schema.AnyType | schema.RawType | schema.MemoryViewType | schema.ExtType):
        raise ContractError(f"{where}: {type(info).__name__} is open; a contract's schema must be closed")
    if isinstance(info, schema.CustomType):
        wire_name = getattr(info.cls, "__zbmd_wire_name__", None)
        if wire_name is None:
            raise ContractError(f"{where}: {info.cls.__qualname__} has no wire format; use plain types")
        return str(wire_name)
    if isinstance(
        info, schema.StructType | schema.DataclassType | schema.TypedDictType | schema.NamedTupleType
    ):
        if info.cls in above:
            raise ContractError(f"{where}: contains itself; a contract's schema must not be recursive")
        inner = above | {info.cls}
        fields = [
            f"{f.encode_name}:{_describe_type(f.type, (*path, f.name), inner)}{'' if f.required else '='}"
            for f in info.fields
        ]
        tag = f"{info.tag_field}={info.tag}" if isinstance(info, schema.StructType) else ""
        return f"{type(info).__name__}({tag};{','.join(fields)})"
    if isinstance(info, schema.EnumType | schema.LiteralType):
        values = [m.value for m in info.cls] if isinstance(info, schema.EnumType) else list(info.values)
        return f"{type(info).__name__}({values!r})"
    parts: list[str] = []
    for name in info.__struct_fields__:
        value = getattr(info, name)
        if isinstance(value, schema.Type):
            parts.append(f"{name}={_describe_type(value, (*path, name), above)}")
        elif isinstance(value, tuple):
            inner_types = [_describe_type(t, (*path, name), above) for t in value]
            parts.append(f"{name}=[{','.join(inner_types)}]")
        elif value is not None:
            parts.append(f"{name}={value!r}")
    return f"{type(info).__name__}({','.join(parts)})"


# Decoding.


class ContractDecoder:
    """Decodes any registered contract. `dec_hook` is msgspec's, for types it does not know."""

    __slots__ = ("_dec_hook", "_decoder", "_generation", "_left_out")

    def __init__(self, dec_hook: Callable[[type, Any], Any]) -> None:
        self._dec_hook = dec_hook
        self._generation: object = None
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
        self._left_out: dict[str, str] = {}
        """Contracts that cannot be decoded, by tag, and why."""

    def decode(self, body: bytes | memoryview | msgspec.Raw) -> Contract:
        """Return the message in `body`.

        Raises `UnknownContract` if no class has its id and version, `InvalidMessage` if its fields do not
        fit, `RemoteProtocolError` if it is no contract at all.
        """
        decode = self.current()
        try:
            return decode(body)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 (a hook may raise anything on hostile input)
            return self._decode_slowly(body, error)

    def current(self) -> Callable[[bytes | memoryview | msgspec.Raw], Any]:
        """Return the decoder until another contract is declared; it raises what msgspec or a hook raises."""
        if self._generation is not _generation:
            self._renew()
        return self._decoder.decode

    def _renew(self) -> None:
        generation, contracts, left_out = _generation, list(_registry.values()), dict[str, str]()
        closed: list[type[Contract]] = []
        for contract in contracts:
            try:
                _describe(contract)
            except ContractError as error:
                # Its author hears of it where it is used; the other contracts go on working.
                tag = contract_tag(contract)
                left_out[tag] = str(error)
                if tag not in self._left_out:
                    _log.error("contract left out", contract=tag, error=str(error))
            else:
                closed.append(contract)
        union = Union[tuple(closed)] if closed else Contract  # noqa: UP007
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=self._dec_hook)
        self._generation, self._left_out = generation, left_out

    def _decode_slowly(
        self, body: bytes | memoryview | msgspec.Raw, error: Exception, *, again: bool = True
    ) -> Contract:
        """Tell an older version, an unknown id and a message that does not fit apart."""
        try:
            parts = _PARTS.decode(body)
            tag = _TAG.decode(parts[0])
            contract_id, _, version_text = tag.rpartition("/")
            version = int(version_text)
        except Exception:  # noqa: BLE001 (as above)
            raise RemoteProtocolError(f"not a contract: {error}") from error
        if again and (self._generation is not _generation or tag in self._left_out):
            # It was declared a moment ago, or its module was being imported when it was looked at.
            self._renew()
            try:
                return self._decoder.decode(body)  # type: ignore[no-any-return]
            except Exception as misfit:  # noqa: BLE001 (as above)
                return self._decode_slowly(body, misfit, again=False)
        if (contract_id, version) in _registry:
            why = self._left_out.get(tag, error)
            raise InvalidMessage(f"{tag} does not fit its contract: {why}") from error
        upgraded = _newer(contract_id, version)
        if upgraded is None:
            raise UnknownContract(f"no contract {tag} here; {_known_versions(contract_id)}") from None
        parts[0] = msgspec.Raw(msgspec.msgpack.encode(contract_tag(upgraded)))
        try:
            return self._decoder.decode(msgspec.msgpack.encode(parts))  # type: ignore[no-any-return]
        except Exception as misfit:
            raise InvalidMessage(f"{tag} does not fit {contract_tag(upgraded)}: {misfit}") from misfit


_PARTS = msgspec.msgpack.Decoder(list[msgspec.Raw])
_TAG = msgspec.msgpack.Decoder(str)


def _newer(contract_id: str, version: int) -> type[Contract] | None:
    """Return the lowest newer version that says it decodes `version`."""
    fitting = [
        (identity.version, cls)
        for cls, identity in list(_identities.items())
        if identity.id == contract_id and identity.oldest <= version < identity.version
    ]
    return min(fitting, key=lambda pair: pair[0])[1] if fitting else None


def older_versions(contract: type[Contract]) -> list[type[Contract]]:
    """The contracts of this process, of the same id and older, whose messages `contract` says it decodes."""
    identity = _identities.get(contract)
    if identity is None or identity.oldest == identity.version:
        return []
    known = (_registry.get((identity.id, v)) for v in range(identity.oldest, identity.version))
    return [cls for cls in known if cls is not None]


def renewed(message: Contract, contract: type[Contract]) -> Contract:
    """The message as one of a newer version: what it lacks takes its default. Raises `InvalidMessage`."""
    fields = type(message).__struct_fields__
    try:
        return contract(*(getattr(message, name) for name in fields))
    except TypeError as error:
        raise InvalidMessage(
            f"{contract_tag(message)} does not fit {contract_tag(contract)}: {error}"
        ) from error


def _known_versions(contract_id: str) -> str:
    versions = sorted(v for i, v in list(_registry) if i == contract_id)
    return f"versions of it here: {versions}" if versions else "is the module that defines it imported here?"
