"""Closed unions of frozen dataclasses as MessagePack, with a fingerprint of what they look like.

An instance is written as its class's name (see `captured_name`) and a map of its fields. The types decide
what may be read: a log is untrusted data, and nothing in it names code to run. Enums are written by value,
sets in a fixed order, paths as text, errors as their class's name, arguments and plain attributes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Generic, TypeVar

import msgspec
import xxhash

from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.errors import LocalProtocolError

InstanceT = TypeVar("InstanceT")

ERROR_ARGUMENTS_MAX = 16
"""Most arguments, and most attributes, of a recorded error."""

_LEAVES = (int, float, bool, str, bytes, type(None))
_CONTAINERS = (tuple, list, set, frozenset, dict)


def captured_name(cls: Any) -> str:
    """Return the name under which captures hold instances of `cls`: its own `captured_as`, or its `__name__`.

    A renamed class keeps its old name in `captured_as: ClassVar[str]` (`enum.nonmember` in an enum), so that
    captures written before stay readable. Subclasses do not inherit it.
    """
    name: str = cls.__dict__.get("captured_as") or cls.__name__
    return name


def _to_plain(value: object) -> object:
    """Encode what msgspec does not know by itself."""
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, BaseException):
        attributes = {k: v for k, v in vars(value).items() if not k.startswith("_")}
        return [captured_name(type(value)), list(value.args), attributes]
    raise TypeError(f"a {type(value).__name__} cannot be recorded: {value!r}")


def _from_plain(wanted: type[Any], value: object) -> object:
    if issubclass(wanted, PurePath) and isinstance(value, str):
        return wanted(value)
    if issubclass(wanted, BaseException):
        return _error(wanted, value)
    raise TypeError(f"a {type(value).__name__} is no {wanted.__name__}")


def _error(base: type[BaseException], value: object) -> BaseException:
    """An error of class `base` or below it; its constructor is not run, for its arguments may be others."""
    match value:
        case [str(name), list(arguments), dict(attributes)]:
            pass
        case _:
            raise TypeError(f"not a recorded {base.__name__}")
    cls = _named_subclass(base, name)
    if cls is None:
        raise TypeError(f"there is no {name} among the kinds of {base.__name__}")
    if max(len(arguments), len(attributes)) > ERROR_ARGUMENTS_MAX:
        raise TypeError(f"a {name} with more than {ERROR_ARGUMENTS_MAX} arguments or attributes")
    error = cls.__new__(cls)
    error.args = tuple(_frozen(argument) for argument in arguments)
    for key, attribute in attributes.items():
        if not isinstance(key, str) or not key.isidentifier() or key.startswith("_"):
            raise TypeError(f"a {name} with an attribute {key!r}")
        vars(error)[key] = _frozen(attribute)
    return error


def _named_subclass(base: type[BaseException], name: str) -> type[BaseException] | None:
    waiting = [base]
    while waiting:
        cls = waiting.pop()
        if captured_name(cls) == name:
            return cls
        waiting += cls.__subclasses__()
    return None


def _frozen(value: object) -> object:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_plain, order="deterministic")


def encode(value: object) -> bytes:
    """The MessagePack of plain values, dataclasses and whatever else a union may hold; one value, one form.

    Raises `CaptureMismatch` if it holds anything else, or an integer beyond 64 bits.
    """
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CaptureMismatch(f"{type(value).__name__} cannot be recorded: {error}") from None


def encode_batch(values: Sequence[object]) -> bytes:
    """The MessagePack of each value, one behind the other. Raises as `encode`."""
    encoded = encode(values)
    # Without the array's own header, which msgspec writes as short as it can.
    count = len(values)
    return encoded[1 if count < 16 else 3 if count < 1 << 16 else 5 :]


class UnionCodec(Generic[InstanceT]):
    """Encodes and decodes the members of `union`: one frozen dataclass, or a union of several.

    Raises `LocalProtocolError` for a union whose members share a name, are not frozen, or
    have fields of a type that no log can hold.
    """

    def __init__(self, union: object) -> None:
        members = typing.get_args(union) if _is_union(union) else (union,)
        self._tags: dict[type[Any], str] = {}
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {}
        described: dict[str, object] = {}
        for member in members:
            if not (isinstance(member, type) and dataclasses.is_dataclass(member) and is_frozen(member)):
                raise LocalProtocolError(
                    f"{member!r} is no frozen dataclass: a closed union holds nothing else"
                )
            name = captured_name(member)
            if name in self._decoders:
                raise LocalProtocolError(f"two members of one union are called {name}")
            described[name] = _describe(member, ())
            try:
                self._decoders[name] = msgspec.msgpack.Decoder(member, dec_hook=_from_plain)
            except TypeError as error:
                raise LocalProtocolError(
                    f"{name} cannot be recorded: {error}; it is {described[name]}"
                ) from None
            self._tags[member] = name
        self.fingerprint = _fingerprint([described[name] for name in sorted(described)])

    @property
    def members(self) -> Mapping[str, type[InstanceT]]:
        """The union's classes by the name under which they are recorded."""
        return {name: cls for cls, name in self._tags.items()}

    def tag(self, instance: InstanceT) -> str:
        """The name of the instance's class. Raises `CaptureMismatch` if it is no member of the union."""
        try:
            return self._tags[type(instance)]
        except KeyError:
            known = ", ".join(self._decoders)
            raise CaptureMismatch(f"{type(instance).__name__} is none of {known}") from None

    def encode(self, instance: InstanceT) -> bytes:
        """The fields as a MessagePack map. Raises `CaptureMismatch` if a value does not fit into one."""
        return encode(instance)

    def encode_all(self, instances: Iterable[InstanceT]) -> bytes:
        """The MessagePack of `[[tag, fields], …]`. Raises `CaptureMismatch`."""
        return encode([(self.tag(instance), instance) for instance in instances])

    def decode(self, tag: str, fields: bytes | memoryview | msgspec.Raw) -> InstanceT:
        """The instance that `encode` wrote. Raises `CaptureMismatch` if it does not fit the class `tag`."""
        decoder = self._decoders.get(tag)
        if decoder is None:
            raise CaptureMismatch(f"{tag} is none of {', '.join(self._decoders)}")
        try:
            instance: InstanceT = decoder.decode(fields)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise CaptureMismatch(f"what was recorded as {tag} does not fit it: {error}") from None
        return instance


