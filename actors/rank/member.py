"""A rank's membership in its job: `join`, views, peers, reports, leave.

Each pair of ranks has one link, dialed by the higher rank, whatever the view. Links are made in the
background as soon as a view is known; segments and the lost mask change only inside `Worker.view`, when the
job itself asks for the next view. Until then the dead stay marked, so that no operation of the old view can
wait for a process of the new one.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import structlog

from zbmd.actors.contracts import fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.core.ref import scope_of_job
from zbmd.actors.hangs.collector import collector_address
from zbmd.actors.hangs.introspection import INSIDE_ACTOR, Inside
from zbmd.actors.hangs.watchdog import Watchdog
from zbmd.actors.process.exit import noting_failure
from zbmd.actors.process.forks import check_is_no_child, membership
from zbmd.actors.process.log import RankLogFile, log_to_stderr, rank_logger
from zbmd.actors.process.spare import rank_given
from zbmd.actors.rank import host_contracts
from zbmd.actors.rank.environment import (
    RankEnvironment,
)
from zbmd.actors.rank.links import (
    Callbacks,
    MemberLinks,
    OnLeave,
    OnLinkEnded,
    OnPeerLost,
    RankRoutes,
    register,
)
from zbmd.actors.rank.remote_links import MemoryOffered
from zbmd.actors.replay.process_capture import CaptureSettings, ProcessCapture
from zbmd.actors.replay.recording import captured_system
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.driver import PROBATION_S, Upgraded
from zbmd.actors.view import Member, View, rank_name, rank_of
from zbmd.transport import kill_points as faults
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.clock.patience import PATIENCE
from zbmd.transport.errors import LocalProtocolError, UserError, ZbmdError
from zbmd.transport.handshake.cookie import load_or_create_cookie
from zbmd.transport.host import process as descriptors
from zbmd.transport.identity import Identity
from zbmd.transport.memory.arena import arena_joined, arena_left
from zbmd.transport.memory.kept import exclusively, take_kept_fd
from zbmd.transport.memory.segment import PeerMemory, PeerSegment, Segment
from zbmd.transport.native._native import now_ns
from zbmd.transport.shm.connect import Endpoint, dial
from zbmd.transport.shm.death_notice import DeathNotice, DeathWatch, LifeThread

log: Final = structlog.stdlib.get_logger("zbmd.actors.member")

INBOX_BYTES_DEFAULT = 24 << 20
REPORTS_WAITING_MAX = 256
LOSS_CALLBACKS_MAX = 64
LEAVE_CALLBACKS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Another member of the view that this process entered last."""

    rank: int
    incarnation: int
    memory: PeerMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ComingView:
    """A view that may be entered: all its members are linked. memories: the members', by rank."""

    view: View
    memories: Mapping[int, PeerMemory]


class MemberActor(Actor):
    """`rankN/member`: receives messages of the host."""

    captured = False

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @on(host_contracts.ViewInstalled)
    async def view_installed(self, message: host_contracts.ViewInstalled) -> None:
        """A view was installed."""
        self._worker.installed(message.view)

    @on(host_contracts.EnterView)
    async def enter_view(self, message: host_contracts.EnterView) -> None:
        """All members are linked."""
        self._worker.all_linked(message.epoch)

    @on(host_contracts.MemberDown)
    async def member_down(self, message: host_contracts.MemberDown) -> None:
        """A peer died."""
        self._worker.down(message)

    @on(MemoryOffered)
    async def memory_offered(self, message: MemoryOffered) -> None:
        """Take the memory that a member on another host offers."""
        rank = rank_of(sender_process())
        if rank is not None:
            self._worker.memory_offered(rank, message)

    @on(host_contracts.ActorsRequest)
    async def actors(self, message: host_contracts.ActorsRequest) -> host_contracts.ActorsReply:
        """Return actor names for `zbmd-node status`."""
        names = [info.name for info in self.system.describe()]
        return host_contracts.ActorsReply(names=tuple(names[: host_contracts.ACTORS_NAMED_MAX]))


