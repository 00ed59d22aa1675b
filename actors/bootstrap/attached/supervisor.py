"""The supervisor of a host's attached ranks: a process of its own, which ends with the last of them.

It is a host as that of `zbmd-node run`. In the place of the template there is `AttachingTemplate`, which
waits for a process where a template forks one. The process is a daemon: it has no parent that would have to
reap it, and no terminal whose Ctrl-C would reach it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, assert_never

import structlog

from zbmd.actors.bootstrap.attached import machine as m
from zbmd.actors.bootstrap.attached.client import FAILED
from zbmd.actors.bootstrap.attached.messages import (
    PACKET_BYTES_MAX,
    Attach,
    Attached,
    Detach,
    Order,
    Refused,
    decode_asked,
    decode_order,
    encode,
)
from zbmd.actors.bootstrap.one_job_node import OneJobNode, job_id_of, node_id_of, node_name
from zbmd.actors.cluster.jobs import single_job as o
from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.hosted_job import KEEP_MEMORY_VARIABLE
from zbmd.actors.cluster.jobs.node_driver import JobHost
from zbmd.actors.cluster.jobs.rank_processes import OnLost, OnReply
from zbmd.actors.cluster.node.incarnations import NodeConfig
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.process.log import log_to_stderr
from zbmd.actors.process.template import Forked, ForkExited, ForkRequest, Ready
from zbmd.actors.rank.environment import arena_bytes, progress_deadline_ns, recovery_budget_ns
from zbmd.actors.replay.process_capture import CaptureSettings
from zbmd.actors.view import OnLoss
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_VARIABLE, SECOND_NS
from zbmd.transport.errors import RemoteProtocolError, ZbmdError
from zbmd.transport.handshake.cookie import use_cookie
from zbmd.transport.host.process import peer_of, set_process_name
from zbmd.transport.tcp.address import TcpAddress, parse_address, tcp_settings

log: Final = structlog.stdlib.get_logger("zbmd.actors.attached")

TARGET: Final = "(attached)"
"""In the place of a script's path, for `zbmd-node status`."""
CONNECTIONS_MAX: Final = 4096
PEER_PIDFD: Final = 77
"""SO_PEERPIDFD: Linux 6.5; before, the process is found by its id."""
KEPT_NAMES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OWN_PREFIX: Final = "ZBMD_"
JOIN_S_MAX: Final = 30.0
"""To reach the node of the first host, which has begun and waits for the others."""
JOIN_SHARE: Final = 0.8
"""Of the ranks' patience, at most: why it has failed is to reach them before that is over."""
REASON_BYTES_MAX: Final = 2048


@dataclass(slots=True)
class _Connection:
    socket: socket.socket
    pid: int
    pidfd: int
    rank: int = -1


