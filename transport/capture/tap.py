"""A machine under observation: what goes in and what comes out is recorded on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic

from zbmd.transport.capture.registry import ActionT, EventT, MachineKind
from zbmd.transport.machine import Machine

if TYPE_CHECKING:
    from zbmd.transport.capture.recorder import Recorder


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