class Worker:
    """This process as a member of its job. Returned by `join`; use it on its event loop's thread."""

    keeps_lost_memory: bool = True
    """Whether the memory of a member that has ended stays mapped until the next view is entered.

    If not, its pages are free for its replacement, and making a group of this view with it raises `PeerLost`.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        identity: Identity,
        segment: Segment,
        cookie: bytes,
        capture: ProcessCapture,
        clock: HybridClock,
        *,
        alone: bool,
    ) -> None:
        self.rank = environment.rank
        self.local_rank = environment.local_rank
        self.world_size = environment.world_size
        self.incarnation = environment.incarnation
        self.job = environment.job
        self.segment = segment
        self.epoch = 0
        self.deadlines = derive(environment.recovery_budget_ns)
        self.capture = capture
        self.recorder = capture.recorder
        self.system = _system(identity, capture)
        self.system.open_directory(alone=alone)
        self.alone = alone
        self.progress = Watchdog(
            identity.name,
            self.system,
            deadline_ns=environment.progress_deadline_ns,
            address=None if alone else collector_address(environment.node_address),
            on_extend=lambda: segment.extend_waits(PATIENCE.extend()),
        )
        self._environment = environment
        self._life = LifeThread(segment)
        self._watch = DeathWatch(segment, asyncio.get_running_loop())
        self._endpoint = Endpoint(
            identity=identity,
            cookie=cookie,
            segment=segment,
            clock=clock,
            deadlines=self.deadlines,
            recorder=self.recorder,
        )
        self._routes = None if alone else RankRoutes(self.system, environment, cookie, self.deadlines)
        self._links = MemberLinks(
            self.rank,
            self.system,
            self._endpoint,
            host=environment.host,
            on_client=None if self._routes is None else self._routes.accepted,
            local_rank=environment.local_rank,
            on_confirmed=self._confirmed,
            on_lost=self._link_lost,
            on_ended=self._link_ended,
        )
        self._view = View(epoch=0, members=())
        self._peers: dict[int, Peer] = {}
        self._callbacks = Callbacks()
        self._reports: deque[bytes] = deque()
        self._reports_changed = asyncio.Event()
        self._reports_sent = asyncio.Event()
        self._loop_thread = threading.get_ident()
        self._leaving = False
        self._telling: set[asyncio.Task[None]] = set()
        """At most one for each lost member."""
        self._reporter: asyncio.Task[None] | None = None
        folder = os.environ.get("ZBMD_LOG_DIR")
        self._log_file = RankLogFile(Path(folder) / f"{self.system.name}.jsonl") if folder else None
        self.log = rank_logger(self._log_file, rank=self.rank, incarnation=self.incarnation)

    def __repr__(self) -> str:
        return f"<Worker {self.system.name}#{self.incarnation} of {self.world_size}, epoch {self.epoch}>"

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The other members of the view entered last, by rank."""
        return MappingProxyType(self._peers)

    @property
    def latest(self) -> View:
        """The newest known view, entered or not."""
        return self._view if self.alone else self._links.view

    async def view(self, *, after: int) -> View:
        """Wait for a view with an epoch greater than `after`, enter it, and return it.

        Entering is collective: it happens once every member waits for it here and is linked with every
        other, and every incarnation that left is proven dead, so that its memory may be reused. Sets `epoch`
        and `peers`, clears the lost mask of the members, and watches them. Raises `DeadlineExceeded` if a
        member does not link up in time, and `LocalProtocolError` in a world of one, which has no other view.
        No deadline limits how long other members take to ask for the view.
        """
        return self.enter(await self.coming_view(after=after))

    async def coming_view(self, *, after: int) -> ComingView:
        """Wait until a view may be entered, and stay in the current one; the first half of `view`.

        The caller must pass the result to `enter` before calling this again: other members may already be
        in that view and wait there.
        """
        if self.alone:
            if after >= self._view.epoch:
                raise LocalProtocolError("this process runs alone: a world of one has no other view")
            return ComingView(view=self._view, memories={})
        host = self.system.ref(f"{host_contracts.NODE_NAME}/{host_contracts.HOST_ACTOR}")
        while True:
            view, memories = await self._links.ready(after=after)
            await host.tell(
                host_contracts.Linked(rank=self.rank, incarnation=self.incarnation, epoch=view.epoch)
            )
            if await self._links.entered(view.epoch):
                return ComingView(view=view, memories=memories)

    def enter(self, coming: ComingView) -> View:
        """Enter the view that `coming_view` returned, without waiting; see `view`."""
        if not self.alone:
            self._enter(coming.view, coming.memories)
        return coming.view

    async def upgrade(
        self, old: type[Actor], new: type[Actor], *, canaries: int = 1, probation_s: float = PROBATION_S
    ) -> Upgraded:
        """Upgrade all actors of class `old` to `new`, in all ranks of the view entered last.

        One rank calls it. The lowest `canaries` ranks go first. Ranks that join later, including
        replacements, run the new version from their first message on. See
        `zbmd.actors.upgrade.driver.upgrade`.
        """
        ranks = sorted([self.rank, *self._peers])
        processes = [rank_name(rank) for rank in ranks]
        return await self.system.upgrade(
            old, new, processes=processes, canaries=canaries, probation_s=probation_s, lasting=True
        )

    def on_peer_lost(self, callback: OnPeerLost) -> Callable[[], None]:
        """Call `callback` on the loop when a member of the entered view dies; return what undoes it."""
        return register(self._callbacks.peer_lost, callback, LOSS_CALLBACKS_MAX)

    def on_link_ended(self, callback: OnLinkEnded) -> Callable[[], None]:
        """Call `callback` on the loop when the link to a member of any view has ended.

        By then everything that arrived over the link is in the mailboxes, whereas a notice of `on_peer_lost`
        may come before the last messages of the dead. Returns a function that undoes it.
        """
        return register(self._callbacks.link_ended, callback, LOSS_CALLBACKS_MAX)

    def on_leave(self, callback: OnLeave) -> Callable[[], None]:
        """Await `callback` when this process leaves, before anything is closed, in the order of registration.

        That is the time to tell peers what not to wait for. Returns a function that undoes it.
        """
        return register(self._callbacks.leaving, callback, LEAVE_CALLBACKS_MAX)

    def is_linked(self, rank: int, incarnation: int) -> bool:
        """Whether the link to this member is up."""
        return self._links.stands(rank, incarnation)

    def report(self, payload: dict[str, Any]) -> None:
        """Report plain data to the host's owner, at most `REPORT_BYTES_MAX` encoded. From any thread.

        Telemetry: never waits; beyond `REPORTS_WAITING_MAX` pending reports the oldest is dropped. In a world
        of one, reports are discarded.
        """
        data = msgspec.msgpack.encode(payload)
        if len(data) > host_contracts.REPORT_BYTES_MAX:
            raise LocalProtocolError(
                f"a report must take at most {host_contracts.REPORT_BYTES_MAX} bytes, not {len(data)}"
            )
        if self.alone:
            return
        if len(self._reports) >= REPORTS_WAITING_MAX:
            self._reports.popleft()
        self._reports.append(data)
        if threading.get_ident() == self._loop_thread:
            self._reports_changed.set()
        else:
            self.system.loop.call_soon_threadsafe(self._reports_changed.set)

    async def reported(self) -> bool:
        """Wait until the host has all reports sent so far; return False on a timeout."""
        if self.alone:
            return True
        try:
            async with asyncio.timeout(self.deadlines.flush_ns / 1e9):
                while self._reports:
                    self._reports_sent.clear()
                    await self._reports_sent.wait()
                host = self.system.ref(f"{host_contracts.NODE_NAME}/{host_contracts.HOST_ACTOR}")
                await host.ask(host_contracts.ReportsAsk(), timeout=self.deadlines.flush_ns / 1e9)
        except (TimeoutError, ZbmdError) as error:
            log.info("the host did not confirm the reports", reason=str(error))
            return False
        return True

    async def leave(self) -> None:
        """Close groups, say goodbye to the peers, and release links, threads and descriptors. Idempotent."""
        while self._callbacks.leaving:
            try:
                await self._callbacks.leaving.pop(0)()
            except ZbmdError as error:  # the rest is still released
                log.warning("a leave callback failed", reason=str(error))
        if self._reporter is not None:
            self._leaving = True
            self._reports_changed.set()
            await asyncio.wait([self._reporter], timeout=self.deadlines.flush_ns / 1e9)
            self._reporter.cancel()
            await asyncio.wait([self._reporter])
            self._reporter = None
        await self._links.settle()
        await self._links.close()
        await self.system.stop()
        if self._telling:
            await asyncio.wait(self._telling)
        await self._links.drain()
        if (transfers := self._links.rdma_transfers) is not None:
            self.log.info("rdma_transfers", **transfers._asdict())
        self.progress.close()
        self._watch.close()
        self._life.goodbye()
        self._peers.clear()
        arena_left(self.segment.arena)
        self.segment.close()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    # Called by `join` and the member actor.

    async def open(self) -> None:
        """Listen, dial the host, and ask to be in the next view."""
        faults.arm(self.system.name, self.incarnation, job=self._environment.job)
        self.progress.start(self.rank, self.incarnation)
        arena_joined(self.segment.arena)
        if self.alone:
            member = Member(rank=0, incarnation=self.incarnation, address="")
            self._view = View(epoch=1, members=(member,))
            self.epoch = 1
            return
        await self.system.spawn(MemberActor, self, name=host_contracts.MEMBER_ACTOR)
        await self.system.spawn(Inside, name=INSIDE_ACTOR)
        await self._links.code.open()
        address = f"{self._environment.node_address}-{self.system.name}-{self.incarnation}"
        self._links.listen(address)
        listen = self._environment.listen
        tcp_address = await self._links.listen_tcp(listen) if listen else ""
        if listen and self._routes is not None:
            self._routes.listen(address)
        host = await dial(self._environment.node_address, self._endpoint)
        self.system.attach(host)
        join_message = host_contracts.Join(
            rank=self.rank,
            incarnation=self.incarnation,
            address=address,
            host=self._environment.host,
            tcp_address=tcp_address,
        )
        await self.system.ref(f"{host_contracts.NODE_NAME}/{host_contracts.HOST_ACTOR}").tell(join_message)
        self._reporter = asyncio.get_running_loop().create_task(self._send_reports(), name="reports")

    def installed(self, view: View) -> None:
        """Take the view that the host installed."""
        self._links.install(view)
        processes = [(rank_name(member.rank), member.incarnation) for member in view.members]
        self.system.open_directory(alone=False).enter(view.epoch, processes)

    def all_linked(self, epoch: int) -> None:
        """Note that all members of the view are linked."""
        self._links.may_enter(epoch)

    def down(self, message: host_contracts.MemberDown) -> None:
        """Note that a member died."""
        if message.confirmed:
            self._links.confirmed(message.rank, message.incarnation)

    def memory_offered(self, rank: int, message: MemoryOffered) -> None:
        """Take the memory that a member on another host offers."""
        self._links.offered(rank, message)

    def _enter(self, view: View, memories: Mapping[int, PeerMemory]) -> None:
        """Swap the peers without an await, so that nothing runs between the old view and the new."""
        entered: dict[int, Peer] = {}
        for member in view.members:
            if member.rank == self.rank:
                continue
            known, memory = self._peers.get(member.rank), memories[member.rank]
            if known is not None and known.memory is memory:
                entered[member.rank] = known
                continue
            self._watch.unwatch(member.rank)
            # Cleared before the watch begins: if this one is dead too, the watch will set it again.
            self.segment.clear_lost(member.rank)
            if isinstance(memory, PeerSegment):
                self._watch.watch(memory, self._noticed(member.incarnation))
            entered[member.rank] = Peer(rank=member.rank, incarnation=member.incarnation, memory=memory)
        for rank, peer in self._peers.items():
            if entered.get(rank) is not peer:
                peer.memory.close()
        self._peers = entered
        self.epoch = view.epoch
        for peer in entered.values():
            if not self._links.reaches(peer.rank, peer.incarnation, peer.memory):
                self._link_lost(peer.rank, peer.incarnation, False)
        members = ", ".join(f"{rank_name(m.rank)}#{m.incarnation}" for m in view.members)
        self.recorder.note(f"entered the view of epoch {view.epoch}: {members}")

    def _confirmed(self, rank: int, incarnation: int) -> None:
        """An incarnation is proven dead: memory that it could write may be reused."""
        peer = self._peers.get(rank)
        if peer is not None and peer.incarnation == incarnation:
            self.segment.end_proven(rank)
            if not self.keeps_lost_memory and isinstance(peer.memory, PeerSegment):
                peer.memory.end()

    def _link_ended(self, rank: int, incarnation: int) -> None:
        for callback in list(self._callbacks.link_ended):
            callback(rank, incarnation)

    def _link_lost(self, rank: int, incarnation: int, clean: bool) -> None:
        """The link to a member on another host ended: report it to the host, which knows who is alive."""
        peer = self._peers.get(rank)
        if peer is None or peer.incarnation != incarnation or isinstance(peer.memory, PeerSegment):
            return
        self.segment.set_lost(rank)
        notice = DeathNotice(at_ns=now_ns(), clean=clean)
        loop = asyncio.get_running_loop()
        loop.call_soon(self._noticed(incarnation, "its link ended"), rank, notice)
        if not clean and not self._leaving:
            task = loop.create_task(self._tell_of_lost_link(rank, self.epoch), name="link lost")
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_of_lost_link(self, peer: int, epoch: int) -> None:
        lost = host_contracts.LinkLost(rank=self.rank, incarnation=self.incarnation, epoch=epoch, peer=peer)
        try:
            await self.system.ref(f"{host_contracts.NODE_NAME}/{host_contracts.HOST_ACTOR}").tell(lost)
        except ZbmdError as error:
            log.info("could not report a lost link to the host", peer=rank_name(peer), reason=str(error))

    def _noticed(
        self, incarnation: int, reason: str = "its life thread ended"
    ) -> Callable[[int, DeathNotice], None]:
        def call(slot: int, notice: DeathNotice) -> None:
            self.recorder.death(rank_name(slot), incarnation, clean=notice.clean, reason=reason)
            for callback in list(self._callbacks.peer_lost):
                callback(slot, incarnation, notice)

        return call

    async def _send_reports(self) -> None:
        host = self.system.ref(f"{host_contracts.NODE_NAME}/{host_contracts.HOST_ACTOR}")
        while not self._leaving or self._reports:
            await self._reports_changed.wait()
            self._reports_changed.clear()
            while self._reports:
                message = host_contracts.Report(
                    rank=self.rank, incarnation=self.incarnation, payload=self._reports[0]
                )
                try:
                    await host.tell(message)
                except ZbmdError as error:
                    log.info("a report was lost", reason=str(error))
                if self._reports:
                    self._reports.popleft()
            self._reports_sent.set()