class AttachingTemplate:
    """A template that forks nothing: it takes the processes that come to `listener`. A `Template` of a host.

    starter_fd: pidfd of the process that started the supervisor; starter: its id; on_end: called when no
    process is left. It owns the descriptors.
    """

    def __init__(
        self,
        listener: socket.socket,
        starter: int,
        starter_fd: int,
        *,
        on_reply: OnReply,
        on_end: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._starter_fd = starter_fd
        self._on_reply = on_reply
        self._on_end = on_end
        self._machine = m.AttachedRanks(starter)
        self._connections: dict[int, _Connection] = {}
        self._number = 0
        self._jobs: dict[int, int] = {}
        """By rank, the id of its job."""

    pid = 0
    """There is no process that could be lost."""

    async def start(self, *, modules: Sequence[str], environment: Mapping[str, str]) -> Ready:
        """Take processes from now on."""
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._loop.add_reader(self._starter_fd, self._starter_ended)
        return Ready(pid=os.getpid(), threads=1)

    def fork(
        self,
        request: ForkRequest,
        *,
        stdout_fd: int,
        stderr_fd: int,
        stdin_fd: int | None = None,
        kept_fds: Sequence[int] | None = None,
        spare_fd: int | None = None,
    ) -> None:
        """Wait for the process that is to be the rank; answered by `Forked` once it is there."""
        variables = {
            name: value
            for name, value in request.environment.items()
            if name in KEPT_NAMES or name.startswith(OWN_PREFIX)
        }
        self._jobs[request.rank] = request.job
        self._put(m.Wanted(rank=request.rank, incarnation=request.incarnation, variables=variables))

    async def close(self) -> None:
        """Let go of all processes, which go on."""
        for fd in (self._listener.fileno(), self._starter_fd):
            if fd >= 0:
                self._loop.remove_reader(fd)
        self._listener.close()
        if self._starter_fd >= 0:
            os.close(self._starter_fd)
            self._starter_fd = -1
        for number in list(self._connections):
            self._close(number)

    # -- what happens ------------------------------------------------------------------------------------

    def _starter_ended(self) -> None:
        self._loop.remove_reader(self._starter_fd)
        self._put(m.StarterEnded())

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            log.info("a process could not be taken", reason=str(error))
            return
        accepted.setblocking(False)
        try:
            pid, uid = peer_of(accepted)
            if uid != os.getuid() or len(self._connections) >= CONNECTIONS_MAX:
                raise PermissionError(f"process {pid} of user {uid} is not taken")
            pidfd = _pidfd_of(accepted, pid)
        except OSError as error:
            log.warning("a process was not taken", reason=str(error))
            accepted.close()
            return
        self._number += 1
        number = self._number
        self._connections[number] = _Connection(accepted, pid, pidfd)
        self._loop.add_reader(pidfd, self._process_ended, number)
        self._loop.add_reader(accepted.fileno(), self._readable, number)

    def _readable(self, number: int) -> None:
        connection = self._connections[number]
        try:
            packet = connection.socket.recv(PACKET_BYTES_MAX + 1)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            # Its end is the kernel's to report: a program may close descriptors that it does not know.
            self._loop.remove_reader(connection.socket.fileno())
            return
        try:
            asked = decode_asked(packet)
        except RemoteProtocolError as error:
            self._refuse(number, str(error))
            return
        match asked:
            case Attach(rank=rank):
                if connection.rank >= 0:
                    self._refuse(number, f"this process is rank {connection.rank} already")
                    return
                connection.rank = rank
                self._put(m.Came(connection=number, pid=connection.pid, rank=rank))
            case Detach(ends=ends):
                self._put(m.WentOn(connection=number, ends=ends))
            case _:
                assert_never(asked)

    def _process_ended(self, number: int) -> None:
        connection = self._connections[number]
        self._loop.remove_reader(connection.pidfd)
        # What it sent last comes first.
        with suppress(OSError, RemoteProtocolError):
            asked = decode_asked(connection.socket.recv(PACKET_BYTES_MAX + 1))
            if isinstance(asked, Detach):
                self._put(m.WentOn(connection=number, ends=asked.ends))
        if number in self._connections:
            if connection.rank < 0:
                self._close(number)
            else:
                self._put(m.ProcessEnded(connection=number))

    # -- what follows ------------------------------------------------------------------------------------

    def _put(self, event: m.Event) -> None:
        actions = self._machine.handle(event)
        self._machine.check_invariants()
        for action in actions:
            self._perform(action)

    def _perform(self, action: m.Action) -> None:
        match action:
            case m.Admit():
                self._admit(action)
            case m.Refuse(connection=number, reason=reason):
                self._refuse(number, reason)
            case m.Close(connection=number):
                self._close(number)
            case m.ReportEnd():
                pid = self._connections[action.connection].pid
                self._close(action.connection)
                self._on_reply(
                    ForkExited(
                        rank=action.rank,
                        incarnation=action.incarnation,
                        pid=pid,
                        code=0 if action.clean else -signal.SIGKILL,
                        job=self._jobs[action.rank],
                    ),
                    None,
                )
            case m.End():
                self._on_end()
            case _:
                assert_never(action)

    def _admit(self, action: m.Admit) -> None:
        connection = self._connections[action.connection]
        with suppress(OSError):  # it has just died: the kernel reports that next
            connection.socket.send(encode(Attached(variables=dict(action.variables))))
        forked = Forked(
            rank=action.rank,
            incarnation=action.incarnation,
            pid=connection.pid,
            job=self._jobs[action.rank],
        )
        self._on_reply(forked, os.dup(connection.pidfd))

    def _refuse(self, number: int, reason: str) -> None:
        with suppress(OSError):
            self._connections[number].socket.send(encode(Refused(reason=reason)))
        self._close(number)

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number)
        self._loop.remove_reader(connection.pidfd)
        self._loop.remove_reader(connection.socket.fileno())
        os.close(connection.pidfd)
        connection.socket.close()


def _pidfd_of(peer: socket.socket, pid: int) -> int:
    """Return a pidfd of the process at the other end. Raises OSError if it is gone."""
    with suppress(OSError):
        return int.from_bytes(peer.getsockopt(socket.SOL_SOCKET, PEER_PIDFD, 4), sys.byteorder)
    return os.pidfd_open(pid)


