"""The machines of one process, played up to a point without comparing: to ask them how they stand."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from zbmd.actors.cluster.heartbeats.detector import DETECTOR
from zbmd.actors.cluster.jobs.node_events import ViewActedOn
from zbmd.actors.cluster.jobs.node_machine import LOCAL_JOBS
from zbmd.actors.cluster.jobs.single_job import ONE_JOB
from zbmd.actors.cluster.membership.capture_kind import CLUSTER
from zbmd.actors.cluster.state.job_table import JobPhase
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.core import wire
from zbmd.actors.directory.machine import DIRECTORY
from zbmd.actors.replay.recording import ACTOR
from zbmd.actors.supervision.machine import SUPERVISION
from zbmd.actors.upgrade.coordinator import UPGRADE, UPGRADE_AGENT
from zbmd.actors.upgrade.ledger import UPGRADE_LEDGER
from zbmd.collectives.elastic.views_machine import VIEWS
from zbmd.collectives.group.operation_log import OPERATIONS, OperationBegan, OperationEnded
from zbmd.collectives.p2p.elastic_machine import ELASTIC_TAGS
from zbmd.collectives.repair.machine import REPAIR
from zbmd.tools.replay.story import body_text, envelope_of
from zbmd.training.pipeline.stage import STAGE
from zbmd.training.redundancy.coded.machine import CODED_MIRROR
from zbmd.training.redundancy.machine import MIRROR, Mirror
from zbmd.training.redundancy.resizing import RESIZING_MIRROR, ResizingMirror
from zbmd.training.torch.transaction import TRANSACTION
from zbmd.training.zero.machine import ZERO_STEP
from zbmd.transport.capture import (
    CaptureDamaged,
    CaptureMismatch,
    Entry,
    Filter,
    ProcessLog,
    Record,
    describe,
)
from zbmd.transport.capture.records import (
    EndRecord,
    EventTaken,
    FrameIn,
    FrameOut,
    Mark,
    StateTaken,
    StreamDeclared,
)
from zbmd.transport.capture.registry import LINK, MachineKind, find
from zbmd.transport.errors import ZbmdError
from zbmd.transport.handshake.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.handshake.driver import HELLO

# Importing these modules registers every kind of machine of every layer.

__all__ = [
    "ACTOR",
    "CLUSTER",
    "CODED_MIRROR",
    "DETECTOR",
    "DIRECTORY",
    "ELASTIC_TAGS",
    "HELLO",
    "LOCAL_JOBS",
    "MIRROR",
    "ONE_JOB",
    "OPERATIONS",
    "REPAIR",
    "RESIZING_MIRROR",
    "STAGE",
    "SUPERVISION",
    "TRANSACTION",
    "UPGRADE",
    "UPGRADE_AGENT",
    "UPGRADE_LEDGER",
    "VIEWS",
    "ZERO_STEP",
    "secrets_for",
]


def secrets_for(cookie: Path | None) -> dict[str, bytes]:
    """Return what a replay needs and no log holds: the cookie in this file, or in its usual place.

    Raises `CookieError` if a file that was named cannot be used.
    """
    path = cookie_path() if cookie is None else cookie
    return {"cookie": load_or_create_cookie(path)} if cookie is not None or path.exists() else {}


ASKS_KEPT_MAX = 65_536

_config = msgspec.msgpack.Decoder(dict[str, Any])


@dataclass(slots=True)
class Played:
    """One machine at the end. changed_ns: when its state changed last, ns since 1970."""

    kind: str
    name: str
    machine: Any
    codec: MachineKind[Any, Any]
    taken: int = 0
    changed_ns: int = 0
    ended: bool = False
    begun: int = 0
    """Of a group's operations: the last one that was begun."""
    done: int = 0
    """And the last that ended."""
    stopped_ns: int | None = None
    """Of the job of a host alone: when it was asked to stop."""


@dataclass(frozen=True, slots=True)
class OpenAsk:
    """A question that no answer has come to; given up at `deadline_ns`."""

    at_ns: int
    deadline_ns: int
    to: str
    text: str


