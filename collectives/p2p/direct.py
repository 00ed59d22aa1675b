"""Messages that ranks of one host pass to each other without an event loop: the driver of `MessageSlots`.

Sends and receives run on their callers' threads. A thread of its own carries on with those that nobody waits
for: a receive that was posted before a collective must not keep its sender waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.errors import Desynchronised, MembersLost, OperationAborted
from zbmd.collectives.native import _messages as native
from zbmd.collectives.native._messages import MessageSlots, Request
from zbmd.collectives.p2p.differing import CALLS_DIFFER, ended_by, message_differs
from zbmd.collectives.p2p.tagged import CLOSED, TAG_MAX, TaggedEnd, require_tag
from zbmd.transport.clock.patience import PATIENCE
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, RemoteProtocolError, ZbmdError
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.collectives.direct")

SIGNALS_NS: Final = 100_000_000
"""A waiting thread handles signals so often."""
TICK_S: Final = 1e-3
"""Time until requests that nobody waits for are carried on with."""
WAITED_TICK_S: Final = 5e-3
"""The same while another thread waits in the group, which does it."""
IDLE_TICKS: Final = 20
"""Ticks without a request before the thread sleeps: until then a new one need not wake it."""
OVERDUE_TICKS: Final = 64
"""Ticks between two looks for requests whose deadline has passed."""
DRAIN_S_MAX: Final = 60.0
"""Seconds that a rank at its end waits until copies of its messages have been received."""
DRAIN_STEP_S: Final = 1e-3


class DirectMessages:
    """The messages of one group on one host, from this rank's side. Used from any thread.

    members: ranks of the job. give_up: ends this rank's part in the group, for a reason.
    """

    def __init__(
        self, slots: MessageSlots, tagged: TaggedEnd, members: Sequence[int], give_up: Callable[[str], None]
    ) -> None:
        self._slots = slots
        self._tagged = tagged
        self._members = members
        self._rank = slots.rank
        self._give_up = give_up
        self._closed = self._asleep = False
        self._wake = threading.Event()
        self._guard = threading.Lock()
        self._naming = threading.Lock()
        self._forked = False
        self._thread: threading.Thread | None = None

    def send(self, x: Array, to: int, tag: int, label: bytes, timeout_ns: int) -> Request:
        """Send a flat array to member `to`. A copy of up to 64 KiB is sent; a longer one must not change."""
        if not 0 <= tag <= TAG_MAX:
            require_tag(tag)
        request = self._slots.send(x, to, tag, label, timeout_ns)
        if not request.is_over:
            self._attend()
        return request

    def receive(self, x: Array, source: int | None, tag: int, label: bytes, timeout_ns: int) -> Request:
        """Receive into a flat array from member `source`, None for any."""
        if not 0 <= tag <= TAG_MAX:
            require_tag(tag)
        request = self._slots.receive(x, -1 if source is None else source, tag, label, timeout_ns)
        if not request.is_over:
            self._attend()
        return request

    def wait(self, request: Request, limit_s: float | None = None) -> None:
        """Return once a request is over. Raises its error, and TimeoutError after `limit_s`."""
        self._check_process()
        end_ns = request.deadline_ns
        if limit_s is not None:
            end_ns = min(end_ns, now_ns() + round(limit_s * 1e9))
        while not self._slots.wait(request, min(SIGNALS_NS, max(0, PATIENCE.left_ns(end_ns)))):
            if PATIENCE.left_ns(request.deadline_ns) <= 0:
                self._slots.withdraw(request)
            elif PATIENCE.left_ns(end_ns) <= 0:
                raise TimeoutError
        if request.failure:
            raise self.error_of(request)

    def is_over(self, request: Request) -> bool:
        """Return whether a request is over, after what can be carried out has been."""
        if not request.is_over:
            self._check_process()
            self._slots.progress()
        return request.is_over

    def forked(self) -> None:
        """Note that this is the copy of a forked child: it takes no message."""
        self._forked = True

    def _check_process(self) -> None:
        if self._forked:
            raise LocalProtocolError("a message belongs to the process from which this one was forked")

    def error_of(self, request: Request) -> BaseException:
        """Return the error of a request that has failed, always the same."""
        with self._naming:
            error = request.error
            if error is None:
                error = request.error = self._new_error(request)
        return error

    def _new_error(self, request: Request) -> ZbmdError:
        call, source = self._call(request), request.source if request.source >= 0 else request.peer
        member = self._members[source] if source >= 0 else -1
        match request.failure:
            case native.LOST:
                lost = tuple(self._members[place] for place in self._slots.lost) or (member,)
                return MembersLost(lost, f"during {call}; wait for the next view and retry in it")
            case native.LEFT:
                ends = self._tagged.ends
                self._tagged.wait_for_reports(lambda: ends.reason_of(member) is not None)
                reason = ends.reason_of(member) or CLOSED
                return ended_by(f"rank {source}", reason, f"; {call} waits for it")
            case native.DEADLINE:
                return DeadlineExceeded(f"{call}: nothing in {request.timeout_ns / 1e9:g} s")
            case native.MISMATCH:
                return self._mismatch(request, call)
            case native.GIVEN_UP:
                return OperationAborted(f"rank {source} gave its message up as it was taken")
            case native.UNREADABLE:
                text = f"the memory that rank {source} described cannot be read"
                return RemoteProtocolError(text, story=(call,))
            case _:
                return self._aborted(call)

    def _aborted(self, call: str) -> ZbmdError:
        first = None if self._closed else self._tagged.ends.first
        if first is None:
            return OperationAborted(f"{call}: the group is closed, or has failed: use the next view's")
        member, reason = first
        return ended_by(f"rank {self._members.index(member)}", reason, f"; {call} waits for it")

    def _mismatch(self, request: Request, call: str) -> Desynchronised:
        """The call of a receive does not fit that of its message: end the group, of which all hear."""
        sender, label = request.source, (request.theirs or b"").decode(errors="replace")
        theirs = f"send({label}, dst={self._rank}, tag={request.tag})"
        error = message_differs({self._rank: call, sender: theirs}, self._members)
        self._give_up(f"{CALLS_DIFFER}{error}")
        return error

    @staticmethod
    def _call(request: Request) -> str:
        label = request.label.decode()
        if request.sends:
            return f"send({label}, dst={request.peer}, tag={request.tag})"
        source = "" if request.peer < 0 else f"src={request.peer}, "
        return f"recv({label}, {source}tag={request.tag})"

    # Requests that nobody waits for.

    def _attend(self) -> None:
        if self._thread is None:
            with self._guard:
                if self._thread is None and not self._closed:
                    thread = threading.Thread(target=self._carry_on, name="zbmd-messages", daemon=True)
                    self._thread = thread
                    thread.start()
        elif self._asleep:
            self._wake.set()

    def _carry_on(self) -> None:
        slots, idle, ticks = self._slots, 0, 0
        while not self._closed:
            if slots.is_idle:
                idle += 1
                if idle > IDLE_TICKS:
                    self._sleep()
                    idle = 0
            else:
                idle, ticks = 0, ticks + 1
                if not slots.waiters:
                    slots.progress()
                if ticks % OVERDUE_TICKS == 0 and PATIENCE.left_ns(0) <= 0:
                    for request in slots.overdue(now_ns()):
                        slots.withdraw(request)
            time.sleep(WAITED_TICK_S if slots.waiters else TICK_S)

    def _sleep(self) -> None:
        """Until a request is made. One that is made meanwhile finds this asleep, or this finds it."""
        self._asleep = True
        if self._slots.is_idle and not self._closed:
            self._wake.wait()
        self._asleep = False
        self._wake.clear()

    # Its end.

    def close(self) -> None:
        """Have what waits fail, once the group is closed. Idempotent."""
        self._slots.progress()
        with self._guard:
            self._closed = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_drained(self) -> bool:
        """Whether every member that may want messages of this rank has received them, after `close`.

        Then it keeps no memory of the members any more.
        """
        return not self._slots.copies and self._slots.let_go()


def drain(all_of: Sequence[DirectMessages]) -> None:
    """Wait until copies of this process's messages have been received, or their receivers are gone."""
    end_s = time.monotonic() + DRAIN_S_MAX
    while left := [each for each in all_of if not each.is_drained]:
        if time.monotonic() > end_s:
            log.warning("messages of this rank were not received", groups=len(left), waited_s=DRAIN_S_MAX)
            return
        time.sleep(DRAIN_STEP_S)
