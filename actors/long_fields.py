"""A message with a long field of bytes is encoded around it, so that its bytes are not copied to be encoded.

What comes of it is `Scattered`: joined, it is what msgspec makes of the same envelope, to the last byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import inspect as schema

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.transport.frame_loans import BLOCK_BYTES_MIN
from zbmd.transport.scattered import Scattered

LONG_BYTES: Final = BLOCK_BYTES_MIN
"""A shorter field is copied sooner than it is cut out."""
CLASSES_MAX: Final = 4096
"""Of which it is known which fields may be long."""

_BIN32: Final = b"\xc6"
_FIXARRAY, _FIXARRAY_MAX = 0x90, 15
_ARRAY16: Final = b"\xdc"
_NOTHING: Final = msgspec.Raw()
_fields: dict[type, tuple[str, ...]] = {}


def long_field(message: Any) -> str | None:
    """The name of the message's first field of long `bytes`; None if it has none, or is no contract."""
    names = _fields.get(type(message))
    if names is None:
        names = _learn(type(message))
    for name in names:
        value = getattr(message, name)
        if type(value) is bytes and len(value) >= LONG_BYTES:
            return name
    return None


def _learn(cls: type) -> tuple[str, ...]:
    if len(_fields) >= CLASSES_MAX:
        _fields.clear()
    names: tuple[str, ...] = ()
    if issubclass(cls, Contract):
        info = schema.type_info(cls)
        assert isinstance(info, schema.StructType)
        names = tuple(field.name for field in info.fields if isinstance(field.type, schema.BytesType))
    _fields[cls] = names
    return names


def scatter(
    envelope: msgspec.Struct, message: Contract, name: str, encode: Callable[[Any], bytes]
) -> Scattered:
    """The payload of an envelope whose last field, `body`, is the message; its field `name` is as it was.

    Raises what `encode` raises.
    """
    head = bytearray(encode(msgspec.structs.replace(envelope, body=_NOTHING)))
    names = message.__struct_fields__
    head += _array_of(len(names) + 1)
    head += encode(contract_tag(message))
    into, tail, body = head, bytearray(), b""
    for each in names:
        value = getattr(message, each)
        if each == name:
            body = value
            head += _BIN32 + len(body).to_bytes(4)
            into = tail
        else:
            into += encode(value)
    return Scattered(bytes(head), body, bytes(tail))


def _array_of(count: int) -> bytes:
    return bytes((_FIXARRAY | count,)) if count <= _FIXARRAY_MAX else _ARRAY16 + count.to_bytes(2)
