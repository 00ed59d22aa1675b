"""The changes of code that are in force, as each process of a view knows them (sans-I/O).

Those that took part in a change know when it is kept; others, and later ones, receive a report. Two
processes tell each other all that they know when a link between them stands, and then each change that is new
to them. What a process learns from another it tells on: those who knew it first may die before they have told
all. So all processes of a view that stay linked end with the same changes, in whatever order they came.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, TypeAlias, assert_never

import msgspec

from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import RemoteProtocolError

CHANGES_MAX: Final = 1024
"""Changes of code that a view may keep."""

ClassId = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]


class CodeChange(msgspec.Struct, frozen=True, array_like=True):
    """Actors of the class `old` have become actors of `new`; both are `"module:Class"`."""

    captured_as: ClassVar[str] = "Change"
    old: ClassId
    new: ClassId


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUp:
    """A link to a process of the view is up; nothing was sent on it yet."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkDown:
    """A link to a process of the view has ended."""

    process: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptHere:
    """This process took part in a change that all keep, and its actors run it."""

    change: CodeChange


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangesReported:
    """A process reports the changes that it knows, or that are new to it."""

    captured_as: ClassVar[str] = "Heard"
    process: str
    incarnation: int
    changes: tuple[CodeChange, ...]


Event: TypeAlias = LinkUp | LinkDown | KeptHere | ChangesReported


@dataclass(frozen=True, slots=True, kw_only=True)
class TellChanges:
    """Send changes to a process over the current link, after those before."""

    process: str
    changes: tuple[CodeChange, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt:
    """Turn actors of the old class into actors of the new one before their next message, new ones at once."""

    change: CodeChange


@dataclass(frozen=True, slots=True, kw_only=True)
class Clash:
    """Another change of the same class is in force here: this one is ignored."""

    process: str
    change: CodeChange
    known: str


Action: TypeAlias = TellChanges | Adopt | Clash


class CodeLedger:
    """See the module."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        """The changes in force, by the old class, in the order in which they were learnt."""
        self._linked: dict[str, int] = {}
        self._heard: set[tuple[str, int]] = set()

    def has_heard(self, process: str, incarnation: int) -> bool:
        """Return whether this incarnation has reported all that it knew when it was linked."""
        return (process, incarnation) in self._heard

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Handle one event and return the actions. Raises `RemoteProtocolError` for too many changes."""
        del now_ns  # it waits for nothing
        match event:
            case LinkUp(process=process, incarnation=incarnation):
                self._linked[process] = incarnation
                return [
                    TellChanges(process=process, changes=tuple(CodeChange(*c) for c in self.kept.items()))
                ]
            case LinkDown(process=process, incarnation=incarnation):
                self._heard.discard((process, incarnation))
                if self._linked.get(process) == incarnation:
                    del self._linked[process]
                return []
            case KeptHere(change=change):
                return self._learn((change,), "")
            case ChangesReported(process=process, incarnation=incarnation, changes=changes):
                if self._linked.get(process) == incarnation:
                    self._heard.add((process, incarnation))
                return self._learn(changes, process)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert len(self.kept) <= CHANGES_MAX
        assert all(self._linked.get(process) == incarnation for process, incarnation in self._heard)

    def _learn(self, changes: tuple[CodeChange, ...], source: str) -> list[Action]:
        actions: list[Action] = []
        fresh: list[CodeChange] = []
        for change in changes:
            known = self.kept.get(change.old)
            if known is None:
                if len(self.kept) >= CHANGES_MAX:
                    raise RemoteProtocolError(f"{source} reports more than {CHANGES_MAX} changes of code")
                self.kept[change.old] = change.new
                fresh.append(change)
                actions.append(Adopt(change=change))
            elif known != change.new:
                actions.append(Clash(process=source, change=change, known=known))
        if fresh:
            news = tuple(fresh)
            actions += [TellChanges(process=p, changes=news) for p in self._linked if p != source]
        return actions


def _build_upgrade_ledger(_: Mapping[str, Any]) -> CodeLedger:
    return CodeLedger()


UPGRADE_LEDGER: MachineKind[Event, Action] = register(
    "upgrade-ledger",
    2,
    _build_upgrade_ledger,
    events=Event,
    actions=Action,
    states=(CodeLedger,),
)
"""The changes that one process knows to be in force; it has no configuration."""