async def run_host(listener: socket.socket, starter: int, starter_fd: int, world_size: int) -> None:
    """Be the host of a job on this host alone, until nobody is left."""
    over = asyncio.Event()

    def template(on_reply: OnReply, _: OnLost) -> AttachingTemplate:
        return AttachingTemplate(listener, starter, starter_fd, on_reply=on_reply, on_end=over.set)

    host = Host(host_config(world_size), adopts=template)
    running = asyncio.ensure_future(host.run())
    nobody = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait([running, nobody], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        running.cancel()
        nobody.cancel()
        await asyncio.wait([running, nobody])


async def run_node(
    order: Order, listener: socket.socket, starter: int, starter_fd: int, tells_fd: int
) -> None:
    """Be the node of this host in a cluster for a job on several, until nobody is left or the job is over."""
    use_cookie(order.cookie.encode())

    def template(on_end: Callable[[], None], on_reply: OnReply) -> AttachingTemplate:
        return AttachingTemplate(listener, starter, starter_fd, on_reply=on_reply, on_end=on_end)

    node = AttachedNode(order, template, partial(_tell, tells_fd))
    try:
        await node.live()
    except BaseException as error:
        node.capture.failed(error)
        node.tell_failure(f"{error}" or type(error).__name__)
        raise
    finally:
        node.capture.close("the job is over")


def _tell(fd: int, text: str) -> None:
    """Write a line into the pipe to the starter, which may be gone, and close it."""
    with suppress(OSError):
        os.write(fd, f"{text}\n".encode())
    os.close(fd)


class AttachedNode(OneJobNode):
    """A host of attached ranks as a node of their cluster.

    template: makes that of the host, from what to call at its end and with replies; tell: takes the node's
    address, once.
    """

    def __init__(
        self,
        order: Order,
        template: Callable[[Callable[[], None], OnReply], AttachingTemplate],
        tell: Callable[[str], None],
    ) -> None:
        self._template, self._tell = template, tell
        self._told = False
        job = job_id_of(f"attached {order.name}")
        super().__init__(
            node_config(order),
            dataclasses.replace(host_config(order.ranks).spec(job), nodes_max=order.hosts),
            node_id=node_id_of(order.host, founds=not order.joins),
            nodes_min=order.hosts,
            patience_ns=round(order.patience_s * SECOND_NS),
            captured=CaptureSettings.read(os.environ, job=job),
        )

    def hosting(self) -> JobHost:
        """See `OneJobNode`."""
        return JobHost(
            self.node,
            recorder=self.capture.recorder,
            clock=self.clock,
            listen_host=self.listen_host,
            finder=self.actors.finder,
            adopts=lambda on_reply, _: self._template(self._nobody_left, on_reply),
        )

    def _nobody_left(self) -> None:
        self.put(o.EndAsked(reason="no rank is left", exit_code=0, leave=True))

    def began(self, me: Node) -> None:
        """See `ClusterListener`."""
        if not self._told:
            self._told = True
            self._tell(me.address)
        super().began(me)

    def tell_failure(self, reason: str) -> None:
        """Tell the starter why there is no address, if it has none yet."""
        if not self._told:
            self._told = True
            self._tell(FAILED + " ".join(reason.split())[:REASON_BYTES_MAX])

    def say(self, text: str) -> None:
        """See `OneJobNode`."""
        log.info(text)


def node_config(order: Order) -> NodeConfig:
    """Return a host as a node of the cluster of attached ranks. Raises `UserError`.

    The recovery budget of this process's environment is that of the cluster, which suspects hosts by it.
    """
    return NodeConfig(
        name=node_name("", order.host),
        listen=TcpAddress(host="", port=0),
        joins=tuple(parse_address(address) for address in order.joins),
        join_ns=round(min(JOIN_S_MAX, order.patience_s * JOIN_SHARE) * SECOND_NS),
        recovery_budget_ns=recovery_budget_ns(os.environ) if RECOVERY_BUDGET_VARIABLE in os.environ else None,
        cookie=order.cookie.encode(),
        settings=tcp_settings(),
        run=f"the attached ranks {order.name}",
    )


def host_config(world_size: int) -> HostConfig:
    """Return the job of the attached ranks, by this process's environment. Raises `UserError`.

    Nobody is replaced, so no memory is kept for a replacement.
    """
    return HostConfig(
        target=TARGET,
        world_size=world_size,
        on_loss=OnLoss.SHRINK,
        arena_bytes=arena_bytes(os.environ),
        recovery_budget_ns=recovery_budget_ns(os.environ),
        progress_deadline_ns=progress_deadline_ns(os.environ),
        environment={KEEP_MEMORY_VARIABLE: "off"},
    )


def serve(listener_fd: int, starter: int, starter_fd: int, tells_fd: int) -> NoReturn:
    """Be the supervisor, in a daemon of its own; standard input says for what (`Order`).

    Descriptors: a listening socket, a pidfd of the starter, and a pipe to that, for the node's address.
    """
    set_process_name("zbmd-attached")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whoever ends a job ends its ranks, and so this
    log_to_stderr()
    code = 0
    try:
        with open(0, "rb", closefd=False) as given:
            order = decode_order(given.read(PACKET_BYTES_MAX + 1))
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        listener = socket.socket(fileno=listener_fd)
        if order.hosts == 1:
            os.close(tells_fd)
            asyncio.run(run_host(listener, starter, starter_fd, order.ranks))
        else:
            asyncio.run(run_node(order, listener, starter, starter_fd, tells_fd))
    except ZbmdError as error:
        log.error("the supervisor of this host's ranks failed", reason=str(error))
        code = 1
    except Exception as error:
        log.error("the supervisor of this host's ranks failed", exc_info=error)
        code = 1
    os._exit(code)
