"""Taps: a machine whose events and actions are recorded on the way in and out.

`Tap` is for a machine that runs on its recorder's thread, `ThreadTap` for one that runs on another thread: it
answers at once, and hands frozen events and actions over, in order, to the thread that records them. A replay
cannot tell the two apart.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic

from zbmd.transport.capture.codec import UnionCodec
from zbmd.transport.capture.errors import CaptureMismatch
from zbmd.transport.capture.recorder import Recorder
from zbmd.transport.capture.registry import ActionT, EventT, MachineKind
from zbmd.transport.machine import Machine

WAITING_MAX: Final = 65_536
"""Records handed over and not yet taken; what comes beyond them, from a loop that stands still, is lost."""


class Tap(Generic[EventT, ActionT]):
    """`machine` with a recorder in between; it is itself a `Machine`, and is used in its place.

    config: what `kind.build` makes the like of it from, without the events. With no recorder it costs one
    attribute test. Recording never fails the machine: what cannot be recorded is counted as lost.
    Used from the recorder's thread.
    """

    __slots__ = ("_kind", "_recorder", "_stretch", "machine", "stream")

    def __init__(
        self,
        recorder: Recorder | _Handover | None,
        kind: MachineKind[EventT, ActionT],
        name: str,
        machine: Machine[EventT, ActionT],
        config: Mapping[str, Any],
    ) -> None:
        self.machine = machine
        self._recorder = recorder
        self._kind = kind
        self._stretch = 0 if recorder is None else recorder.stretch
        self.stream = 0 if recorder is None else recorder.declare_machine(kind, name, config)
        """Its number in the log; 0 if nothing is recorded."""

    def handle(self, event: EventT, *, now_ns: int) -> list[ActionT]:
        """As the machine's; `now_ns` is recorded as it is given."""
        recorder = self._recorder
        if recorder is None:
            return self.machine.handle(event, now_ns=now_ns)
        if self._stretch != recorder.stretch:
            self._stretch = recorder.stretch
            recorder.state(self.stream, self._kind, self.machine, now_ns)
        recorder.event(self.stream, self._kind.events, event, now_ns)
        try:
            actions = self.machine.handle(event, now_ns=now_ns)
        except Exception as error:
            recorder.raised(self.stream, "handle", error, now_ns)
            raise
        recorder.acted(self.stream, self._kind.actions, actions, now_ns)
        return actions

    def check_invariants(self) -> None:
        """As the machine's; a broken invariant is recorded."""
        try:
            self.machine.check_invariants()
        except AssertionError as error:
            if self._recorder is not None:
                self._recorder.raised(self.stream, "check_invariants", error, self._recorder.now_ns())
            raise

    def mark(self, step: int) -> None:
        """A step begins; the index finds it."""
        if self._recorder is not None:
            self._recorder.mark(self.stream, step)

    def close(self, reason: str) -> None:
        """The machine has ended."""
        if self._recorder is not None:
            self._recorder.end_stream(self.stream, reason)


class ThreadTap(Tap[EventT, ActionT]):
    """`machine` with a recorder of another thread in between; it is itself a `Machine`.

    post: has a function called on the recorder's thread, soon; raises RuntimeError once that has ended, as a
    loop's `call_soon_threadsafe` does. config: as of a `Tap`. With no recorder it costs one attribute test.
    For one thread at a time.
    """

    __slots__ = ()

    def __init__(
        self,
        recorder: Recorder | None,
        kind: MachineKind[EventT, ActionT],
        name: str,
        machine: Machine[EventT, ActionT],
        config: Mapping[str, Any],
        *,
        post: Callable[[Callable[[], None]], object],
    ) -> None:
        handover = None if recorder is None else _Handover(recorder, post)
        super().__init__(handover, kind, name, machine, config)


class _Handover:
    """The recorder of one machine on another thread: hands each record over to the recorder's thread.

    Streams are numbered there, so the number that its methods are given counts for nothing.
    """

    def __init__(self, recorder: Recorder, post: Callable[[Callable[[], None]], object]) -> None:
        self._recorder = recorder
        self._post = post
        self._machine = ""
        self._stream = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._posted = self._ended = False

    @property
    def stretch(self) -> int:
        """See `Recorder`."""
        return self._recorder.stretch

    def now_ns(self) -> int:
        """See `Recorder`."""
        return self._recorder.now_ns()

    def declare_machine(self, kind: MachineKind[Any, Any], name: str, config: Mapping[str, Any]) -> int:
        """See `Recorder`."""

        def declare() -> None:
            self._stream = self._recorder.declare_machine(kind, name, config)

        self._machine = kind.name
        self._hand_over(declare)
        return 0

    def state(self, _: int, kind: MachineKind[Any, Any], machine: object, now_ns: int) -> None:
        """Write the state down here, where nobody changes it meanwhile."""
        states = kind.states
        if states is None:
            return
        try:
            state = states.encode(machine)
        except CaptureMismatch as error:
            text = str(error)
            self._hand_over(lambda: self._recorder.note(text, stream=self._stream))
            return
        record = self._recorder.encoded_state
        self._hand_over(lambda: record(self._stream, states.fingerprint, state, now_ns))

    def event(self, _: int, codec: UnionCodec[EventT], event: EventT, now_ns: int) -> None:
        """See `Recorder`."""
        self._hand_over(lambda: self._recorder.event(self._stream, codec, event, now_ns))

    def acted(self, _: int, codec: UnionCodec[ActionT], actions: Sequence[ActionT], now_ns: int) -> None:
        """See `Recorder`."""
        kept = tuple(actions)  # the list is the caller's
        self._hand_over(lambda: self._recorder.acted(self._stream, codec, kept, now_ns))

    def raised(self, _: int, where: str, error: BaseException, now_ns: int) -> None:
        """See `Recorder`."""
        self._hand_over(lambda: self._recorder.raised(self._stream, where, error, now_ns))

    def mark(self, _: int, step: int) -> None:
        """See `Recorder`."""
        self._hand_over(lambda: self._recorder.mark(self._stream, step))

    def end_stream(self, _: int, reason: str) -> None:
        """See `Recorder`. Idempotent."""
        self._hand_over(lambda: self._recorder.end_stream(self._stream, reason))
        self._ended = True

    def _hand_over(self, record: Callable[[], None]) -> None:
        """Have `record` called on the recorder's thread, behind all before it."""
        if self._ended:
            return
        if len(self._waiting) >= WAITING_MAX:
            # Nothing more is recorded of this machine: a log with a hole cannot be played.
            self._ended = True
            reason = f"{WAITING_MAX} records of {self._machine} were not taken in time"
            self._waiting.append(lambda: self._recorder.lost(1, reason))
            return
        self._waiting.append(record)
        if not self._posted:
            self._posted = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its recorder with it
                self._post(self._take)

    def _take(self) -> None:
        """On the recorder's thread: record what waits."""
        self._posted = False  # first: what is handed over from here on is taken below, or posted again
        while self._waiting:
            self._waiting.popleft()()
