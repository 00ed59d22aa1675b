"""This process in its job, for code without an event loop: the membership, and groups by ranks.

The loop runs in a thread of its own. The process stays a member until it ends: process groups come and go.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import structlog
import uvloop

from zbmd.actors.process.exit import at_script_end
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.losses import unless_lost
from zbmd.actors.rank.member import Worker, join
from zbmd.actors.view import MemberId, View
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.group.direct import open_direct
from zbmd.collectives.group.group import Group, group
from zbmd.collectives.p2p.direct import DirectMessages, drain
from zbmd.collectives.p2p.tagged import named
from zbmd.transport.clock.patience import patient_timeout
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, UserError, ZbmdError
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp.address import parse_address

log: Final = structlog.stdlib.get_logger("zbmd.collectives.torch")

LEAVE_S_MAX = 5.0
"""Seconds that a process whose script has ended takes to leave, at most."""

TELL_NS_MAX: Final = 1_000_000_000
"""Within that an operation of a view that is over fails."""
ResultT = TypeVar("ResultT")
LOCAL: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Met:
    """The members of a view that have met. address: of this process's host, for the others.

    group: of all of them, in the order of their ranks.
    """

    group: Group
    address: str


class ScriptsEnded(UserError):
    """Ranks have finished their scripts: no process group can be made any more. view: that says so."""

    def __init__(self, members: Sequence[int], view: View) -> None:
        whose = "its" if len(members) == 1 else "their"
        super().__init__(f"{named(members)} finished {whose} script: no process group can be made any more")
        self.view = view

    def lost_of(self, members: Collection[MemberId]) -> tuple[int, ...]:
        """Return the ranks of those of `members` that have ended otherwise."""
        left = {*self.view.ids}
        return tuple(
            each.rank for each in members if each not in left and each.rank not in self.view.finished
        )


class World:
    """The membership of this process. Used from any thread but its own.

    PyTorch's ranks are the places in the view that its default group was made of: 0, 1, … in the order of the
    job's ranks, whichever are left.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._membership = AsyncExitStack()
        self._worker: Worker | None = None
        self._launched: RankEnvironment | None = None
        self._base: Group | None = None
        self._world_size = 1
        self._numbers: tuple[int, ...] = ()
        """The job's rank of each of PyTorch's; none before the first rendezvous here: they are the same."""
        self._met: Group | None = None
        """The default group of a rendezvous, until it is asked for."""
        self._groups: set[Group] = set()
        self._undrained: list[DirectMessages] = []
        """Of closed groups: copies of messages that have not been received."""
        self._guard = threading.Lock()
        self._hears_losses = False
        self._thread = threading.Thread(target=self._serve, name="zbmd-torch", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begin a coroutine on the loop; those begun by one thread take their first steps in order."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def launch(self, environment: RankEnvironment) -> None:
        """Be this rank when the job is joined; the environment of the process says nothing of it."""
        self._launched, self._numbers = environment, tuple(range(environment.world_size))

    @property
    def worker(self) -> Worker | None:
        """The membership; None before the first group."""
        return self._worker

    @property
    def entered(self) -> int:
        """The epoch of the view that this process has entered last; 0 if there was none."""
        return 0 if self._worker is None else self._worker.epoch

    def at_loss(self, hear: Callable[[int, int], object]) -> None:
        """Call `hear` with the job's rank of each member that ends, and the epoch that it was a member of.

        On a thread that may block. Again, it does nothing. Members that have ended by now are reported, too.
        """
        if not self._hears_losses:
            self._hears_losses = True
            self._loop.call_soon_threadsafe(self._listen, hear)

    def _listen(self, hear: Callable[[int, int], object]) -> None:
        worker = self._worker
        if worker is None:
            raise LocalProtocolError("no meeting has made this process a member")

        def lost(rank: int, _incarnation: int = 0, _notice: object = None) -> None:
            threading.Thread(target=hear, args=(rank, worker.epoch), name="zbmd-torch-lost").start()

        worker.on_peer_lost(lost)
        mask = worker.segment.lost_mask()
        for rank in range(mask.bit_length()):
            if mask >> rank & 1:
                lost(rank)

    def meet(self, timeout_s: float, *, after: int) -> Met:
        """Make the group of all members of a view with an epoch greater than `after`; all members call this.

        Raises what `Group.subgroup` raises, and `ScriptsEnded` if a rank has finished its script.
        """
        return self.start(self._meet(timeout_s, after)).result()

    def part(self, places: Sequence[int], timeout_s: float) -> Group:
        """Return the group of these places of the view of the last meeting; just those ranks call it.

        Raises what `Group.subgroup` raises.
        """
        return self.start(self._part(places, timeout_s)).result()

    async def _part(self, places: Sequence[int], timeout_s: float) -> Group:
        return await self._subgroup(await self._standing_base(), places, timeout_s)

    def keep(self, met: Met) -> None:
        """Return this group when the default group is asked for; its members are PyTorch's ranks."""
        self._met, self._numbers = met.group, met.group.members

    def go_on_with(self, met: Met) -> None:
        """Have the members of `met` be PyTorch's ranks; its group is in use already."""
        self._met, self._numbers = None, met.group.members

    def group(self, ranks: Sequence[int], *, rank: int, size: int, timeout_s: float) -> Group:
        """Return the group of these ranks, in this order; all of them call this. No ranks: all of the job.

        rank, size: those that torch expects. Raises `UserError` if the job says
        otherwise, and what `Group.subgroup` raises.
        """
        met, self._met = self._met, None
        if met is not None and not ranks and (met.rank, met.size) == (rank, size):
            return met
        if met is not None:
            self.close(met)
        return self.start(self._open(tuple(ranks), rank, size, timeout_s)).result()

    def close(self, opened: Group, reason: str = "") -> None:
        """Close a group; see `Group.close`. reason: what the members hear."""
        with self._guard:
            self._groups.discard(opened)
        self.start(opened.close(reason)).result()
        if opened.direct is not None:
            opened.direct.close()
            with self._guard:
                self._undrained = [each for each in self._undrained if not each.is_drained]
                self._undrained += [] if opened.direct.is_drained else [opened.direct]

    async def _meet(self, timeout_s: float, after: int) -> Met:
        try:
            async with patient_timeout(timeout_s):
                base = await self._base_group(after)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the ranks of the job did not come together in {timeout_s:g} s: raise the timeout of "
                "init_process_group if replacements take longer to start"
            ) from None
        self._require_present([*base.members, *base.view.finished], base)
        made = await self._subgroup(base, range(base.size), timeout_s)
        own = base.view.member(base.members[base.rank])
        listens = own.tcp_address if own is not None else ""
        return Met(made, parse_address(listens).host if listens else LOCAL)

    async def _open(self, ranks: tuple[int, ...], rank: int, size: int, timeout_s: float) -> Group:
        if ranks and self._numbers:
            base = await self._standing_base()
        else:
            async with patient_timeout(timeout_s):
                base = await self._base_group()
        numbers = self._numbers or tuple(range(self._world_size))
        members, own = [numbers[rank] for rank in ranks] or list(numbers), base.members[base.rank]
        self._require_present(members, base)
        if len(members) != size or own not in members or members.index(own) != rank:
            raise UserError(
                f"torch.distributed takes this process for rank {rank} of {size}, and zbmd for rank "
                f"{own} of {list(members)}: start it by `zbmd-node run`, and leave "
                "rank and world_size to its environment"
            )
        return await self._subgroup(base, [base.members.index(member) for member in members], timeout_s)

    def _require_present(self, members: Sequence[int], base: Group) -> None:
        absent = [member for member in members if member not in base.members]
        finished = [member for member in absent if member in base.view.finished]
        if finished:
            raise ScriptsEnded(finished, base.view)
        if absent:
            raise UserError(f"{named(absent)} is not in the job now: {list(base.members)} are")

    async def _standing_base(self) -> Group:
        """Return the group of all ranks of the last meeting.

        Raises, if one of them has ended since: the others may have made a group with the same ranks before
        they heard of it, and one of the next view would be another.
        """
        base, worker = self._base, self._worker
        if base is None or worker is None:
            raise LocalProtocolError("no meeting has made a group")
        if self._is_over(base, worker):
            finished = [member for member in base.members if member in worker.latest.finished]
            if finished:
                raise ScriptsEnded(finished, worker.latest)
            raise await self._why_over(base, worker)
        return base

    async def _why_over(self, base: Group, worker: Worker) -> ZbmdError:
        """Return what ended a view that no other one has followed yet.

        A rank that has left has said why to whoever waits for it, before its process is gone.
        """
        try:
            await asyncio.wrap_future(base.submit(lambda c: c.barrier(deadline_ns=now_ns() + TELL_NS_MAX)))
        except OperationAborted as error:
            return error
        except ZbmdError:
            pass
        return self._loss_in(base, worker)

    @staticmethod
    def _loss_in(base: Group, worker: Worker) -> ZbmdError:
        mask, advice = worker.segment.lost_mask(), "destroy the process groups, and initialise again"
        lost = tuple(member for member in base.members if mask >> member & 1)
        if lost:
            return MembersLost(lost, f"as a process group was made: {advice}")
        return OperationAborted(f"the view of the process groups is over: {advice}")

    async def _subgroup(self, base: Group, places: Sequence[int], timeout_s: float) -> Group:
        """Make a group, unless a rank is lost meanwhile: others may know of it, and not come."""
        assert self._worker is not None
        made = await unless_lost(self._worker, base.view, self._made(base, places, timeout_s))
        if made is None:
            raise await self._why_over(base, self._worker)
        with self._guard:
            self._groups.add(made)
        return made

    @staticmethod
    async def _made(base: Group, places: Sequence[int], timeout_s: float) -> Group:
        made = await base.subgroup(places, timeout=timeout_s)
        try:
            await open_direct(made, timeout=timeout_s)
        except BaseException:
            await made.close()
            raise
        return made

    async def _base_group(self, after: int = 0) -> Group:
        """Return the group of all ranks, of a view after `after` in which none is known to have ended."""
        if self._worker is None:
            membership = join(enter=False, leaves_kept=True, launched=self._launched)
            self._worker = await self._membership.enter_async_context(membership)
            self._world_size = self._worker.world_size
        base = self._base
        if base is None:
            base = self._base = await group(self._worker, after=after)
        elif base.epoch <= after or self._is_over(base, self._worker):
            over, base = base, await group(self._worker, after=max(base.epoch, after))
            self._base = base
            await over.close()
        return base

    @staticmethod
    def _is_over(base: Group, worker: Worker) -> bool:
        lost = worker.segment.lost_mask()
        return worker.latest.epoch != base.epoch or any(lost >> rank & 1 for rank in base.members)

    def end(self, failed: bool) -> None:
        """The script has ended: tell the others, who may wait for this rank, and leave.

        Operations that are complete here complete on the others, too.
        """
        with self._guard:
            groups = [*self._groups]
        reason = "failed: its script raised an error" if failed else "finished its script"
        for opened in groups if self._base is None else [*groups, self._base]:
            opened.give_up(reason)
        direct = [opened.direct for opened in groups if opened.direct is not None]
        for each in direct:
            each.close()
        if not failed:
            drain([*self._undrained, *direct])
        leaving = self.start(self._membership.aclose())
        try:
            leaving.result(LEAVE_S_MAX)
        except (TimeoutError, ZbmdError) as error:
            log.info("the job was not left in an orderly way", reason=str(error))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_S_MAX)


_world: World | None = None
_guard = threading.Lock()
_registered_in = 0
"""The process whose script's end ends its world."""


def world() -> World:
    """Return the world of this process, made at the first call. A forked child makes its own."""
    global _world, _registered_in
    with _guard:
        if _world is None or _world.pid != os.getpid():
            _world = World()
            if _registered_in != _world.pid:
                _registered_in = _world.pid
                at_script_end(_end)
        return _world


def leave() -> None:
    """Leave the job that this process is in, if it is in one; the next call of `world` joins another."""
    global _world
    _end(False)
    _world = None


def _end(failed: bool) -> None:
    if _world is not None and _world.pid == os.getpid():
        _world.end(failed)


# The store of the last meeting, which this process may serve, by threads that no forked child may join.

_kept: Final[list[Any]] = []


def keep_store(store: Any) -> None:
    """Keep a store in the place of the one before; None: keep none."""
    _kept[:] = [] if store is None else [store]


def _keep_for_ever() -> None:
    """Never end the store in a forked child, which has none of its threads."""
    for store in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


os.register_at_fork(after_in_child=_keep_for_ever)