@dataclass(slots=True)
class ProcessAtEnd:
    """A process at the end of its log, or at the time asked for. Times: ns since 1970."""

    process: str
    incarnation: int
    machines: list[Played] = field(default_factory=list[Played])
    asks: dict[tuple[str, int], OpenAsk] = field(default_factory=dict[tuple[str, int], OpenAsk])
    """By peer and call number."""
    owed: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Arrival times of open asks, by peer and call number."""
    step: int | None = None
    last_ns: int = 0
    last: str = ""
    """Its last record, in words."""
    moved_ns: int = 0
    """When a machine took an event last, or a step was begun."""


def play_to_end(
    log: ProcessLog, *, offset_ns: int, until_ns: int | None, secrets: Mapping[str, bytes]
) -> ProcessAtEnd:
    """Play all machines of a log that can be built, up to `until_ns`, or to its end or damage.

    offset_ns: how far the process's wall clock is ahead of the reference clock.
    """
    player = _Player(log, offset_ns, secrets)
    own_until_ns = None if until_ns is None else until_ns + offset_ns
    wanted = Filter(until_ns=own_until_ns)
    try:
        for entry in log.entries():
            if not wanted.takes(entry):
                break
            player.take(entry)
    except CaptureDamaged:
        pass  # how it stands is known up to there; the verdicts tell of the damage
    player.finish()
    return player.end


def _standing(machine: object) -> object:
    """Return a check whether an event changed more than what a machine has heard; None if there is none."""
    mirror = machine.mirror if isinstance(machine, ResizingMirror) else machine
    return (mirror.state, mirror.version) if isinstance(mirror, Mirror) else None


def _stopping(view: ClusterView) -> bool:
    """Whether a host alone is to stop its job."""
    return len(view.nodes) == 1 and any(job.phase is JobPhase.STOPPING for job in view.jobs.jobs)


class _Player:
    def __init__(self, log: ProcessLog, offset_ns: int, secrets: Mapping[str, bytes]) -> None:
        self.end = ProcessAtEnd(process=log.origin.process, incarnation=log.origin.incarnation)
        self._offset_ns = offset_ns
        self._secrets = secrets
        self._by_stream: dict[int, Played] = {}
        self._await_state: dict[int, Played] = {}
        """Machines whose beginning is not in the log: they are played from their first state that is."""
        self._peers: dict[int, str] = {}
        self._last: Record | None = None

    def finish(self) -> None:
        """There are no more records."""
        if self._last is not None:
            self.end.last = describe(self._last)

    def take(self, entry: Entry) -> None:
        """Take the next record."""
        record, at_ns = entry.record, entry.wall_ns - self._offset_ns
        self.end.last_ns = max(self.end.last_ns, at_ns)
        self._last = record
        match record:
            case StreamDeclared():
                self._declare(record)
            case EventTaken():
                self._event(record, at_ns)
            case StateTaken():
                self._restore(record)
            case Mark(step=step):
                self.end.step = step
                self.end.moved_ns = max(self.end.moved_ns, at_ns)
            case FrameIn() | FrameOut():
                self._frame(record, at_ns)
            case EndRecord():
                self._ended(record.stream)
            case _:
                pass

    def _declare(self, record: StreamDeclared) -> None:
        if {record.stream} & (self._by_stream.keys() | self._await_state.keys() | self._peers.keys()):
            return  # declared again in a later segment
        if record.machine == LINK:
            self._peers[record.stream] = record.name.rpartition("#")[0]
            return
        try:
            kind = find(record.machine, record.version)
            secrets = {name: self._secrets[name] for name in kind.secrets}
            machine = kind.build({**_config.decode(record.config), **secrets})
        except (ZbmdError, ValueError, TypeError, KeyError, RecursionError):
            return  # the verdicts say why it cannot be played
        played = Played(record.machine, record.name, machine, kind)
        if record.continued:
            self._await_state[record.stream] = played
        else:
            self._play(record.stream, played)

    def _play(self, stream: int, played: Played) -> None:
        self._by_stream[stream] = played
        self.end.machines.append(played)

    def _restore(self, record: StateTaken) -> None:
        played = self._await_state.pop(record.stream, None)
        if played is None:
            return
        states = played.codec.states
        if states is None or states.fingerprint != record.fingerprint:
            return
        with contextlib.suppress(CaptureMismatch):  # the verdicts say so
            states.restore(played.machine, record.state)
            self._play(record.stream, played)

    def _event(self, record: EventTaken, at_ns: int) -> None:
        played = self._by_stream.get(record.stream)
        if played is None:
            return
        stood = _standing(played.machine)
        try:
            event = played.codec.events.decode(record.tag, record.fields)
            played.machine.handle(event, now_ns=record.at_ns)
        except Exception:  # noqa: BLE001 (it raised when it was recorded, or it diverges: the verdicts tell)
            return
        played.taken += 1
        if stood is None or stood != _standing(played.machine):
            played.changed_ns = at_ns
        self.end.moved_ns = max(self.end.moved_ns, at_ns)
        if isinstance(event, OperationBegan):
            played.begun = event.sequence
        if isinstance(event, OperationEnded):
            played.done = event.sequence
        if isinstance(event, ViewActedOn) and played.stopped_ns is None and _stopping(event.view):
            played.stopped_ns = at_ns

    def _frame(self, record: FrameIn | FrameOut, at_ns: int) -> None:
        peer = self._peers.get(record.stream)
        envelope = None if peer is None else envelope_of(record)
        if peer is None or envelope is None:
            return
        match envelope:
            case wire.Ask() if isinstance(record, FrameOut) and len(self.end.asks) < ASKS_KEPT_MAX:
                ask = OpenAsk(at_ns, at_ns + envelope.timeout_ns, envelope.to, body_text(envelope.body))
                self.end.asks[peer, envelope.call] = ask
            case wire.Spawn() if isinstance(record, FrameOut) and len(self.end.asks) < ASKS_KEPT_MAX:
                what = f"a spawn of {envelope.class_id}"
                ask = OpenAsk(at_ns, at_ns + envelope.timeout_ns, envelope.name, what)
                self.end.asks[peer, envelope.call] = ask
            case wire.Ask() | wire.Spawn() if len(self.end.owed) < ASKS_KEPT_MAX:
                self.end.owed[peer, envelope.call] = at_ns
            case wire.Reply() | wire.Fail():
                done = self.end.asks if isinstance(record, FrameIn) else self.end.owed
                done.pop((peer, envelope.call), None)
            case _:
                pass

    def _ended(self, stream: int) -> None:
        played = self._by_stream.get(stream)
        if played is not None:
            played.ended = True
        peer = self._peers.get(stream)
        if peer is not None:
            for key in [key for key in self.end.asks if key[0] == peer]:
                del self.end.asks[key]  # what was asked over a link ends with it
