"""A group: the members of one view, and collectives among them that a coroutine can await.

Operations run in call order on the group's own data-plane thread, which holds no GIL while it works. A group
belongs to one epoch: after a loss, get a new one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from zbmd.actors.hangs.progress import Sample
from zbmd.actors.hangs.watchdog import Described, Watched
from zbmd.actors.hangs.wire import PlaceKind, Position
from zbmd.actors.rank.member import Worker
from zbmd.actors.view import View
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.cost_model import is_far
from zbmd.collectives.communicator.operations import Blocking, Method, Operations, timeout_ns
from zbmd.collectives.device.arrays import given_back, taken
from zbmd.collectives.errors import Desynchronised, MembersLost, OperationAborted
from zbmd.collectives.flight.recorder import FlightState
from zbmd.collectives.group.capture import record_operations
from zbmd.collectives.group.flight_dump import FLIGHTS
from zbmd.collectives.group.priority_driver import PriorityTurns
from zbmd.collectives.group.priority_machine import PRIORITY_MAX
from zbmd.collectives.group.subgroup_driver import Subgroups, open_subgroups
from zbmd.collectives.p2p.actor import open_tagged
from zbmd.collectives.p2p.differing import CALLS_DIFFER, first_difference
from zbmd.collectives.p2p.direct import DirectMessages
from zbmd.collectives.p2p.on_loop import OnLoop
from zbmd.collectives.p2p.plain import Tagged
from zbmd.collectives.p2p.tagged import CLOSED, Received, within
from zbmd.collectives.programs.channels import SUBGROUP_CHANNEL_FIRST, Agreed, NoChannel
from zbmd.transport.errors import LocalProtocolError, UserError, ZbmdError
from zbmd.transport.native._native import now_ns

# What the watchdog sees of a group: the operation under way, and how far this rank has come.


class GroupWatch:
    """The operations of one communicator, as a source for the watchdog
    (`zbmd.actors.hangs.watchdog.GroupSource`)."""

    def __init__(self, name: str, communicator: Communicator) -> None:
        self.key = f"group {communicator.channel}/{communicator.epoch}"
        self._name = name
        self._communicator = communicator

    def watched(self) -> Iterator[Watched]:
        """The operation under way, if there is one that somebody waits in."""
        flight = self._communicator.flight
        record = flight[-1] if flight else None
        if record is None or record.state is not FlightState.RUNNING or self._communicator.fast_path.flies:
            return
        # An operation in pieces makes progress with each of them.
        mark = (record.sequence, self._communicator.sequence)
        what = f"{record.operation} #{record.sequence} of {self._communicator.title}"
        described = Described(kind=PlaceKind.OPERATION, who=self._name, what=what)
        yield Watched(sample=Sample(key=self.key, mark=mark), describe=lambda: described)

    def position(self, *, still_ns: int, stuck: bool) -> Position:
        """Return the operation that this rank has reached."""
        flight = self._communicator.flight
        record = flight[-1] if flight else None
        running = record is not None and record.state is FlightState.RUNNING
        return Position(
            channel=self._communicator.channel,
            epoch=self._communicator.epoch,
            sequence=0 if record is None else record.sequence,
            operation="" if record is None else record.operation,
            running=running,
            stuck=stuck and running,
            still_ns=still_ns if running else 0,
            members=self._communicator.members,
        )


SINCE = "gave up, since "
"""Begins the reason of a rank that has itself been left."""
CHANNEL_TRIALS_MAX, CHANNEL_PAUSE_S = 50, 0.02
"""Looks of a new sub-group's members for a channel, and the seconds between them."""
OPERATIONS_IN_FLIGHT_MAX = 16_384
"""Operations submitted and not yet done; one more is refused, or waits."""

OWN_FAILURES = ("failed", "gave up")
"""Reasons of a member that fails itself, and says so to the host."""

_groups: WeakSet[Group] = WeakSet()
"""Those of this process."""


def _after_fork() -> None:
    for made in list(_groups):
        made.forked()


os.register_at_fork(after_in_child=_after_fork)

ResultT = TypeVar("ResultT")
Array = NDArray[Any]


