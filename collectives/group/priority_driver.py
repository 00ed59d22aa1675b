"""The calls of a group that has priorities, from being made to their results: drives `priority_machine`.

Each call gives the data-plane thread one turn. A turn is a round, an all-gather of 64 bytes, and then the
operation that the round has chosen, which need not be the call that the turn is of.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.operations import timeout_ns
from zbmd.collectives.errors import CollectiveError, Desynchronised
from zbmd.collectives.group import priority_machine as pm
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.native._native import now_ns

ResultT = TypeVar("ResultT")

_ROW: Final = struct.Struct(f"=Q{pm.WINDOW}b")
_NONE: Final = -128
"""In a row, where no call waits."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    operation: Callable[[Communicator], Any]
    future: Future[Any]
    end_ns: int


class PriorityTurns:
    """The calls of one member that wait."""

    def __init__(self) -> None:
        self._machine = pm.PriorityMachine()
        self._lock = threading.Lock()
        self._waiting: dict[int, _Waiting] = {}
        self._made = 0
        self._mine = np.zeros(_ROW.size, np.uint8)
        self._all: np.ndarray[Any, np.dtype[np.uint8]] | None = None

    def submit(
        self,
        data_plane: Executor,
        c: Communicator,
        operation: Callable[[Communicator], ResultT],
        priority: int,
        end_ns: int,
    ) -> Future[ResultT]:
        """Number a call, and give the data plane's one thread a turn for it.

        Raises `LocalProtocolError` on a bad priority, and `RuntimeError` if the data plane has ended.
        """
        future: Future[ResultT] = Future()
        future.set_running_or_notify_cancel()  # peers wait for this rank's part
        end_ns = end_ns or now_ns() + timeout_ns(None)
        with self._lock:  # a turn that is refused is none: the call must not be numbered then
            self._machine.check(priority)
            data_plane.submit(self._take, c)
            self._machine.handle(pm.Made(priority=priority), now_ns=now_ns())
            self._waiting[self._made] = _Waiting(operation, future, end_ns)
            self._made += 1
        return future

    def _take(self, c: Communicator) -> None:
        """One turn: choose with all members, and run what was chosen. One call ends, whatever happens."""
        try:
            action = self._put(self._round(c))
        except Exception as error:  # noqa: BLE001 -- a call's future gets it, whatever it is
            action = self._put(pm.Broken())
            self._end(action, error)
            return
        match action:
            case pm.Run(number=number):
                call = self._waiting.pop(number)
                try:
                    result = call.operation(c)
                except BaseException as error:  # noqa: BLE001 -- as an executor would
                    call.future.set_exception(error)
                else:
                    call.future.set_result(result)
            case pm.Differ(number=number, priorities=priorities):
                calls = {rank: f"priority {priority}" for rank, priority in priorities.items()}
                text = f"call {number} of {c.title} has other priorities on other ranks: {calls}"
                self._end(action, Desynchronised(text, calls))
            case _:
                raise AssertionError(action)

    def _put(self, event: pm.PriorityEvent) -> pm.PriorityAction:
        with self._lock:
            (action,) = self._machine.handle(event, now_ns=now_ns())
            self._machine.check_invariants()
            return action

    def _end(self, action: pm.PriorityAction, error: Exception) -> None:
        if not isinstance(action, pm.Fail | pm.Differ):
            raise CollectiveError(f"a round ended with {action}") from error
        self._waiting.pop(action.number).future.set_exception(error)

    def _round(self, c: Communicator) -> pm.Counted:
        action = self._put(pm.TurnBegan())
        if not isinstance(action, pm.Count):
            raise CollectiveError(f"a turn began with {action}")
        with self._lock:
            end_ns = min(call.end_ns for call in self._waiting.values())
        self._mine[:] = np.frombuffer(encode_calls(action.own), np.uint8)
        if self._all is None:
            self._all = np.zeros((c.size, _ROW.size), np.uint8)
        c.all_gather(self._mine, self._all, deadline_ns=end_ns)
        return pm.Counted(
            reports={i: decode_calls(row.tobytes(), c.members[i]) for i, row in enumerate(self._all)}
        )


def encode_calls(calls: pm.WaitingCalls) -> bytes:
    """The row of a member."""
    padding = (_NONE,) * (pm.WINDOW - len(calls.priorities))
    return _ROW.pack(calls.made, *calls.priorities, *padding)


def decode_calls(row: bytes, rank: int) -> pm.WaitingCalls:
    """Return the row of member `rank`. Raises `RemoteProtocolError` unless a call waits in it."""
    if len(row) != _ROW.size:
        raise RemoteProtocolError(f"rank {rank} sent {len(row)} bytes of its calls, not {_ROW.size}")
    made, *window = _ROW.unpack(row)
    waiting = window.index(_NONE) if _NONE in window else pm.WINDOW
    if not waiting <= made or not waiting or any(p != _NONE for p in window[waiting:]):
        raise RemoteProtocolError(f"rank {rank} reported {made} calls, and {waiting} that wait")
    return pm.WaitingCalls(made=made, priorities=tuple(window[:waiting]))
