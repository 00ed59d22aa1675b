"""The machine of one host in a checkpoint of several: writes its part, and publishes once it finds them all.

    WRITING the part ──durable──▶ LOOKING for the others' ──all found──▶ PUBLISHING ──▶ ENDED
                                     ▲───────────another try──────────────┘

The hosts know nothing of each other but what lies in the storage that they share. The one that writes its
part last finds all others, and publishes at once; others look on for a while, in case that one is lost before
it does, and to learn that it has. Nobody removes anything: a host that leaves does not know what the others
do, and the checkpoint may become whole without it. The next one that is published removes what this one left.

A newer checkpoint of the same host supersedes this one, as does the end of the job: it looks once more, and
leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias, assert_never

from zbmd.training.checkpoint.saving import BACK_OFF_NS, BACK_OFF_NS_MAX, HURRIED_TRIES, TRIES
from zbmd.transport.errors import LocalProtocolError

LOOK_NS: Final = 50_000_000
"""Between the first two looks; each next interval is twice as long,"""
LOOK_NS_MAX: Final = 2_000_000_000
"""up to this."""
LOOKING_NS_MAX: Final = 30_000_000_000
"""After its part is durable, a host looks for others' for so long. One that is slower publishes itself."""


class Task(Enum):
    """The next thing to do."""

    PUT_PART = "write the part of this host"
    LOOK = "look which parts are in the storage"
    PUBLISH = "write the index of the whole"


class Sight(Enum):
    """The result of a look."""

    MISSING = "a part is absent"
    WHOLE = "all parts are there, and no index"
    PUBLISHED = "the index is there"
    OVERTAKEN = "a later checkpoint was published meanwhile"


# ---- events


@dataclass(frozen=True, slots=True)
class Done:
    """The task is done: the part, or the index, is durable."""

    task: Task


@dataclass(frozen=True, slots=True)
class Seen:
    """A look has ended."""

    sight: Sight


@dataclass(frozen=True, slots=True)
class Failed:
    """A task could not be done; others may have done it, or a part of it may be there nevertheless."""

    task: Task
    reason: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """The ranks of this host have asked for a newer checkpoint, which waits, or the job is over."""


@dataclass(frozen=True, slots=True)
class Hurry:
    """The ranks wait for this checkpoint."""


Event: TypeAlias = Done | Seen | Failed | Superseded | Hurry

# ---- actions


@dataclass(frozen=True, slots=True)
class Do:
    """Do a task at `at_ns`, in the place of one that has not begun."""

    task: Task
    at_ns: int


@dataclass(frozen=True, slots=True)
class TellPart:
    """Tell the ranks that their shards are durable: their votes decide what they can without this host."""


@dataclass(frozen=True, slots=True)
class TellPublished:
    """Tell the ranks that the checkpoint is published."""


@dataclass(frozen=True, slots=True)
class TellFailure:
    """Tell one rank why the checkpoint could not be written; once. It is tried again, unless `gave_up`."""

    reason: str
    gave_up: bool


Action: TypeAlias = Do | TellPart | TellPublished | TellFailure


class State(Enum):
    """The state of the machine."""

    WRITING = "writing"
    LOOKING = "looking"
    PUBLISHING = "publishing"
    ENDED = "ended"