class Group(Operations[Coroutine[Any, Any, Any]]):
    """The members of one epoch, from this rank's side. Make it with `zbmd.group(worker)`.

    Ranks in its calls are ranks of the group, 0..size-1, and so is `rank`; `members[r]` is the job's rank of
    rank r.

    Await its operations. `blocking` has the same ones for a thread that may wait; a small one takes a
    microsecond there. Arrays may lie on a device: the operation comes after the work that was queued on
    `stream` before the call; by default the stream that the array names, with cupy the current one.
    timeout: seconds from the call to the result (default: `TIMEOUT_S_DEFAULT`, ten minutes). priority: with
    `zbmd.group(worker, priorities=True)`, -127..127; of the operations that all members have called, the one
    of the highest priority goes first.

    Each operation raises `PeerLost` when a member ends meanwhile, `DeadlineExceeded` when the timeout has
    passed, and `OperationAborted` when a member has given up or the group is closed, which says who and why;
    after any of them the group is unusable.
    """

    def __init__(
        self,
        communicator: Communicator,
        view: View,
        *,
        priorities: bool = False,
        unwatch: Callable[[], None] = lambda: None,
    ) -> None:
        self.communicator = communicator
        self.view = view
        self.epoch = view.epoch
        self.rank = communicator.place
        self.members = communicator.members
        self._unwatch = unwatch
        self._data_plane = ThreadPoolExecutor(1, thread_name_prefix="zbmd-data")
        self._turns = PriorityTurns() if priorities else None
        if priorities:
            communicator.fast_path.queue(1)  # no call goes past the others
        self._slots = threading.BoundedSemaphore(OPERATIONS_IN_FLIGHT_MAX)
        self.tagged: Tagged | None = None
        self.home: Home | None = None
        """Makes its sub-groups; None if it can have none."""
        self.direct: DirectMessages | None = None
        """Messages without an event loop, if they have been opened (`group.direct`)."""
        self._cause = ""
        communicator.explain_with(self._explained)
        self.blocking = GroupBlocking(self)
        self._forked_from = 0
        _groups.add(self)

    def __repr__(self) -> str:
        return f"<Group {self.communicator.title}: rank {self.members[self.rank]} of {list(self.members)}>"

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.members)

    def submit(
        self,
        operation: Callable[[Communicator], ResultT],
        priority: int = 0,
        end_ns: int = 0,
        *,
        patience_s: float = 0.0,
    ) -> Future[ResultT]:
        """Queue `operation` for the data-plane thread; callable from any thread.

        patience_s: how long to wait while too many operations are in flight.

        end_ns: when it is to give up while members are still choosing what comes first; 0 for the default.
        Raises `UserError` on a priority that it cannot have, `LocalProtocolError` when too many operations
        are in flight and in a forked child, and `OperationAborted` when the group is closed: who computes on
        one thread cannot know that another has closed it for a new view.
        """
        self.check_process()
        if priority and (self._turns is None or abs(priority) > PRIORITY_MAX):
            raise UserError(
                f"priority={priority} on {self!r}: it is -{PRIORITY_MAX}..{PRIORITY_MAX}, and 0 unless the "
                "group was made with zbmd.group(worker, priorities=True)"
            )
        if not self._slots.acquire(timeout=patience_s):
            raise LocalProtocolError(
                f"{OPERATIONS_IN_FLIGHT_MAX:,} operations are in flight on {self!r}: wait for some of them"
            )
        self.communicator.fast_path.queue(1)
        try:
            if self._turns is None:
                future = self._data_plane.submit(operation, self.communicator)
            else:
                future = self._turns.submit(self._data_plane, self.communicator, operation, priority, end_ns)
        except RuntimeError:
            self._done()
            raise OperationAborted(f"{self!r} is closed: get a group of the new view") from None
        future.add_done_callback(lambda _: self._done())
        return future

    def check_process(self) -> None:
        """Raise `LocalProtocolError` in a forked child."""
        if self._forked_from:
            raise LocalProtocolError(
                f"{self!r} belongs to process {self._forked_from}, from which this one was forked: only that "
                "process takes part in its operations"
            )

    def forked(self) -> None:
        """Note that this is the copy of a forked child, which has no part in what the members do."""
        self._forked_from = os.getppid()
        if self.direct is not None:
            self.direct.forked()
        self.communicator.fast_path.queue(1)  # every call passes `submit`

    def _done(self) -> None:
        self.communicator.fast_path.queue(-1)
        self._slots.release()

    async def run(
        self, operation: Callable[[Communicator], ResultT], priority: int = 0, end_ns: int = 0
    ) -> ResultT:
        """Run `operation` on the data-plane thread and await its result.

        A cancelled await leaves the operation running: it owns its buffers until it has drained, and peers
        may be waiting for this rank's part.
        """
        return await asyncio.shield(asyncio.wrap_future(self.submit(operation, priority, end_ns)))

    async def _start(
        self, call: Method, x: Any, out: Any, timeout: float | None, priority: int, stream: Any = None
    ) -> Any:
        x, out, end_ns = taken(x, stream), taken(out, stream), self.deadline_ns(timeout)
        return given_back(await self.run(lambda c: call(c, x, out, end_ns), priority, end_ns))

    def deadline_ns(self, timeout: float | None = None) -> int:
        """Return the CLOCK_MONOTONIC time, ns, at which an operation begun now with `timeout` gives up."""
        return now_ns() + timeout_ns(timeout)

    async def send(
        self, x: Any, to: int, *, tag: int = 0, timeout: float | None = None, stream: Any = None
    ) -> None:
        """Send a copy of `x` to rank `to` of the group. Messages of one member to another stay in order.

        `x`: any shape, a dtype that can be reduced. Returns when `x` may be changed: for a small array at
        once, unless 64 messages to that member wait to be received; for one over 64 KiB when it is there.
        Raises as other operations do, but a timeout harms nothing but this message's caller.
        """
        given, member = taken(x, stream), self._member("to", to)
        async with within(timeout, f"send to rank {to} with tag {tag} in epoch {self.epoch}"):
            await self.messages().send(given, member, tag)

    async def recv(
        self,
        source: int | None = None,
        *,
        tag: int | None = None,
        out: Any = None,
        timeout: float | None = None,
        stream: Any = None,
    ) -> Received:
        """Return the first message from rank `source` of the group (None: any) with `tag` (None: any).

        Returns its array (in `out`, of the same dtype and size, wherever it lies, or in a new one of the
        host), source and tag. A receive that is cancelled, or whose `out` does not fit, leaves the message
        for the next.
        """
        place, member = taken(out, stream), None if source is None else self._member("source", source)
        async with within(timeout, f"receive from {source} with tag {tag} in epoch {self.epoch}"):
            got = await self.messages().receive(member, tag, place)
        return Received(got.array, self.members.index(got.source), got.tag)

    def _member(self, name: str, rank: int) -> int:
        """Return the job's rank of a rank of the group. Raises `UserError` if there is no such."""
        if not 0 <= rank < len(self.members):
            raise UserError(f"{name}={rank} is not a rank of this group: expected 0..{len(self.members) - 1}")
        return self.members[rank]

    def messages(self) -> Tagged:
        """Return the tagged messages. Raises `LocalProtocolError` if it has none, and in a forked child."""
        self.check_process()
        if self.tagged is None:
            raise LocalProtocolError("this group has no tagged messages: get it from zbmd.group")
        return self.tagged

    async def split(self, color: int | None, *, key: int = 0, timeout: float | None = None) -> Group | None:
        """Make a group of the members that give the same `color`, in the order of their keys, then ranks.

        All members call this; who gives None gets None. The new group has links and memory of this one, an
        own channel, and ends as any other: by `close`, or an error. It belongs to the view of this group,
        and goes on when this one is closed. Raises as `subgroup`.
        """
        self._home()
        if not all(abs(number) < 2**62 for number in (color or 0, key)):
            raise UserError(f"color={color} or key={key} is out of bounds")
        end_ns = self.deadline_ns(timeout)
        mine = np.array([color is not None, color or 0, key], np.int64)
        rows = await self.run(lambda c: c.all_gather(mine, deadline_ns=end_ns))
        if color is None:
            return None
        chosen = [
            (int(rows[rank, 2]), rank) for rank in range(self.size) if tuple(rows[rank, :2]) == (1, color)
        ]
        return await self.subgroup(
            [rank for _, rank in sorted(chosen)], timeout=max(1e-9, (end_ns - now_ns()) / 1e9)
        )

    async def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> Group:
        """Make the group of some ranks of this one, in this order; just these call it, with the same `ranks`.

        See `split`. Members that make several at once make them in the same order. Raises `UserError` on
        ranks that are not members, `MembersLost` when one of them ends, `DeadlineExceeded` when one does not
        come, and `LocalProtocolError` when a member is in `SUBGROUPS_MAX` already.
        """
        home, mine = self._home(), self.members[self.rank]
        members = tuple(self._member("rank", rank) for rank in ranks)
        if mine not in members or len(set(members)) != len(members):
            raise UserError(
                f"ranks={list(ranks)}: expected ranks of this group, 0..{self.size - 1}, each once, and this "
                f"one, {self.rank}, among them"
            )
        end_ns = self.deadline_ns(timeout)
        async with within(timeout, f"sub-group of ranks {list(members)} in epoch {self.epoch}"):
            agreed = await self._agreed(home.subgroups, members)
        give_back = home.subgroups.leaving(members, agreed)
        try:
            made = make_group(
                home.worker,
                self.view,
                members=members,
                agreed=agreed,
                priorities=self._turns is not None,
                closed=give_back,
            )
        except BaseException:
            give_back()
            raise
        home.subgroups.watch(agreed, made.abort)
        try:
            made.home = home
            made.tagged = await open_tagged(home.worker, members, epoch=agreed.stamp, channel=agreed.channel)
            await made.run(lambda c: self._begin_subgroup(c, end_ns))
        except BaseException:
            await made.close()
            raise
        return made

    async def _agreed(self, subgroups: Subgroups, members: tuple[int, ...]) -> Agreed:
        """Agree on a channel. Those of groups that have just been closed are free a moment later."""
        one_host = not is_far(hosts_of(self.view, members))
        for _ in range(CHANNEL_TRIALS_MAX):
            try:
                return await subgroups.agree(self.epoch, members, one_host=one_host)
            except NoChannel:  # all members get it, so all try again
                await asyncio.sleep(CHANNEL_PAUSE_S)
        return await subgroups.agree(self.epoch, members, one_host=one_host)

    def _begin_subgroup(self, made: Communicator, end_ns: int) -> None:
        """Return once all members have opened it. What was measured for this group holds for one like it."""
        over_hosts = [is_far(c.hosts) for c in (self.communicator, made)]
        if over_hosts[0] == over_hosts[1]:
            made.model = self.communicator.model
            made.read_peers(self.communicator.reading)
            made.barrier(deadline_ns=end_ns)
        else:
            made.tune(deadline_ns=end_ns)

    def _home(self) -> Home:
        if self.home is None:
            raise LocalProtocolError("this group can have no sub-groups: get it from zbmd.group")
        if self.home.worker.epoch != self.epoch:
            raise OperationAborted(
                f"{self!r} is of a view that is over: make sub-groups of the new one's group"
            )
        return self.home

    def _explained(self, error: ZbmdError, call: str, ended_here: str) -> ZbmdError:
        """Return the error of `call` as what has happened, and report it to the members; see `Explain`."""
        if self.tagged is None or isinstance(error, MembersLost):
            return error
        if isinstance(error, OperationAborted):
            return self._why_aborted(self.tagged, error, call, ended_here)
        mine = self.communicator.labelled
        self.tagged.say_failed(f"gave up: {type(error).__name__}: {error}", mine)
        return (
            self._calls_that_differ(self.tagged, error, mine) if isinstance(error, Desynchronised) else error
        )

    def _why_aborted(self, tagged: Tagged, error: OperationAborted, call: str, ended_here: str) -> ZbmdError:
        if ended_here:
            return OperationAborted(f"{call}: {ended_here}")
        c, ends = self.communicator, tagged.ends
        tagged.wait_for_reports(lambda: bool(c.lost) or ends.first is not None)
        if c.lost:
            return MembersLost(c.lost, f"during {call}; wait for the next view and retry in it")
        if ends.first is None:
            return error
        rank, reason = ends.first
        if reason.startswith(CALLS_DIFFER):
            return self._found_by_another(tagged, rank, reason)
        own = f"rank {self.members.index(rank)} {reason}"
        root = reason.removeprefix(SINCE) if reason.startswith(SINCE) else own
        self._cause = f"{SINCE}{root}"  # for members that hear of this rank's end before that one's
        why = f"{root}; {call} waits for it"
        if self.home is not None and not reason.startswith(OWN_FAILURES):
            self.home.worker.report({"kind": "missing", "text": why})
        return OperationAborted(why)

    def _found_by_another(self, tagged: Tagged, rank: int, reason: str) -> Desynchronised:
        """Return the error of `rank`, which has found that calls differ, and report the own calls."""
        self._cause, mine = reason, self.communicator.labelled
        error = Desynchronised(reason.removeprefix(CALLS_DIFFER), {})
        if not tagged.ends.calls_of(rank):  # it was found in a message, which the text names
            return error
        tagged.say_failed(reason, mine)
        return self._calls_that_differ(tagged, error, mine)

    def _calls_that_differ(self, tagged: Tagged, error: Desynchronised, mine: list[str]) -> Desynchronised:
        """Say in the callers' words what `error` says of descriptors. mine: the own calls, latest first."""
        if not mine:
            return error
        ends, others = tagged.ends, [member for member in self.members if member != self.communicator.rank]
        tagged.wait_for_reports(lambda: all(ends.reason_of(member) is not None for member in others))
        calls = {self.members.index(member): ends.calls_of(member) for member in others}
        found = first_difference({**calls, self.rank: mine})
        if found is None:
            return error
        text = found.text(error.detail)
        if self.members != tuple(range(self.size)):
            text += f" (the ranks of this group are the job's {list(self.members)})"
        return Desynchronised(text, {self.members[rank]: call for rank, call in found.calls.items()})

    def abort(self, reason: str = "it was aborted") -> None:
        """End the operations in flight; they raise `OperationAborted`. Callable from any thread."""
        if self._forked_from:
            return
        self.communicator.abort(reason)

    def give_up(self, reason: str = "") -> None:
        """Take part in nothing more, unmap the members' memory, and let all members know: who waits for this
        rank's part of an operation, or for a message of it, ends as aborted. From any thread, while no
        operation runs here.

        `close` is still to be called. It may be late: to enter the next view, a member has to be out of what
        it waits for here.
        """
        if self._forked_from:
            return
        if self.tagged is not None:
            self.tagged.give_up(self._cause or reason)
        self.communicator.give_up(f"this rank {reason or CLOSED}")

    async def close(self, reason: str = "") -> None:
        """Abort what is in flight, return once it has drained, and give back the group's memory; idempotent.

        An operation that is complete here completes on slower members, too; later ones end as aborted.
        After a loss call it once the next view has been entered: until then a dead member's last store may
        still be under way into that memory. In a forked child it does nothing.
        """
        if self._forked_from:
            return
        self.abort(f"this rank {reason or CLOSED}")
        if self.tagged is not None:
            await self.tagged.close(self._cause or reason)
        # What is queued is not cancelled: it ends by itself, with `OperationAborted`. A future that its
        # executor cancels is never reported to who waits for it (`concurrent.futures.wait`).
        if self.communicator.fast_path.queued:
            await asyncio.to_thread(self._data_plane.shutdown)
        else:  # its thread is idle: who goes on to the next view need not wait for its end
            self._data_plane.shutdown(wait=False)
        self.communicator.close()
        unwatch, self._unwatch = self._unwatch, lambda: None
        unwatch()


