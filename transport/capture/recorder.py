"""The recorder of one process, with a cheap append for every input.

What is recorded must not change afterwards: events and actions are frozen and are encoded at once; a frame
is kept by reference if its bytes are immutable, and copied if they are not. A recorder is used from one
thread, that of the process's event loop.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from zbmd.transport.capture.codec import UnionCodec, encode
from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.capture.format import Anchor, Origin
from zbmd.transport.capture.native._recording import RECORD_WEIGHT_BYTES as RECORD_WEIGHT_BYTES
from zbmd.transport.capture.native._recording import Taking
from zbmd.transport.capture.records import PROCESS_STREAM, RawRecord, RecordType
from zbmd.transport.capture.registry import LINK, ActionT, EventT, MachineKind
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.identity import Identity

STREAMS_OPEN_MAX = 65_536
BULK_WHOLE_BYTES_MAX = 1 << 20
"""A larger bulk payload is recorded by its digest, also where whole ones are asked for."""
TEXT_CHARS_MAX = 4096

_EVENT, _ACTIONS, _RAISED, _MARK = (
    int(RecordType.EVENT),
    int(RecordType.ACTIONS),
    int(RecordType.RAISED),
    int(RecordType.MARK),
)
_STREAM, _END, _LOST, _NOTE = (
    int(RecordType.STREAM),
    int(RecordType.END),
    int(RecordType.LOST),
    int(RecordType.NOTE),
)
_STATE = int(RecordType.STATE)
_NIL = msgspec.Raw(b"\xc0")
NEVER = 1 << 62


class Detail(Enum):
    """The detail in which something is recorded."""

    DIGEST = "digest"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The clocks of a process: monotonic ns, ns since 1970, and the hybrid clock that its links share."""

    monotonic_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns
    hybrid: HybridClock

    def anchor(self) -> Anchor:
        """Both clocks, read together."""
        before_ns = self.monotonic_ns()
        wall_ns = self.wall_ns()
        return Anchor(wall_ns=wall_ns, monotonic_ns=(before_ns + self.monotonic_ns()) // 2)


def origin_of(identity: Identity, *, hosts: Sequence[str] = ()) -> Origin:
    """The origin of a log from what its process says at hello."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return Origin(
        process=identity.name,
        incarnation=identity.incarnation,
        job=identity.job,
        pid=identity.pid,
        boot_id=boot_id.read_text().strip() if boot_id.exists() else "",
        hosts=tuple(hosts) or (os.uname().nodename,),
        contracts=identity.contracts,
    )


class Recorder(Taking, ABC):
    """Takes the inputs of one process incarnation. See `LogRecorder` and `RingRecorder`.

    bulk: whether `bulk` keeps payloads or their digests; actions: the same of what machines answer.
    """

    def __init__(
        self,
        origin: Origin,
        clocks: Clocks,
        *,
        bulk: Detail = Detail.DIGEST,
        actions: Detail = Detail.WHOLE,
    ) -> None:
        super().__init__(clocks.monotonic_ns, _discard)
        self.origin = origin
        self.clocks = clocks
        self._bulk = bulk
        self._actions = actions
        self.stretch = 0
        """Grows when older records may be gone before those that come now. A machine's state is recorded
        before its first event in each stretch: it can be replayed from there when what was before is gone."""
        self._streams: dict[int, RawRecord] = {}
        self._last_stream = PROCESS_STREAM
        _recorders.add(self)

    @property
    def keeps_digests(self) -> bool:
        """Whether what machines answer is recorded by its digest."""
        return self._actions is Detail.DIGEST

    @abstractmethod
    def _make_room(self, weight: int) -> bool:
        """Decide whether a record of `weight`, which is counted already, is taken; set the next alarm."""

    # ---- streams

    def declare_machine(self, kind: MachineKind[Any, Any], name: str, config: Mapping[str, Any]) -> int:
        """Declare a machine's stream and return its number; secrets in `config` are left out."""
        public = {key: value for key, value in config.items() if key not in kind.secrets}
        return self._declare(name, kind.name, kind.version, kind.fingerprint, public)

    def link(self, peer: str, incarnation: int) -> int:
        """Declare a link's stream and return its number."""
        config = {"peer": peer, "incarnation": incarnation}
        return self._declare(f"{peer}#{incarnation}", LINK, 0, "", config)

    def end_stream(self, stream: int, reason: str) -> None:
        """The machine or link of this stream is no more."""
        self._streams.pop(stream, None)
        self._take((_END, stream, self.now_ns(), self._stamp(), reason[:TEXT_CHARS_MAX]))

    def _declare(self, name: str, machine: str, version: int, fingerprint: str, config: object) -> int:
        """As with all that is recorded, what does not work costs the log a record, and the job nothing."""
        if len(self._streams) >= STREAMS_OPEN_MAX:
            self.lost(1, f"{STREAMS_OPEN_MAX} streams are open; {name} is not recorded")
            return PROCESS_STREAM
        self._last_stream += 1
        stream = self._last_stream
        try:
            packed = msgspec.Raw(encode(config))
        except CaptureMismatch as error:
            self.lost(1, f"the configuration of {name}: {error}")
            return PROCESS_STREAM
        record = (
            _STREAM,
            stream,
            self.now_ns(),
            self._stamp(),
            name,
            machine,
            version,
            fingerprint,
            packed,
            False,
        )
        self._streams[stream] = record
        self._take(record, len(packed))
        return stream

    # ---- machines

    def state(self, stream: int, kind: MachineKind[Any, Any], machine: object, now_ns: int) -> None:
        """Record a machine's state before its next event. A replay may begin there."""
        if kind.states is None or stream == PROCESS_STREAM:
            return
        try:
            state = kind.states.encode(machine)
        except CaptureMismatch as error:
            self.note(str(error), stream=stream)
            return
        self.encoded_state(stream, kind.states.fingerprint, state, now_ns)

    def encoded_state(self, stream: int, fingerprint: str, state: bytes, now_ns: int) -> None:
        """As `state`, by what `StateCodec.encode` made of the machine."""
        record = (_STATE, stream, now_ns, self._stamp(), fingerprint, msgspec.Raw(state))
        self._take(record, len(state))

    def event(self, stream: int, codec: UnionCodec[EventT], event: EventT, now_ns: int) -> None:
        """Record an event that is given to a machine."""
        try:
            tag, fields = codec.tag(event), codec.encode(event)
        except CaptureMismatch as error:
            self.lost(1, str(error))
            return
        self._take((_EVENT, stream, now_ns, self._stamp(), tag, msgspec.Raw(fields)), len(fields))

    def acted(self, stream: int, codec: UnionCodec[ActionT], actions: Sequence[ActionT], now_ns: int) -> None:
        """Record the actions that a machine returned."""
        try:
            encoded = codec.encode_all(actions)
        except CaptureMismatch as error:
            self.lost(1, str(error))
            return
        hlc = self.clocks.hybrid.last
        if self._actions is Detail.DIGEST:
            digest = xxhash.xxh3_128_digest(encoded)
            self._take((_ACTIONS, stream, now_ns, hlc, len(actions), digest, _NIL))
        else:
            whole = msgspec.Raw(encoded)
            self._take((_ACTIONS, stream, now_ns, hlc, len(actions), b"", whole), len(encoded))

    def raised(self, stream: int, where: str, error: BaseException, now_ns: int) -> None:
        """Record that a machine raised an error."""
        text = str(error)[:TEXT_CHARS_MAX]
        self._take((_RAISED, stream, now_ns, self._stamp(), where, type(error).__name__, text), len(text))

    # ---- other inputs

    def timer(self, name: str, due_ns: int, *, stream: int = PROCESS_STREAM) -> None:
        """Record that a driver's timer, set for monotonic `due_ns`, fired."""
        self._take(
            (int(RecordType.TIMER), stream, self.now_ns(), self._stamp(), name[:TEXT_CHARS_MAX], due_ns)
        )

    def death(self, process: str, incarnation: int, *, clean: bool, reason: str) -> None:
        """Record that the end of another process was noticed."""
        what = (process, incarnation, clean, reason[:TEXT_CHARS_MAX])
        self._take((int(RecordType.DEATH), PROCESS_STREAM, self.now_ns(), self._stamp(), *what))

    def seed(self, name: str, value: bytes) -> None:
        """Record a random value that was drawn."""
        self._take(
            (int(RecordType.SEED), PROCESS_STREAM, self.now_ns(), self._stamp(), name, value), len(value)
        )

    def clock(self, wall_ns: int) -> None:
        """Record a reading of the wall clock on which something depends."""
        self._take((int(RecordType.CLOCK), PROCESS_STREAM, self.now_ns(), self._stamp(), wall_ns))

    def note(self, text: str, *, stream: int = PROCESS_STREAM) -> None:
        """Record a remark."""
        text = text[:TEXT_CHARS_MAX]
        self._take((_NOTE, stream, self.now_ns(), self._stamp(), text), len(text))

    def bulk(self, stream: int, name: str, payload: bytes | bytearray | memoryview) -> None:
        """A bulk payload came in: C-contiguous bytes. Hashed, or copied, before this returns."""
        nbytes = memoryview(payload).nbytes
        whole = self._bulk is Detail.WHOLE and nbytes <= BULK_WHOLE_BYTES_MAX
        data = bytes(payload) if whole else None
        what = (name, nbytes, xxhash.xxh3_128_digest(payload), data)
        self._take(
            (int(RecordType.BULK), stream, self.now_ns(), self._stamp(), *what), nbytes if whole else 0
        )

    def mark(self, stream: int, step: int) -> None:
        """Record that a step begins."""
        self._take((_MARK, stream, self.now_ns(), self._stamp(), step))

    def lost(self, records: int, reason: str) -> None:
        """Records are missing here: the log says so, and a replay ends here."""
        text = reason[:TEXT_CHARS_MAX]
        self._take((_LOST, PROCESS_STREAM, self.now_ns(), self._stamp(), records, text), len(text))

    # ---- the end

    @abstractmethod
    def close(self, reason: str = "closed") -> None:
        """End the recording; what comes later is ignored. May be called twice."""

    def _off(self) -> None:
        """Ignore what comes from now on."""
        self._append = _discard
        self._break_run()
        self._packs = False
        self._alarm_bytes = NEVER

    @abstractmethod
    def _hold_files(self) -> None:
        """Keep the open files as they are until `_release_files`: a fork is under way."""

    @abstractmethod
    def _release_files(self) -> None:
        """The fork is done, in the parent."""

    @abstractmethod
    def _forget(self) -> None:
        """Give up, in a forked child, all that belongs to the parent."""

    def _stamp(self) -> int:
        return self.clocks.hybrid.tick(self.clocks.wall_ns())


def _discard(record: RawRecord) -> None:
    del record


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_held: list[Recorder] = []


def _before_fork() -> None:
    _held[:] = list(_recorders)
    for recorder in _held:
        recorder._hold_files()


def _after_fork_in_parent() -> None:
    while _held:
        _held.pop()._release_files()


def _after_fork_in_child() -> None:
    """A log belongs to one process: the child's copy of the recorder records nothing."""
    while _held:
        recorder = _held.pop()
        recorder._off()
        recorder._forget()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
