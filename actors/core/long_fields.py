"""A message with a long field of bytes is encoded around it, so that its bytes are not copied to be encoded.

What comes of it is `Scattered`: joined, it is what msgspec makes of the same envelope, to the last byte. What
was received in such pieces is decoded around them in the same way: a token stands where the long bytes were,
and the field that has it then gets them. No peer knows the token, so a field is exactly the token only where
bytes began at the cut; then the pieces say what the joined payload says, wherever the peer made us cut.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import inspect as schema

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.transport.memory.frame_loans import BLOCK_BYTES_MIN
from zbmd.transport.memory.scattered import LONG_HEAD, LONG_HEAD_BYTES, Scattered

LONG_BYTES: Final = BLOCK_BYTES_MIN
"""A shorter field is copied sooner than it is cut out."""
CLASSES_MAX: Final = 4096
"""Of which it is known which fields may be long."""

_FIXARRAY, _FIXARRAY_MAX = 0x90, 15
_ARRAY16: Final = b"\xdc"
_NOTHING: Final = msgspec.Raw()
_TOKEN: Final = os.urandom(16)
_SHORT_HEAD: Final = LONG_HEAD + len(_TOKEN).to_bytes(4)
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
            head += LONG_HEAD + len(body).to_bytes(4)
            into = tail
        else:
            into += encode(value)
    return Scattered(bytes(head), body, bytes(tail))


def _array_of(count: int) -> bytes:
    return bytes((_FIXARRAY | count,)) if count <= _FIXARRAY_MAX else _ARRAY16 + count.to_bytes(2)


def shortened(payload: Scattered) -> bytes | None:
    """The payload with a token in place of its body, to be decoded and `filled`; None if it has no head."""
    head, _, tail = payload.pieces
    return head[:-LONG_HEAD_BYTES] + _SHORT_HEAD + _TOKEN + tail if head else None


def filled(message: Contract, body: bytes) -> bool:
    """Put the body where the token is; False if that is not the whole of a field that may hold any bytes."""
    names = _fields.get(type(message))
    if names is None:
        names = _learn(type(message))
    for name in names:
        if getattr(message, name) == _TOKEN and _takes_any(type(message), name):
            msgspec.structs.force_setattr(message, name, body)
            return True
    return False


@functools.lru_cache(CLASSES_MAX)
def _takes_any(cls: type[Contract], name: str) -> bool:
    """Return whether nothing has looked at the token in its place: no bound of length, no `__post_init__`."""
    info = schema.type_info(cls)
    assert isinstance(info, schema.StructType)
    field = next(field.type for field in info.fields if field.name == name)
    assert isinstance(field, schema.BytesType)
    return field.min_length is None and field.max_length is None and not hasattr(cls, "__post_init__")
