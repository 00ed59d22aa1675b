"""A node of a cluster made for one job: how it founds or joins the cluster; the driver of `SingleJob`.

A node's id has its number in the upper bits, where that is known: so the nodes of a view are in the order of
their numbers, slots are given in that order, and of two halves the one with the lowest number goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, assert_never

from zbmd.actors.bootstrap.merge import Bootstrap, Role
from zbmd.actors.cluster.jobs import single_job as o
from zbmd.actors.cluster.jobs.node_driver import JobHost
from zbmd.actors.cluster.jobs.single_job import ONE_JOB
from zbmd.actors.cluster.node.actors import NodeActors
from zbmd.actors.cluster.node.incarnation import node_capture
from zbmd.actors.cluster.node.incarnations import JoinDelayed, NodeConfig, NodeEvent, RunningPartFound
from zbmd.actors.cluster.node.join import Joiner, ask_admission, own_addresses
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import EphemeralNodeState
from zbmd.actors.cluster.state.job_table import REASON_CHARACTERS_MAX, JobSpec, Stop, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.contracts import Contract
from zbmd.actors.replay.process_capture import CaptureSettings
from zbmd.transport.capture.tap import Tap
from zbmd.transport.clock.deadlines import SECOND_NS, derive
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired
from zbmd.transport.native._native import now_ns
from zbmd.transport.tcp.address import TcpAddress
from zbmd.transport.tcp.sockets import PortInUse, free_port, listen_on, resolve

NAME_CHARACTERS_MAX: Final = 64
RANDOM_BITS: Final = 32
LAST_NUMBER: Final = (1 << 16) - 1
"""Of nodes that have none: they come after those that do."""


def node_id_of(number: int | None, *, founds: bool) -> int:
    """A fresh id for a node of that number. founds: whether a node without one founds the cluster."""
    if number is None:
        number = 0 if founds else LAST_NUMBER
    return number << RANDOM_BITS | secrets.randbelow((1 << RANDOM_BITS) - 1) + 1


def node_name(given: str, number: int | None) -> str:
    """Return a node's name for people: what is given or the host's, with the node's number at the end."""
    given = given or socket.gethostname().partition(".")[0]
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in given).strip("_.-")
    # Two nodes of one host are two, whether they have numbers or not.
    end = f"-{secrets.token_hex(2) if number is None else number}"
    if number is not None and kept.endswith(end):
        end = ""
    return f"{kept[: NAME_CHARACTERS_MAX - len(end)] or 'node'}{end}"


def job_id_of(name: str) -> int:
    """Return the id of a job that all of its nodes know by this name."""
    return (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 2) + 1


async def configured(bootstrap: Bootstrap, config: NodeConfig) -> NodeConfig:
    """The configuration with what the launcher says: where to listen, whom to ask, whether to found.

    For every role that has join addresses or a store. Raises `UserError` where an address cannot be.
    """
    listen = TcpAddress(host=bootstrap.local, port=bootstrap.port)
    config = replace(
        config, listen=listen, joins=bootstrap.join_addresses, founds=bootstrap.role is Role.FOUND
    )
    if bootstrap.role is Role.STORE:
        # Its address is in the store before it listens there.
        listen = TcpAddress(host=bootstrap.local, port=bootstrap.port or free_port())
        await _require_free(listen)
        return replace(config, listen=listen, joins=())
    if bootstrap.role is not Role.HOLDER:
        return config
    join_address = bootstrap.join_addresses[0]
    listen_there = TcpAddress(host=bootstrap.local, port=join_address.port)
    if await _is_here(join_address, listen_there) and await _is_free(listen_there):
        return replace(config, listen=listen_there, founds=True)
    return joining(bootstrap, config)


def joining(bootstrap: Bootstrap, config: NodeConfig) -> NodeConfig:
    """The configuration of one who holds no join address: it listens elsewhere, and asks there."""
    ports = {join_address.port for join_address in bootstrap.join_addresses}
    port = 0 if bootstrap.port in ports else bootstrap.port
    return replace(config, listen=TcpAddress(host=bootstrap.local, port=port), founds=False)