@asynccontextmanager
async def join(
    *,
    arena: int | None = None,
    inbox_bytes: int = INBOX_BYTES_DEFAULT,
    enter: bool = True,
    outlives: bool = False,
    leaves_kept: bool = False,
    launched: RankEnvironment | None = None,
) -> AsyncGenerator[Worker, None]:
    """Join the job that this process was started for, and leave it at the end.

    arena: bytes of shared memory for arrays, by default ZBMD_ARENA or 64 MiB; inbox_bytes: memory that peers
    may write to. Without a launcher this is a world of one. Returns once the first view is entered. With
    `enter=False` it returns before that, and `Worker.view` enters it: the other ranks continue without this
    one until then, so slow preparations belong in between. outlives: have the arena outlive this process, for
    its replacement, which then begins to write to it: no other rank may still want to read there.
    leaves_kept: leave the launcher's memory to `take_kept_file`. launched: what a launcher told this process,
    if not by its environment. A spare waits here first. Raises `UserError` on a wrong environment and in a
    child of a rank, `OutOfMemory`, and `PeerLost` if the host is gone. A child that was forked within does
    not leave: it ends.
    """
    await rank_given()
    found = launched or RankEnvironment.read(os.environ)
    if launched is not None or found is None:
        log_to_stderr()  # as the launcher does for its ranks
    else:
        check_is_no_child(os.environ)
    environment = found or RankEnvironment.alone(os.environ)
    if not 0 <= environment.rank < environment.world_size:
        raise UserError(
            f"RANK: expected 0 to {environment.world_size - 1} (WORLD_SIZE={environment.world_size}), "
            f"got {environment.rank}."
        )
    cookie = load_or_create_cookie() if found is not None else b"\0" * 32
    identity, clock = _identity(environment), HybridClock()
    capture = ProcessCapture(identity, clock, CaptureSettings.read(os.environ, job=environment.job))
    descriptors.make_room(environment.world_size)
    try:
        taken = None if leaves_kept else take_kept_fd(os.environ, wanted=outlives)
        with exclusively(taken) as kept_fd:
            segment = Segment.create(
                slot=environment.rank,
                incarnation=environment.incarnation,
                arena_bytes=environment.arena_bytes if arena is None else arena,
                inbox_bytes=inbox_bytes,
                slots=environment.world_size,
                kept_fd=kept_fd,
            )
            worker = Worker(environment, identity, segment, cookie, capture, clock, alone=found is None)
            try:
                await worker.open()
                if enter:
                    await worker.view(after=0)
                with membership() if found is not None else nullcontext(), noting_failure():
                    yield worker
            finally:
                await worker.leave()
    except BaseException as error:
        capture.failed(error)
        raise
    finally:
        capture.close("left")


def _system(identity: Identity, capture: ProcessCapture) -> ActorSystem:
    """Return the actor system; actors are captured only into a whole log, as the ring would be too small."""
    new_system = ActorSystem if capture.whole is None else captured_system
    return new_system(
        identity.name,
        incarnation=identity.incarnation,
        recorder=capture.recorder,
        scope=scope_of_job(identity.job),
    )


def _identity(environment: RankEnvironment) -> Identity:
    return Identity(
        name=rank_name(environment.rank),
        pid=os.getpid(),
        uid=os.getuid(),
        incarnation=environment.incarnation,
        job=environment.job,
        contracts=fingerprints(),
    )