class GroupBlocking(Blocking):
    """See `Group.blocking`."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.communicator, group.submit)
        self._group = group

    @property
    def _on_loop(self) -> OnLoop:
        return self._group.messages().on_loop

    def send(self, x: Any, to: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Do as `Group.send`, on another thread than the loop's."""
        x = taken(x)
        self._on_loop.wait_for(lambda: self._group.send(x, to, tag=tag, timeout=timeout))

    def recv(
        self,
        source: int | None = None,
        *,
        tag: int | None = None,
        out: Any = None,
        timeout: float | None = None,
    ) -> Received:
        """Do as `Group.recv`, on another thread than the loop's."""
        out = taken(out)
        return self._on_loop.wait_for(lambda: self._group.recv(source, tag=tag, out=out, timeout=timeout))

    def split(self, color: int | None, *, key: int = 0, timeout: float | None = None) -> Group | None:
        """Do as `Group.split`, on another thread than the loop's."""
        return self._on_loop.wait_for(lambda: self._group.split(color, key=key, timeout=timeout))

    def subgroup(self, ranks: Sequence[int], *, timeout: float | None = None) -> Group:
        """Do as `Group.subgroup`, on another thread than the loop's."""
        return self._on_loop.wait_for(lambda: self._group.subgroup(ranks, timeout=timeout))