async def _is_here(join_address: TcpAddress, listen: TcpAddress) -> bool:
    """Whether a join address is on this host; by its name too, which may mean an address before a gateway."""
    if not listen.host and join_address.host in (socket.gethostname(), socket.getfqdn()):
        return True
    return bool(await own_addresses((join_address,), listen, derive().dial_ns))


async def _is_free(listen: TcpAddress) -> bool:
    try:
        await _require_free(listen)
    except PortInUse:
        return False
    return True


async def _require_free(listen: TcpAddress) -> None:
    """Raise `PortInUse` if the port is taken there, and other `UserError`s."""
    found = await resolve(listen, now_ns() + derive().dial_ns, passive=True)
    for each in listen_on(found, asked=str(listen)):
        each.close()


LEAVE_S: Final = 10.0
"""To leave the cluster in order, once the job is over."""
LOOK_S: Final = 1.0
"""Between two looks for another part of the run, while nodes are missing."""
LAST_CALL_S: Final = 1.5
"""Enough nodes wait for more before the job begins: a part in which it runs comes in that time."""


def joiner(config: NodeConfig) -> Joiner:
    """Return a node of this run that only asks."""
    return Joiner(
        node_id=0,
        name="",
        host="",
        recovery_budget_ns=0,
        cookie=config.cookie,
        settings=config.settings,
        deadlines=derive(),
        run=config.run,
    )


