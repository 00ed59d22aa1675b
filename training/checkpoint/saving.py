"""The machine of one rank's checkpoints: what is written, retried, published and given up.

All ranks begin a checkpoint between the same two steps and learn from each step's votes how far the others
have come (`Report`), so they agree on what is under way without an exchange of their own:

    begun -> copied and written on each rank -> all have written: the first one publishes -> it has published

A write that fails is tried again, with more time between tries. If one rank gives up, all drop that
checkpoint: the last published one stays, and the next one that is due is a new attempt. A checkpoint that is
due while another one is under way follows that. A new view drops what is under way, and survivors ask for
another one.

Where snapshot processes hold the state of all ranks, these write in their place (`held`). A process runs
this machine too, for itself, with the reports of all shards that it has written, and publishes, alone or with
those of other hosts (`Apart`). The ranks wait for its end. If one of them loses its process, all drop the
checkpoint and ask for another one, which they write themselves unless there is a new process by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

TRIES: Final = 6
HURRIED_TRIES: Final = 2
"""After `Hurry`: the ranks wait for the checkpoint."""
BACK_OFF_NS: Final = 250_000_000
BACK_OFF_NS_MAX: Final = 8_000_000_000


class Progress(IntEnum):
    """The state of one rank's part in the checkpoint under way."""

    UNDER_WAY = 0
    NO_SHARD = 1
    WROTE = 2
    PUBLISHED = 3
    GAVE_UP = 4
    LOST = 5
    """The writer for this rank is lost, and with it what it had copied."""


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's part in a vote. header: the digest of its shard's header, 0 if it has written none."""

    progress: Progress = Progress.UNDER_WAY
    header: int = 0


# ---- events


@dataclass(frozen=True, slots=True)
class Reached:
    """All ranks hold `version`, between two steps. due: whether a checkpoint of it is to be written."""

    version: int
    due: bool


@dataclass(frozen=True, slots=True)
class Wrote:
    """The shard is durable, or there is nothing to write (`has` is false)."""

    version: int
    has: bool
    header: int


@dataclass(frozen=True, slots=True)
class Published:
    """The index is durable."""

    version: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The shard or the index could not be written.

    final: another try would fail as well. retried: a snapshot process tries again by itself.
    """

    version: int
    reason: str
    final: bool = False
    retried: bool = False


@dataclass(frozen=True, slots=True)
class Apart:
    """Snapshot processes of several hosts write the checkpoint under way: it may become whole without ranks.

    Its files stay, also if the ranks drop it, until a later one is published.
    """

    version: int


@dataclass(frozen=True, slots=True)
class WriterLost:
    """The snapshot process that was to write the checkpoint under way is lost, or does not do it."""

    version: int


@dataclass(frozen=True, slots=True)
class Voted:
    """All ranks have voted, in their order, after the checkpoint under way was begun."""

    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True)
class Hurry:
    """The ranks wait for the checkpoint under way."""


@dataclass(frozen=True, slots=True)
class NewView:
    """The ranks have changed. first: whether this one publishes."""

    first: bool


@dataclass(frozen=True, slots=True)
class FoundDamaged:
    """A published shard of this rank has other bytes than were written."""

    version: int
    reason: str


Event = Reached | Wrote | Published | Failed | Apart | WriterLost | Voted | Hurry | NewView | FoundDamaged


# ---- actions


@dataclass(frozen=True, slots=True)
class Stage:
    """Copy the state, and write the copy."""

    version: int


@dataclass(frozen=True, slots=True)
class Write:
    """Write the copy again, at `at_ns` or once the machine is hurried."""

    version: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Write the index. headers: of the ranks that have a shard, (rank, digest)."""

    version: int
    headers: tuple[tuple[int, int], ...]
    at_ns: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove the files of a checkpoint that was dropped."""

    version: int


@dataclass(frozen=True, slots=True)
class TellFailure:
    """Report that writing fails; once until it succeeds again."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class TellSuccess:
    """Report that a checkpoint is written again, after a failure that was reported."""

    version: int


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Read a sample of this rank's shard back. header: its digest."""

    version: int
    header: int


@dataclass(frozen=True, slots=True)
class TellDamage:
    """Report that a published checkpoint is damaged."""

    version: int
    reason: str


Action = Stage | Write | Publish | Remove | TellFailure | TellSuccess | Rehearse | TellDamage


