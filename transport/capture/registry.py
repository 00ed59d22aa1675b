"""Kinds of machine that can be recorded and rebuilt; each layer registers its own at import.

A kind also says how a machine's state is written, so that a replay can begin in the middle of a capture.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any, Final, Generic, TypeVar

import msgspec
import xxhash

from zbmd.transport.capture.codec import UnionCodec, captured_name, encode, is_frozen
from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import Machine

# A machine's state as MessagePack. A state is data from anywhere, like all of a log: nothing in it names
# code. Its objects are of classes that the kind knows beforehand, told by number: the machine's own, the data
# classes that its module names, and what its events and actions are made of. No constructor of a machine is
# run; attributes are set, and only those that the class, or a machine just built, has.
#
# Whatever is not a plain value is an array `[what, …]`, see `StateTag`. What can change is written once, and
# referred to where it stands again: two parts of a state that share a list still share it afterwards.

STATE_BYTES_MAX: Final = 1 << 20
"""A larger state is not recorded."""

_PLAIN = (bool, int, float, str, bytes, type(None))


class StateTag(IntEnum):
    """The first item of every array in a state."""

    TUPLE = 0
    LIST = 1
    SET = 2
    FROZEN_SET = 3
    DEQUE = 4  # most items or nil, then the items
    DICT = 5  # key, value, …
    ENUM = 6  # class, member's name
    NAMED = 7  # class, items of a named tuple or Struct
    OBJECT = 8  # class, {attribute: value}
    AGAIN = 9  # which of the objects, lists, … before this one, from 0 in the order they begin


class StateCodec:
    """Writes and restores the states of one kind of machine.

    roots: the machine's class, and each class in it that is no dataclass, enum, named tuple or Struct.
    unions: its events and actions, whose classes a state may hold too.
    """

    def __init__(self, roots: tuple[type[Any], ...], unions: Iterable[object] = ()) -> None:
        self._root = roots[0]
        named = [one for root in roots for one in vars(sys.modules[root.__module__]).values()]
        found = _data_classes([*unions, *named]) | set(roots)
        names = _unique_names(found)
        self._classes = sorted(found, key=names.__getitem__)
        self._numbers = {cls: number for number, cls in enumerate(self._classes)}
        described = [[*names[cls], _known_attributes(cls)] for cls in self._classes]
        self.fingerprint: Final = xxhash.xxh3_64(msgspec.json.encode(described)).hexdigest()
        """Of the classes and their fields: a state written by other code has another."""

    def encode(self, machine: object) -> bytes:
        """The state. Raises `CaptureMismatch` if it holds what no log can, or is over `STATE_BYTES_MAX`."""
        try:
            state = encode(_Writing(self._numbers).tree(machine))
        except (RecursionError, AttributeError) as error:
            raise CaptureMismatch(f"the state of {self._root.__name__} cannot be recorded: {error}") from None
        if len(state) > STATE_BYTES_MAX:
            raise CaptureMismatch(
                f"the state of {self._root.__name__} has {len(state)} bytes, and may have {STATE_BYTES_MAX}"
            )
        return state

    def restore(self, machine: object, state: bytes | memoryview | msgspec.Raw) -> None:
        """Put what `encode` wrote into `machine`, which was built from the same configuration just before.

        Raises `CaptureMismatch` if it does not fit; `machine` is of no use then.
        """
        if type(machine) is not self._root:
            raise CaptureMismatch(f"a {type(machine).__name__} is no {self._root.__name__}")
        try:
            _Reading(self._classes, machine).root(msgspec.msgpack.decode(state))
        except CaptureMismatch:
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise CaptureMismatch(
                f"what was recorded is no state of {self._root.__name__}: {error}"
            ) from None


class _Writing:
    def __init__(self, numbers: Mapping[type[Any], int]) -> None:
        self._numbers = numbers
        self._begun: dict[int, int] = {}
        self._kept: list[object] = []
        """What `_begun` names by address must live until the end."""

    def tree(self, value: object) -> object:
        cls = type(value)
        if cls in _PLAIN:
            return value
        if isinstance(value, Enum):
            return [StateTag.ENUM, self._number(cls), value.name]
        if isinstance(value, tuple):
            items = [self.tree(item) for item in value]
            return [StateTag.TUPLE, *items] if cls is tuple else [StateTag.NAMED, self._number(cls), *items]
        if isinstance(value, msgspec.Struct):
            return [
                StateTag.NAMED,
                self._number(cls),
                *(self.tree(v) for v in msgspec.structs.astuple(value)),
            ]
        if isinstance(value, frozenset):
            return [StateTag.FROZEN_SET, *self._sorted(value)]
        if is_frozen(cls):
            return self._object(value)
        if (number := self._begun.get(id(value))) is not None:
            return [StateTag.AGAIN, number]
        self._begun[id(value)] = len(self._kept)
        self._kept.append(value)
        return self._changeable(value)

    def _changeable(self, value: object) -> object:
        cls = type(value)
        if cls is list:
            return [StateTag.LIST, *map(self.tree, typing.cast("list[object]", value))]
        if cls is set:
            return [StateTag.SET, *self._sorted(typing.cast("set[object]", value))]
        if cls is dict:
            pairs = typing.cast("dict[object, object]", value).items()
            return [StateTag.DICT, *(self.tree(one) for pair in pairs for one in pair)]
        if isinstance(value, deque):
            items = typing.cast("deque[object]", value)
            return [StateTag.DEQUE, items.maxlen, *map(self.tree, items)]
        return self._object(value)

    def _object(self, value: object) -> object:
        number = self._number(type(value))
        return [
            StateTag.OBJECT,
            number,
            {name: self.tree(getattr(value, name)) for name in _attributes(value)},
        ]

    def _sorted(self, items: Iterable[object]) -> list[object]:
        """A set has no order: by what its items are written as."""
        before = len(self._kept)
        trees = sorted(map(self.tree, items), key=encode)
        if len(self._kept) != before:
            raise CaptureMismatch("a set of things that can change cannot be recorded")
        return trees

    def _number(self, cls: type[Any]) -> int:
        try:
            return self._numbers[cls]
        except KeyError:
            what = f"an instance of {cls.__name__} in a machine's state"
            raise CaptureMismatch(f"{what} cannot be recorded") from None


class _Reading:
    def __init__(self, classes: list[type[Any]], machine: object) -> None:
        self._classes = classes
        self._machine = machine
        self._begun: list[object] = []

    def root(self, tree: object) -> None:
        match tree:
            case [StateTag.OBJECT, int(number), dict(attributes)] if self._classes[number] is type(
                self._machine
            ):
                self._begun.append(self._machine)
                self._fill(self._machine, attributes, set(_attributes(self._machine)))
            case _:
                raise CaptureMismatch(f"what was recorded is no {type(self._machine).__name__}")

    def value(self, tree: object) -> Any:
        if not isinstance(tree, list):
            if type(tree) in _PLAIN:
                return tree
            raise TypeError(f"a {type(tree).__name__} stands alone")
        what, items = StateTag(tree[0]), tree[1:]
        match what:
            case StateTag.TUPLE:
                return tuple(map(self.value, items))
            case StateTag.FROZEN_SET:
                return frozenset(map(self.value, items))
            case StateTag.ENUM:
                enum: Any = self._class(items[0], Enum)
                return enum[items[1]]
            case StateTag.NAMED:
                return self._named(self._class(items[0], tuple | msgspec.Struct), items[1:])
            case StateTag.AGAIN:
                return self._begun[_natural(items[0])]
            case StateTag.OBJECT:
                return self._object(*items)
            case _:
                return self._container(what, items)

    def _named(self, cls: Any, items: list[Any]) -> object:
        names = cls.__struct_fields__ if issubclass(cls, msgspec.Struct) else cls._fields
        return cls(**dict(zip(names, map(self.value, items), strict=True)))

    def _container(self, what: StateTag, items: list[Any]) -> object:
        """It is counted before what is in it, as it was when it was written."""
        if what is StateTag.LIST:
            return self._filled(made := list[Any](), made.append, items)
        if what is StateTag.SET:
            return self._filled(kept := set[Any](), kept.add, items)
        if what is StateTag.DEQUE:
            most = None if items[0] is None else _natural(items[0])
            return self._filled(line := deque[Any](maxlen=most), line.append, items[1:])
        found: dict[Any, Any] = {}
        self._begun.append(found)
        values = list(map(self.value, items))
        found.update(zip(values[::2], values[1::2], strict=True))
        return found

    def _filled(self, container: object, add: Callable[[Any], None], items: list[Any]) -> object:
        self._begun.append(container)
        for item in items:
            add(self.value(item))
        return container

    def _object(self, number: int, attributes: dict[str, Any]) -> object:
        cls = self._class(number, object)
        known = _known_attributes(cls)
        if issubclass(cls, Enum | tuple | msgspec.Struct):
            raise TypeError(f"a {cls.__name__} is not written by its attributes")
        made = object.__new__(cls)
        if not is_frozen(cls):
            self._begun.append(made)
        self._fill(made, attributes, None if known is None else set(known))
        return made

    def _fill(self, made: object, attributes: dict[str, Any], known: set[str] | None) -> None:
        name = type(made).__name__
        if known is not None and attributes.keys() != known:
            changed = sorted(known ^ attributes.keys())
            raise CaptureMismatch(f"{name} has changed since its state was recorded: {', '.join(changed)}")
        for key, tree in attributes.items():
            if not str(key).isidentifier() or key.startswith("__"):
                raise TypeError(f"a {name} with an attribute {key!r}")
            object.__setattr__(made, key, self.value(tree))

    def _class(self, number: object, base: Any) -> type[Any]:
        cls = self._classes[_natural(number)]
        if not issubclass(cls, base):
            raise TypeError(f"{cls.__name__} is not written like that")
        return cls


def _natural(number: object) -> int:
    if not isinstance(number, int) or number < 0:
        raise TypeError(f"{number!r} is no number of anything")
    return number


def _unique_names(classes: Iterable[type[Any]]) -> dict[type[Any], tuple[str, str]]:
    """Return each class's captured name, with its full path only if another class has the same name.

    A class may therefore move to another module, and be renamed if it declares `captured_as`, without making
    the states that were recorded before useless.
    """
    names = {cls: captured_name(cls) for cls in classes}
    count = Counter(names.values())
    return {
        cls: (name, f"{cls.__module__}.{_enclosing(cls)}{name}" if count[name] > 1 else "")
        for cls, name in names.items()
    }


def _enclosing(cls: type[Any]) -> str:
    """Return what stands before the class's name in its qualified name."""
    return cls.__qualname__.removesuffix(cls.__name__)