class OneJobNode:
    """One node, and a `ClusterListener`. A class that derives from it runs the ranks and tells its user.

    node_id: its id; nodes_min: the job begins with so many; patience_ns: how long missing nodes are waited
    for; captured: where it records; meets_at: where another part of the run may be.
    """

    def __init__(
        self,
        config: NodeConfig,
        spec: JobSpec,
        *,
        node_id: int,
        nodes_min: int,
        patience_ns: int,
        captured: CaptureSettings,
        meets_at: Sequence[TcpAddress] = (),
    ) -> None:
        self.spec, self._config, self._meets_at = spec, config, meets_at
        self.loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        about: dict[str, int] = {
            "job": spec.job,
            "nodes_min": nodes_min,
            "nodes_max": spec.nodes_max,
            "patience_ns": patience_ns,
            "leave_ns": round(LEAVE_S * SECOND_NS),
            "grace_ns": spec.stop_grace_ns,
            "last_call_ns": round(LAST_CALL_S * SECOND_NS),
        }
        self.machine = o.SingleJob(**about)
        self.clock = HybridClock()
        self.capture = node_capture(config.name, self.clock, captured)
        self._tap = Tap(self.capture.recorder, ONE_JOB, "one job", self.machine, about)
        state = EphemeralNodeState(node_id)
        self.node = ClusterNode(dataclasses.replace(config, capture=captured), state, self._hear)
        self.actors = NodeActors(
            self.node,
            cookie=config.cookie,
            settings=config.settings,
            linked=False,
            on_listening=partial(setattr, self.node, "actors_at"),
        )
        self.jobs = self.hosting()

    # -- what differs ------------------------------------------------------------------------------------

    def hosting(self) -> JobHost:
        """Return what runs this node's ranks."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Tell the user."""
        raise NotImplementedError

    def given(self) -> JobSpec:
        """Return the job as it is given to the cluster."""
        return self.spec

    def gives(self) -> None:
        """Give the job to the cluster, now or later."""
        self.node.command(Submit(spec=self.given()))

    def sees(self, view: ClusterView) -> None:
        """The node acts on a view."""

    def is_out(self) -> None:
        """The node is in no view any more."""

    # -- its course --------------------------------------------------------------------------------------

    @property
    def listen_host(self) -> str:
        """The address on which the ranks listen for other hosts."""
        host = self._config.listen.host
        return f"[{host}]" if ":" in host else host

    async def live(self) -> int:
        """Run until the job is over and this node has left; return the exit code."""
        self.node.listen(self)
        looking = self.loop.create_task(self._look_for_others())
        living = self.loop.create_task(self.node.run())
        hosting = self.loop.create_task(self._host())
        try:
            first: list[asyncio.Future[Any]] = [living, hosting, self._ended]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                return self._ended.result()
            if hosting.done():
                hosting.result()  # it only ever ends by an error
            living.result()
            return await self._ended
        finally:
            if self._timer is not None:
                self._timer.cancel()
            await self.jobs.settle()
            for task in (living, hosting, looking):
                task.cancel()
            await asyncio.wait([living, hosting, looking])
            await self.actors.close()
            await self.jobs.close()

    async def _host(self) -> None:
        """Run the job's ranks, and what tells them where others are, until that fails."""
        await self.jobs.open()
        await asyncio.gather(self.jobs.failed(), self.actors.failed())

    async def _look_for_others(self) -> None:
        """While nodes are missing, look whether the run has begun again where its nodes are to meet.

        A founder that is back there hears from a part in which the job runs where that is.
        """
        while True:  # until the run is over
            await asyncio.sleep(LOOK_S)
            looks = self.machine.misses_nodes or self.machine.age_to_tell_ns is not None
            for address in self._meets_at if looks else ():
                with contextlib.suppress(ZbmdError, OSError):
                    reply, _ = await ask_admission(address, self._seeker())
                    if reply.member and not reply.refused:
                        self.put(o.OtherPartFound(node=reply.node, lowest=reply.lowest))

    def _seeker(self) -> Joiner:
        seeker, age_ns = joiner(self._config), self.machine.age_to_tell_ns
        if age_ns is None:
            return seeker
        return dataclasses.replace(seeker, runs_at=self.node.me, age_ns=age_ns)

    def _hear(self, event: NodeEvent) -> None:
        if isinstance(event, JoinDelayed):
            self.say(f"not let in yet: {event.text}")
        elif isinstance(event, RunningPartFound):
            self.put(o.RunningPartFound(node=event.node, age_ns=event.age_ns))

    # -- `ClusterListener` -------------------------------------------------------------------------------

    def began(self, me: Node) -> None:
        """See `ClusterListener`."""
        self.put(o.IncarnationBegan(me=me.key))

    def acts_on(self, view: ClusterView, reason: str) -> None:
        """See `ClusterListener`."""
        self.sees(view)
        self.put(o.ViewActedOn(view=view))

    def received(self, sender: NodeKey, message: Contract) -> None:
        """See `ClusterListener`: it is for the jobs."""

    def stopped(self, reason: str) -> None:
        """See `ClusterListener`."""
        self.is_out()
        self.put(o.IncarnationEnded(reason=reason))

    # -- the machine -------------------------------------------------------------------------------------

    def put(self, event: o.Event) -> None:
        """Put an event to the machine, and do what it says."""
        try:
            actions = self._tap.handle(event, now_ns=time.monotonic_ns())
            self._tap.check_invariants()
            for action in actions:
                self._perform(action)
        except Exception as error:  # noqa: BLE001 (given to whoever awaits `live`)
            self.fails(error)

    def fails(self, error: Exception) -> None:
        """Have `live` raise an error."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def _perform(self, action: o.Action) -> None:
        match action:
            case o.GiveJob():
                self.gives()
            case o.StopJob(reason=reason):
                self.node.command(Stop(job=self.spec.job, reason=reason[:REASON_CHARACTERS_MAX]))
            case o.LeaveCluster():
                self.jobs.leave()
            case o.NotifyUser(text=text):
                self.say(text)
            case SetTimer(at_ns=at_ns):
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, (at_ns - time.monotonic_ns()) / 1e9)
                self._timer = self.loop.call_later(delay_s, self._timer_fired, at_ns)
            case o.End(exit_code=exit_code, kill=kill):
                if kill:
                    self.jobs.stopped("its user ends it at once")
                if not self._ended.done():
                    self._ended.set_result(exit_code)
            case _:
                assert_never(action)

    def _timer_fired(self, due_ns: int) -> None:
        self.capture.recorder.timer("one job", due_ns, stream=self._tap.stream)
        self.put(TimerFired())