class Saving:
    """See the module."""

    def __init__(self) -> None:
        self.first = False
        self.pending: int | None = None
        """The version of the checkpoint under way."""
        self.published: int | None = None
        """The last version whose checkpoint is published, as far as this rank knows."""
        self.asks = False
        """Whether this rank asks all for a checkpoint, in the place of one that was dropped."""
        self.lost = False
        """Whether the last checkpoint was dropped because a snapshot process was lost; on all ranks alike."""
        self.report = Report()
        self._late = self._has_failed = self._hurried = self._apart = False
        self._tries = self._left = 0
        self._headers: tuple[tuple[int, int], ...] | None = None
        """Of the checkpoint that this rank publishes; None: not yet."""

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Return what is to be done, in this order. Events of a checkpoint that was dropped are ignored."""
        match event:
            case Reached():
                return self._reached(event)
            case Wrote(version=version) | Published(version=version) | Failed(version=version):
                return self._ended(event, now_ns) if version == self.pending else []
            case Apart(version=version):
                self._apart = version == self.pending
                return []
            case WriterLost(version=version):
                if version == self.pending and self.report.progress is not Progress.PUBLISHED:
                    self.report = Report(Progress.LOST)
                return []
            case Voted(reports=reports):
                return self._voted(reports, now_ns) if self.pending is not None else []
            case Hurry():
                if not self._hurried:
                    self._hurried, self._left = True, HURRIED_TRIES
                return []
            case FoundDamaged(version=version, reason=reason):
                self.asks = True
                return [TellDamage(version, reason)]
            case NewView(first=first):
                self.first, self._late = first, False
                self.asks = self.asks or self.pending is not None
                return self._drop()

    def _reached(self, event: Reached) -> list[Action]:
        if not (event.due or self._late):
            return []
        if self.pending is not None:
            self._late = True  # on all ranks alike: they know the same of the one under way
            return []
        self.pending, self.report = event.version, Report()
        self._late = self.asks = self.lost = self._hurried = False
        self._tries, self._left, self._headers = 0, TRIES, None
        return [Stage(event.version)]

    def _ended(self, event: Wrote | Published | Failed, now_ns: int) -> list[Action]:
        match event:
            case Wrote(has=has, header=header):
                self.report = Report(Progress.WROTE if has else Progress.NO_SHARD, header)
                self._tries = 0  # those of the index are counted anew
                return []
            case Published():
                self.report = Report(Progress.PUBLISHED, self.report.header)
                return []
            case Failed(version=version, reason=reason, final=final, retried=retried):
                told: list[Action] = [] if self._has_failed else [TellFailure(version, reason)]
                self._has_failed = True
                if retried:
                    return told
                self._tries, self._left = self._tries + 1, self._left - 1
                if final or self._left <= 0:
                    self.report = Report(Progress.GAVE_UP)
                    return told
                wait_ns = min(BACK_OFF_NS << self._tries - 1, BACK_OFF_NS_MAX)
                at_ns = now_ns if self._hurried else now_ns + wait_ns
                if self._headers is None:
                    return [*told, Write(version, at_ns)]
                return [*told, Publish(version, self._headers, at_ns)]

    def _voted(self, reports: Sequence[Report], now_ns: int) -> list[Action]:
        version = self.pending
        assert version is not None, "checked by the caller"
        removed: list[Action] = [Remove(version)] if self.first and not self._apart else []
        if any(each.progress is Progress.PUBLISHED for each in reports):  # whoever else has failed or is lost
            self.published = version
            told, self._has_failed, header = self._has_failed, False, self.report.header
            actions: list[Action] = [TellSuccess(version)] if told else []
            return [*self._drop(), *actions, *([Rehearse(version, header)] if header else [])]
        if any(each.progress is Progress.GAVE_UP for each in reports):
            return [*self._drop(), *removed]
        if any(each.progress is Progress.LOST for each in reports):
            self.asks = self.lost = True
            return [*self._drop(), *removed]
        wrote = all(each.progress in (Progress.WROTE, Progress.NO_SHARD) for each in reports)
        if not (wrote and self.first and self._headers is None):
            return []
        self._headers = tuple(
            (rank, each.header) for rank, each in enumerate(reports) if each.progress is Progress.WROTE
        )
        self._left = HURRIED_TRIES if self._hurried else TRIES
        return [Publish(version, self._headers, now_ns)]

    def _drop(self) -> list[Action]:
        self.pending, self.report, self._headers = None, Report(), None
        self._hurried = self._apart = False
        return []
