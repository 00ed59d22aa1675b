"""The arguments of an actor's constructor as bytes: plain data, references and contracts, and nothing else.

What comes back is equal and of the same types, so the constructor does the same with it. MessagePack alone
has neither tuples nor references nor contracts: each is an extension, whose data is MessagePack again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.wire import RefData
from zbmd.actors.replay.events import encode_body

ARGUMENT_DEPTH_MAX = 16
ARGUMENTS_BYTES_MAX = 1 << 20

_REF, _TUPLE, _CONTRACT = 1, 2, 3
_SCALARS = frozenset((type(None), bool, int, float, str, bytes))
_INTEGERS = range(-(1 << 63), 1 << 64)


class NotPlain(ValueError):
    """An argument cannot be given again from a recording."""


def pack_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Positional and named arguments as bytes. Raises `NotPlain`."""
    plain = [[_packed(value, str(number), 0) for number, value in enumerate(args)], {}]
    plain[1] = {name: _packed(value, name, 0) for name, value in kwargs.items()}
    packed = msgspec.msgpack.encode(plain)
    if len(packed) > ARGUMENTS_BYTES_MAX:
        raise NotPlain(f"its constructor was given {len(packed)} bytes of arguments")
    return packed


def unpack_arguments(
    packed: bytes, bind: Callable[[RefData], Ref], decode_contract: Callable[[bytes], Contract]
) -> tuple[list[Any], dict[str, Any]]:
    """What `pack_arguments` was given. Raises `ValueError` or `RecursionError` if these are no arguments."""

    def unpack(code: int, data: memoryview) -> Any:
        match code:
            case 1:
                return bind(msgspec.msgpack.decode(data, type=RefData))
            case 2:
                return tuple(items.decode(data))
            case 3:
                return decode_contract(bytes(data))
            case _:
                raise ValueError(f"no argument is an extension {code}")

    items = msgspec.msgpack.Decoder(list[Any], ext_hook=unpack)
    match msgspec.msgpack.Decoder(ext_hook=unpack).decode(packed):
        case [list(args), dict(kwargs)] if all(isinstance(name, str) for name in kwargs):
            return args, kwargs
        case _:
            raise ValueError("these are no arguments")


def _packed(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        if kind is int and value not in _INTEGERS:
            raise NotPlain(f"its constructor's argument {where} has more than 64 bits")
        return value
    if depth == ARGUMENT_DEPTH_MAX:
        raise NotPlain(f"its constructor's argument {where} nests deeper than {ARGUMENT_DEPTH_MAX}")
    if kind is list:
        return [_packed(item, where, depth + 1) for item in value]
    if kind is dict:
        return {_key(key, where): _packed(item, where, depth + 1) for key, item in value.items()}
    if kind is tuple:
        items = [_packed(item, where, depth + 1) for item in value]
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode(items))
    if kind is Ref:
        return msgspec.msgpack.Ext(_REF, msgspec.msgpack.encode(value.key()))
    if isinstance(value, Contract):
        try:
            return msgspec.msgpack.Ext(_CONTRACT, encode_body(value))
        except Exception as error:
            raise NotPlain(f"its constructor's argument {where}, a {contract_tag(value)}: {error}") from error
    raise NotPlain(
        f"its constructor's argument {where} is a {kind.__qualname__}: neither plain data nor a Ref"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in _SCALARS:
        return key
    raise NotPlain(f"its constructor's argument {where} has a {type(key).__qualname__} as a key")