@dataclass(frozen=True, slots=True)
class Home:
    """The membership of a group's process, and its channels: sub-groups are made with them."""

    worker: Worker
    subgroups: Subgroups


async def group(worker: Worker, *, after: int = 0, channel: int = 0, priorities: bool = False) -> Group:
    """Make the group of the first view with an epoch greater than `after`; waits for it and for its members.

    They measure how fast they reach each other, once a process: "auto" chooses by that (`Communicator.tune`).

    Each group of a view in a process at one time needs a channel of its own, below `SUBGROUP_CHANNEL_FIRST`.
    priorities: whether operations have them (`Group.all_reduce`), the same on all members; it costs a round
    of 64 bytes an operation.
    """
    view = await worker.view(after=after)
    made = group_of(worker, view, channel=channel, priorities=priorities)
    made.tagged = await open_tagged(worker, made.members, epoch=made.epoch, channel=channel)
    made.home = Home(worker, await open_subgroups(worker))
    if made.size > 1:
        end_ns = made.deadline_ns()
        await made.run(lambda c: c.tune(deadline_ns=end_ns))
    return made


def hosts_of(view: View, members: Sequence[int]) -> tuple[int, ...]:
    """The host of each member, by number, in the members' order."""
    numbers: dict[str, int] = {}
    hosts = {member.rank: member.host for member in view.members}
    return tuple(numbers.setdefault(hosts[rank], len(numbers)) for rank in members)