def _is_union(union: object) -> bool:
    return typing.get_origin(union) in (typing.Union, types.UnionType)


def is_frozen(cls: type[Any]) -> bool:
    """Tell whether `cls` is a frozen dataclass."""
    parameters = getattr(cls, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _fingerprint(description: object) -> str:
    return xxhash.xxh3_64(msgspec.json.encode(description)).hexdigest()


def _describe(wanted: Any, outer: tuple[object, ...]) -> object:
    """Describe what of a type decides how its values are recorded, equally in every release of Python."""
    wanted = getattr(wanted, "__supertype__", wanted)  # a NewType
    origin = typing.get_origin(wanted)
    if origin is typing.Annotated:
        return _describe(typing.get_args(wanted)[0], outer)
    if origin is typing.Literal:
        return ["literal", sorted(map(repr, typing.get_args(wanted)))]
    if _is_union(wanted):
        described = [_describe(part, outer) for part in typing.get_args(wanted)]
        return ["union", sorted(described, key=msgspec.json.encode)]
    if origin in _CONTAINERS:
        parts = ["…" if part is Ellipsis else _describe(part, outer) for part in typing.get_args(wanted)]
        return [origin.__name__, parts]
    if wanted is None or wanted in _LEAVES:
        return "none" if wanted in (None, type(None)) else str(wanted.__name__)
    if isinstance(wanted, type):
        return _describe_class(wanted, outer)
    raise LocalProtocolError(f"no log can hold a value of type {wanted!r}")


def _describe_class(cls: type[Any], outer: tuple[object, ...]) -> object:
    name = captured_name(cls)
    if cls in outer:
        return ["again", name]
    if issubclass(cls, Enum):
        return ["enum", name, [[member.name, repr(member.value)] for member in cls]]
    if issubclass(cls, BaseException):
        return ["error", name]
    if issubclass(cls, PurePath):
        return ["path"]
    if dataclasses.is_dataclass(cls):
        names = [item.name for item in dataclasses.fields(cls)]
        hidden = [field for field in names if field.startswith("_")]
        if hidden:
            raise LocalProtocolError(f"{name}.{hidden[0]} would not be recorded: no field may begin with _")
    elif issubclass(cls, msgspec.Struct):
        names = list(cls.__struct_fields__)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names = list(getattr(cls, "_fields", ()))
    else:
        raise LocalProtocolError(f"no log can hold a {name}")
    hints = typing.get_type_hints(cls)
    return ["class", name, [[field, _describe(hints[field], (*outer, cls))] for field in names]]
