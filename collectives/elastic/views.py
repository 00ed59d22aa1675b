"""The views of a process with elastic groups: it asks for each that comes, and enters it when its groups may.

The driver of `zbmd.collectives.elastic.views_machine`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Protocol, assert_never
from weakref import WeakKeyDictionary

import structlog

from zbmd.actors.rank.member import ComingView, Worker
from zbmd.actors.view import Member, MemberId, View
from zbmd.collectives.elastic import views_machine as vm
from zbmd.collectives.elastic.views_machine import VIEWS
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import ZbmdError
from zbmd.transport.memory.segment import PeerMemory
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.collectives.elastic")


class Follower(Protocol):
    """An elastic group, as its process's views know it."""

    async def cut(self) -> None:
        """End what is under way; return once it has drained."""
        ...

    def follow(self, epoch: int) -> None:
        """Come to the view of `epoch` when nothing is under way."""
        ...

    def look(self) -> None:
        """Another view has been entered: members may be lost of whom no notice has come."""
        ...


class ElasticViews:
    """Those of one process; used on the worker's loop. See `views_of`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._groups: dict[int, Follower] = {}
        self._last = 0
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._drains: set[asyncio.Task[None]] = set()
        self._coming: ComingView | None = None
        self._error: ZbmdError | None = None
        self._memories: Mapping[MemberId, PeerMemory] = {}
        machine = vm.ViewsMachine()
        self._tap = Tap(worker.recorder, VIEWS, "elastic-views", machine, {})
        self.view = View(epoch=0, members=())
        self._see()

    def register(self, group: Follower) -> int:
        """Take up a group; its number."""
        if not self._groups:
            self._see()
        self._last += 1
        self._groups[self._last] = group
        self._ask()
        return self._last

    def entered(self, number: int, members: tuple[MemberId, ...], ranks: tuple[int, ...]) -> None:
        """A group has gone to the view entered last."""
        self._feed(vm.GroupEntered(group=number, members=members, ranks=ranks))

    def closed(self, number: int) -> None:
        """A group has been closed."""
        if self._groups.pop(number, None) is None:
            return
        self._feed(vm.GroupClosed(group=number))
        if not self._groups and self._task is not None:
            self._task.cancel()
            self._task = None

    async def after(self, epoch: int) -> View:
        """The view entered last, once it is newer than `epoch`. Raises what ended the wait for it."""
        while self.view.epoch <= epoch:
            self._ask()
            self._news.clear()
            await self._news.wait()
            if self._error is not None and self.view.epoch <= epoch:
                raise self._error
        return self.view

    def _ask(self) -> None:
        """Ask for the next view, unless that is under way."""
        if (self._task is None or self._task.done()) and not self._worker.alone:
            self._error = None
            self._task = asyncio.ensure_future(self._run())

    def _see(self) -> None:
        """Take over the view that the process is in."""
        worker = self._worker
        if worker.epoch == self.view.epoch:
            return
        members = [Member(rank=worker.rank, incarnation=worker.incarnation, address="")]
        for peer in worker.peers.values():
            members.append(Member(rank=peer.rank, incarnation=peer.incarnation, address=""))
        members.sort(key=lambda member: member.rank)
        # The view that was entered, with its members' hosts, if no newer one is known.
        latest = worker.latest
        built = View(epoch=worker.epoch, members=tuple(members))
        self.view = latest if latest.epoch == worker.epoch else built
        self._memories = self._held()

    def _held(self) -> dict[MemberId, PeerMemory]:
        peers = self._worker.peers.values()
        return {MemberId(rank=p.rank, incarnation=p.incarnation): p.memory for p in peers}

    async def _run(self) -> None:
        try:
            while self._groups:
                coming = await self._worker.coming_view(after=self.view.epoch)
                members = coming.view.ids
                kept = tuple(m for m in members if self._keeps(m, coming))
                self._coming = coming
                self._feed(vm.ViewReady(epoch=coming.view.epoch, members=members, kept=kept))
                while self.view.epoch < coming.view.epoch:
                    self._news.clear()
                    await self._news.wait()
        except ZbmdError as error:
            self._error = error
            self._news.set()

    def _keeps(self, member: MemberId, coming: ComingView) -> bool:
        if member.rank == self._worker.rank:
            return True
        memory = coming.memories[member.rank]
        return self._memories.get(member) is memory

    def _feed(self, event: vm.ViewsEvent) -> None:
        for action in self._tap.handle(event, now_ns=now_ns()):
            self._perform(action)
        self._tap.check_invariants()

    def _perform(self, action: vm.ViewsAction) -> None:
        match action:
            case vm.Cut(group=number):
                task = asyncio.ensure_future(self._drain(number))
                self._drains.add(task)
                task.add_done_callback(self._drains.discard)
            case vm.Enter():
                assert self._coming is not None
                self.view, self._coming = self._worker.enter(self._coming), None
                self._memories = self._held()
                self._news.set()
                for group in self._groups.values():
                    group.look()
            case vm.Follow(group=number, epoch=epoch):
                self._groups[number].follow(epoch)
            case _:
                assert_never(action)

    async def _drain(self, number: int) -> None:
        group = self._groups.get(number)
        if group is not None:
            await group.cut()
        self._feed(vm.Drained(group=number))


_views: WeakKeyDictionary[Worker, ElasticViews] = WeakKeyDictionary()


def views_of(worker: Worker) -> ElasticViews:
    """This process's."""
    known = _views.get(worker)
    if known is None:
        known = _views[worker] = ElasticViews(worker)
    return known
