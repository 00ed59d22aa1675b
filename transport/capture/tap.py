"""Taps: a machine whose events and actions are recorded on the way in and out.

`Tap` is for a machine that runs on its recorder's thread, `ThreadTap` for one that runs on another thread: it
answers at once, and hands frozen events and actions over, in order, to the thread that records them. A replay
cannot tell the two apart.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Generic

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

    __slots__ = ("_kind", "_recorder", "_stream", "_stretch", "machine")

    def __init__(
        self,
        recorder: Recorder | None,
        kind: MachineKind[EventT, ActionT],
        name: str,
        machine: Machine[EventT, ActionT],
        config: Mapping[str, Any],
    ) -> None:
        self.machine = machine
        self._recorder = recorder
        self._kind = kind
        self._stretch = 0 if recorder is None else recorder.stretch
        self._stream = 0 if recorder is None else recorder.declare_machine(kind, name, config)

    @property
    def stream(self) -> int:
        """Its number in the log; 0 if nothing is recorded."""
        return self._stream

    def handle(self, event: EventT, *, now_ns: int) -> list[ActionT]:
        """As the machine's; `now_ns` is recorded as it is given."""
        recorder = self._recorder
        if recorder is None:
            return self.machine.handle(event, now_ns=now_ns)
        if self._stretch != recorder.stretch:
            self._stretch = recorder.stretch
            recorder.state(self._stream, self._kind, self.machine, now_ns)
        recorder.event(self._stream, self._kind.events, event, now_ns)
        try:
            actions = self.machine.handle(event, now_ns=now_ns)
        except Exception as error:
            recorder.raised(self._stream, "handle", error, now_ns)
            raise
        recorder.acted(self._stream, self._kind.actions, actions, now_ns)
        return actions

    def check_invariants(self) -> None:
        """As the machine's; a broken invariant is recorded."""
        try:
            self.machine.check_invariants()
        except AssertionError as error:
            if self._recorder is not None:
                self._recorder.raised(self._stream, "check_invariants", error, self._recorder.now_ns())
            raise

    def mark(self, step: int) -> None:
        """A step begins; the index finds it."""
        if self._recorder is not None:
            self._recorder.mark(self._stream, step)

    def close(self, reason: str) -> None:
        """The machine's life is over."""
        if self._recorder is not None:
            self._recorder.end_stream(self._stream, reason)


class ThreadTap(Generic[EventT, ActionT]):
    """`machine` with a recorder of another thread in between; it is itself a `Machine`.

    post: has a function called on the recorder's thread, soon; raises RuntimeError once that has ended, as a
    loop's `call_soon_threadsafe` does. config: as of a `Tap`. With no recorder it costs one attribute test.
    For one thread at a time.
    """

    __slots__ = (
        "_closed",
        "_kind",
        "_post",
        "_posted",
        "_recorder",
        "_stream",
        "_stretch",
        "_waiting",
        "machine",
    )

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
        self.machine = machine
        self._recorder = recorder
        self._kind = kind
        self._post = post
        self._stretch = 0 if recorder is None else recorder.stretch
        self._stream = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._posted = self._closed = False
        if recorder is not None:
            self._hand_over(lambda: self._declare(recorder, name, config))

    def handle(self, event: EventT, *, now_ns: int) -> list[ActionT]:
        """As the machine's; `now_ns` is recorded as it is given."""
        recorder = self._recorder
        if recorder is None:
            return self.machine.handle(event, now_ns=now_ns)
        if self._stretch != recorder.stretch:
            self._stretch = recorder.stretch
            self._keep_state(recorder, now_ns)
        codecs = self._kind.events, self._kind.actions
        self._hand_over(lambda: recorder.event(self._stream, codecs[0], event, now_ns))
        try:
            actions = self.machine.handle(event, now_ns=now_ns)
        except Exception as error:
            self._raised(recorder, "handle", error, now_ns)
            raise
        said = tuple(actions)  # the list is the caller's
        self._hand_over(lambda: recorder.acted(self._stream, codecs[1], said, now_ns))
        return actions

    def check_invariants(self) -> None:
        """As the machine's; a broken invariant is recorded."""
        try:
            self.machine.check_invariants()
        except AssertionError as error:
            if self._recorder is not None:
                self._raised(self._recorder, "check_invariants", error, self._recorder.now_ns())
            raise

    def mark(self, step: int) -> None:
        """A step begins; the index finds it."""
        recorder = self._recorder
        if recorder is not None:
            self._hand_over(lambda: recorder.mark(self._stream, step))

    def close(self, reason: str) -> None:
        """The machine's life is over. Idempotent."""
        recorder = self._recorder
        if recorder is not None and not self._closed:
            self._closed = True
            self._hand_over(lambda: recorder.end_stream(self._stream, reason))

    # ---- what is handed over

    def _keep_state(self, recorder: Recorder, now_ns: int) -> None:
        """Write the state down here, where nobody changes it meanwhile."""
        states = self._kind.states
        if states is None:
            return
        try:
            state = states.encode(self.machine)
        except CaptureMismatch as error:
            text = str(error)
            self._hand_over(lambda: recorder.note(text, stream=self._stream))
            return
        self._hand_over(lambda: recorder.encoded_state(self._stream, states.fingerprint, state, now_ns))

    def _raised(self, recorder: Recorder, where: str, error: Exception, now_ns: int) -> None:
        self._hand_over(lambda: recorder.raised(self._stream, where, error, now_ns))

    def _hand_over(self, record: Callable[[], None]) -> None:
        """Have `record` called on the recorder's thread, behind all before it."""
        if len(self._waiting) >= WAITING_MAX:
            self._overflow()
            return
        self._waiting.append(record)
        if not self._posted:
            self._posted = True
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its recorder with it
                self._post(self._take)

    def _overflow(self) -> None:
        """Nothing more is recorded of this machine: a log with a hole cannot be played."""
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        reason = f"{WAITING_MAX} records of {self._kind.name} were not taken in time"
        self._waiting.append(lambda: recorder.lost(1, reason))

    # ---- on the recorder's thread

    def _declare(self, recorder: Recorder, name: str, config: Mapping[str, Any]) -> None:
        self._stream = recorder.declare_machine(self._kind, name, config)

    def _take(self) -> None:
        self._posted = False  # first: what is handed over from here on is taken below, or posted anew
        while self._waiting:
            self._waiting.popleft()()