class Gathering:
    """See the module. Its driver does one task at a time."""

    def __init__(self) -> None:
        self.state = State.WRITING
        self.is_published = False
        self._tries, self._left = 0, TRIES
        """Failures of the part or of the index one after the other, and how many more there may be."""
        self._look_ns, self._until_ns = LOOK_NS, 0
        self._superseded = self._hurried = self._has_failed = False

    def begin(self, *, now_ns: int) -> list[Action]:
        """Return the first task: all shards of this host are durable."""
        return [Do(Task.PUT_PART, now_ns)]

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Return what is to be done, in this order; nothing after the end."""
        if self.state is State.ENDED:
            return []
        actions = self._handle(event, now_ns)
        self.check_invariants()
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        assert 0 <= self._left <= TRIES and self._look_ns <= LOOK_NS_MAX, "tries and intervals are bounded"
        assert (self._until_ns > 0) == (self.state in (State.LOOKING, State.PUBLISHING)), "looks have an end"
        assert not self.is_published or self.state is State.ENDED, "it goes on after the publication"

    @property
    def task(self) -> Task | None:
        """The task under way; None after the end."""
        tasks = {State.WRITING: Task.PUT_PART, State.LOOKING: Task.LOOK, State.PUBLISHING: Task.PUBLISH}
        return tasks.get(self.state)

    def _handle(self, event: Event, now_ns: int) -> list[Action]:
        match event:
            case Done(task=task) | Failed(task=task) if task is not self.task:
                raise LocalProtocolError(f"{task.name} has ended: {self.task} is under way")
            case Done(task=Task.PUT_PART):
                self._until_ns = now_ns + LOOKING_NS_MAX
                return [TellPart(), *self._look(now_ns)]
            case Done():
                return self._published()
            case Failed(reason=reason):
                return self._failed(reason, now_ns)
            case Seen(sight=sight):
                return self._seen(sight, now_ns)
            case Superseded():
                self._superseded, self._left = True, min(self._left, HURRIED_TRIES)
                return self._at_once(now_ns)
            case Hurry():
                if self._hurried:
                    return []
                self._hurried, self._left = True, min(self._left, HURRIED_TRIES)
                self._look_ns = LOOK_NS
                return self._at_once(now_ns)
            case _:
                assert_never(event)

    def _seen(self, sight: Sight, now_ns: int) -> list[Action]:
        if self.state is not State.LOOKING:
            raise LocalProtocolError(f"a look has ended: {self.task} is under way")
        match sight:
            case Sight.PUBLISHED:
                return self._published()
            case Sight.OVERTAKEN:
                return self._end()
            case Sight.WHOLE:
                self.state = State.PUBLISHING
                return [Do(Task.PUBLISH, now_ns)]
            case Sight.MISSING:
                return self._look_later(now_ns)
            case _:
                assert_never(sight)

    def _failed(self, reason: str, now_ns: int) -> list[Action]:
        told: list[Action] = [] if self._has_failed else [TellFailure(reason, gave_up=False)]
        self._has_failed = True
        if self.state is State.LOOKING:  # a storage that answers nothing is looked at no oftener
            return [*told, *self._look_later(now_ns)]
        self._tries, self._left = self._tries + 1, self._left - 1
        wait_ns = 0 if self._hurried else min(BACK_OFF_NS << self._tries - 1, BACK_OFF_NS_MAX)
        if self.state is State.WRITING:
            if self._left <= 0:
                # Maybe it is there: a store can lose the answer to a write that it has done.
                return [TellFailure(reason, gave_up=True), *self._end()]
            return [*told, Do(Task.PUT_PART, now_ns + wait_ns)]
        if self._left <= 0 or now_ns + wait_ns >= self._until_ns:
            return [*told, *self._end()]
        self.state = State.LOOKING  # another host may have published it, or a later one
        return [*told, Do(Task.LOOK, now_ns + wait_ns)]

    def _look_later(self, now_ns: int) -> list[Action]:
        if self._superseded or now_ns + self._look_ns > self._until_ns:
            return self._end()
        at_ns = now_ns + self._look_ns
        self._look_ns = min(2 * self._look_ns, LOOK_NS_MAX)
        return [Do(Task.LOOK, at_ns)]

    def _look(self, now_ns: int) -> list[Action]:
        self.state, self._tries = State.LOOKING, 0
        self._left = HURRIED_TRIES if self._hurried or self._superseded else TRIES
        return [Do(Task.LOOK, now_ns)]

    def _at_once(self, now_ns: int) -> list[Action]:
        assert self.task is not None, "checked by the caller"
        return [Do(self.task, now_ns)]

    def _published(self) -> list[Action]:
        self.is_published = True
        return [TellPublished(), *self._end()]

    def _end(self) -> list[Action]:
        self.state, self._until_ns = State.ENDED, 0
        return []
