"""The registry of machines that can be recorded and rebuilt. Each layer registers its own at import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import xxhash

from zbmd.transport.capture.codec import UnionCodec
from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.capture.state import StateCodec
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import Machine

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
        versions = sorted(v for n, v in _kinds if n == name)
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
