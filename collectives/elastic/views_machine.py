"""When a process with elastic groups enters the next view, and what its groups do about it. Sans-I/O.

A view is one of the whole job: it can be entered once every member asks for it. So a process asks for each
view that comes, whatever its groups are doing, and nobody who repairs an operation waits for those who are
busy elsewhere. Entering it replaces the memory of those who have gone. Hence:

- groups that have such a member are *cut* first: what they have under way ends, and the view is entered only
  once that has drained;
- groups of members who all stay go on as if nothing had happened, in the epoch that they are in;
- behind it a group that was cut, or one of whose ranks has come back, *follows*, also if nobody calls an
  operation of it: a replacement waits for all members of each of its groups. A process with one group leaves
  that to its next operation, which then finds what the dead had published for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from zbmd.actors.view import MemberId
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntered:
    """Group `group`, a number of this process, is in an epoch with these members, this process included.

    ranks: those that belong to it, whether they are there or not; empty: whoever is in the view.
    """

    group: int
    members: tuple[MemberId, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupClosed:
    """It takes part in nothing any more, and nothing of it is under way."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewReady:
    """A view may be entered. `kept`: of its members those whose memory stays as it is, this process included.

    epoch: its number; members: all of it.
    """

    epoch: int
    members: tuple[MemberId, ...]
    kept: tuple[MemberId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Nothing that was under way in this group when it was cut is so any more."""

    group: int


ViewsEvent: TypeAlias = GroupEntered | GroupClosed | ViewReady | Drained


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """End what is under way in this group; answer with `Drained`."""

    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """Enter the view that is ready, now."""

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow:
    """Have this group come to the view of `epoch`, once what is under way in it has ended."""

    group: int
    epoch: int


ViewsAction: TypeAlias = Cut | Enter | Follow


@dataclass(slots=True)
class _Group:
    members: frozenset[MemberId]
    ranks: frozenset[int]
    """That were members of it, or are to be."""
    cut: bool = False


class ViewsMachine:
    """The elastic groups of one process, and the view that comes next."""

    def __init__(self) -> None:
        self.epoch = 0
        self._groups: dict[int, _Group] = {}
        self._coming: ViewReady | None = None
        self._draining: dict[int, int] = {}
        """Groups to the cuts that they have not answered: one that had not come to an earlier view may come
        to that when it is cut, and is then cut again."""

    def handle(self, event: ViewsEvent, *, now_ns: int) -> list[ViewsAction]:
        """Take one event, return the actions to perform in order; see `zbmd.transport.machine.Machine`."""
        match event:
            case GroupEntered():
                return self._joined(event)
            case GroupClosed(group=group):
                self._groups.pop(group, None)
                self._draining.pop(group, None)
                return self._enter_if_drained()
            case ViewReady():
                if self._coming is not None or event.epoch <= self.epoch:
                    raise LocalProtocolError(f"view {event.epoch} cannot follow {self._coming or self.epoch}")
                self._coming = event
                cuts = [number for number, group in self._groups.items() if self._loses(group)]
                return [*(self._cut(number) for number in cuts), *self._enter_if_drained()]
            case Drained(group=group):
                left = self._draining.pop(group, 0) - 1
                if left > 0:
                    self._draining[group] = left
                return self._enter_if_drained()
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` on a state that no sequence of events may reach."""
        assert set(self._draining) <= set(self._groups), (self._draining, self._groups)
        assert self._coming is None or self._draining, "a view is ready, and nothing is waited for"

    def _joined(self, event: GroupEntered) -> list[ViewsAction]:
        ranks = {member.rank for member in event.members} | set(event.ranks)
        before = self._groups.get(event.group)
        if before is not None:
            ranks |= before.ranks
        group = self._groups[event.group] = _Group(frozenset(event.members), frozenset(ranks))
        # One that begins, or goes on, while a view without one of its members is about to be entered.
        return [self._cut(event.group)] if self._loses(group) else []

    def _loses(self, group: _Group) -> bool:
        return self._coming is not None and not group.members <= set(self._coming.kept)

    def _cut(self, number: int) -> Cut:
        self._groups[number].cut = True
        self._draining[number] = self._draining.get(number, 0) + 1
        return Cut(group=number)

    def _enter_if_drained(self) -> list[ViewsAction]:
        coming = self._coming
        if coming is None or self._draining:
            return []
        self._coming, self.epoch = None, coming.epoch
        actions: list[ViewsAction] = [Enter(epoch=coming.epoch)]
        if len(self._groups) > 1:
            actions += [
                Follow(group=number, epoch=coming.epoch)
                for number, group in self._groups.items()
                if group.cut or self._comes_back(group, coming)
            ]
        return actions

    def _comes_back(self, group: _Group, view: ViewReady) -> bool:
        """Whether a rank of it that was absent is in the view."""
        return any(m.rank in group.ranks and m not in group.members for m in view.members)


# ---- capture


def _build_views(config: Mapping[str, Any]) -> ViewsMachine:
    return ViewsMachine()


VIEWS: MachineKind[ViewsEvent, ViewsAction] = register(
    "elastic-views", 1, _build_views, events=ViewsEvent, actions=ViewsAction, states=(ViewsMachine,)
)