def _is_data(cls: type[Any]) -> bool:
    return (
        dataclasses.is_dataclass(cls)
        or issubclass(cls, Enum | msgspec.Struct)
        or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    )


def _known_attributes(cls: type[Any]) -> list[str] | None:
    """The attributes of every instance of a class that declares them; None if it does not."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    if issubclass(cls, msgspec.Struct):
        return list(cls.__struct_fields__)
    if issubclass(cls, Enum | tuple):
        return []
    slots = [name for base in cls.__mro__ for name in vars(base).get("__slots__", ())]
    return slots or None


def _attributes(instance: object) -> list[str]:
    """In the order in which a state has them: sorted, as all keys of a log's maps."""
    known = _known_attributes(type(instance))
    return sorted(vars(instance) if known is None else known)


def _data_classes(hints: Iterable[Any]) -> set[type[Any]]:
    """Each data class that a value of one of these types may hold."""
    found: set[type[Any]] = set()
    waiting = list(hints)
    while waiting:
        hint = waiting.pop()
        hint = getattr(hint, "__supertype__", hint)  # a NewType
        waiting += typing.get_args(hint)
        if not isinstance(hint, type) or hint in found or hint is Enum or not _is_data(hint):
            continue
        found.add(hint)
        if not issubclass(hint, Enum):
            waiting += typing.get_type_hints(hint).values()
    return found


EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")

LINK = "link"
"""Stands for a machine's name in a stream of frames."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MachineKind(Generic[EventT, ActionT]):
    """A kind of machine: how to build one from a recorded configuration, and how to write what it says.

    name, version: its own; the version grows when an old log cannot be replayed any more. build: takes the
    configuration as MessagePack gives it back (tuples are lists) and the secrets. secrets: entries of the
    configuration that are never recorded; the replayer asks for them. states: writes the machine's state down
    now and then, so that a replay can begin there; without it a machine is replayed from its beginning only.
    """

    name: str
    version: int
    build: Callable[[Mapping[str, Any]], Machine[EventT, ActionT]]
    events: UnionCodec[EventT]
    actions: UnionCodec[ActionT]
    secrets: tuple[str, ...] = ()
    states: StateCodec | None = None

    @property
    def fingerprint(self) -> str:
        """Of the events' and actions' classes, fields and types: a log written by other code has another."""
        both = f"{self.events.fingerprint} {self.actions.fingerprint}"
        return xxhash.xxh3_64(both.encode()).hexdigest()


_kinds: dict[tuple[str, int], MachineKind[Any, Any]] = {}


def register(
    name: str,
    version: int,
    build: Callable[[Mapping[str, Any]], Machine[EventT, ActionT]],
    *,
    events: object,
    actions: object,
    secrets: tuple[str, ...] = (),
    states: tuple[type[Any], ...] = (),
) -> MachineKind[EventT, ActionT]:
    """Make a kind of machine known, at import. `events`, `actions`: the closed unions; `states`: the
    machine's class and those in it that are no data classes, if its state can be recorded, see `StateCodec`.

    Raises `LocalProtocolError` if the name and version are taken, a union cannot be recorded, or a machine
    with secrets would write them down with its state.
    """
    if name == LINK or not name or (name, version) in _kinds:
        raise LocalProtocolError(f"machine {name!r} version {version} is registered already, or reserved")
    if secrets and states:
        raise LocalProtocolError(
            f"the state of machine {name!r} would hold its secrets: {', '.join(secrets)}"
        )
    kind = MachineKind[EventT, ActionT](
        name=name,
        version=version,
        build=build,
        events=UnionCodec[EventT](events),
        actions=UnionCodec[ActionT](actions),
        secrets=secrets,
        states=StateCodec(states, (events, actions)) if states else None,
    )
    _kinds[name, version] = kind
    return kind


def find(name: str, version: int) -> MachineKind[Any, Any]:
    """The kind of that name and version. Raises `CaptureMismatch` if this release has none."""
    kind = _kinds.get((name, version))
    if kind is None:
        versions = sorted(v for n, v in list(_kinds) if n == name)
        have = (
            f"has versions {versions} of it" if versions else "has no such machine (is its layer imported?)"
        )
        raise CaptureMismatch(
            f"recorded by version {version} of the machine {name}; this release {have}. "
            "Replay it with the release that wrote it."
        )
    return kind


def kinds() -> tuple[MachineKind[Any, Any], ...]:
    """All kinds registered so far."""
    return tuple(_kinds.values())