def group_of(worker: Worker, view: View, *, channel: int = 0, priorities: bool = False) -> Group:
    """The group of a view that `worker` has already got. Waits for nobody."""
    if channel >= SUBGROUP_CHANNEL_FIRST:
        raise LocalProtocolError(
            f"channel {channel} is for sub-groups; use one below {SUBGROUP_CHANNEL_FIRST}"
        )
    agreed = Agreed(channel=channel, stamp=view.epoch)
    return make_group(worker, view, members=view.ranks, agreed=agreed, priorities=priorities)


def make_group(
    worker: Worker,
    view: View,
    *,
    members: tuple[int, ...],
    agreed: Agreed,
    priorities: bool = False,
    closed: Callable[[], None] = lambda: None,
) -> Group:
    """The group of some members of a view that `worker` has entered, on a channel. Waits for nobody."""
    communicator = Communicator(
        segment=worker.segment,
        peers={rank: worker.peers[rank].memory for rank in members if rank != worker.rank},
        members=members,
        rank=worker.rank,
        epoch=agreed.stamp,
        channel=agreed.channel,
        hosts=hosts_of(view, members),
    )
    record_operations(worker, communicator)
    forget = worker.progress.add_group(GroupWatch(worker.system.name, communicator))
    land = FLIGHTS.add(worker.system.name, communicator)

    def unwatch() -> None:
        forget()
        land()
        stay()
        closed()

    made = Group(communicator, view, priorities=priorities, unwatch=unwatch)
    stay = worker.on_leave(made.close)
    return made
