"""The snapshot process of a job on this host: drives `machine.Holder` until that ends.

`python -m PROGRAM SPEC LINE`, where LINE is the descriptor of a socket; its launcher has the other end. Only
its launcher starts it. The program is this module, which writes nothing and reads no file, or one that gives
`run_holder` the work that it does on the memory, on threads of its own (`HolderWork`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from zbmd.actors.snapshots.machine import (
    Asked,
    ClientLost,
    End,
    Event,
    Hasten,
    Holder,
    Leave,
    Perform,
    Release,
    Reply,
    Working,
)
from zbmd.actors.snapshots.messages import (
    PACKET_BYTES_MAX,
    HolderSpec,
    Worked,
    decode_request,
    decode_spec,
    encode,
)
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.host.process import make_room, peer_of, set_process_name
from zbmd.transport.machine import SetTimer, TimerFired

SEND_S_MAX: Final = 2.0
"""A client that does not read for so long is given up."""
TOOLS_MAX: Final = 16
"""Clients beside the ranks of the job."""
DESCRIPTORS_MAX: Final = 4
"""Taken from one packet; more than one is an error."""


@dataclass(slots=True)
class _Client:
    number: int
    pid: int
    line: socket.socket


class HolderWork(Protocol):
    """Does what ranks ask for with `Work`, on threads of its own. Its methods are called on the holder's."""

    def take(self, client: int, payload: bytes, arguments: int | None) -> None:
        """Begin work, to which `arguments` belong from now on.

        Raises `RemoteProtocolError` for what no rank may ask for; then they belong to the caller.
        """
        ...

    def leave(self, client: int) -> None:
        """A client that has asked for work is lost: nothing more comes from it."""
        ...

    def hasten(self) -> None:
        """Wait for nobody any more: the process ends once all that was begun is over."""
        ...


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """The side of a holder that its work sees. memory: descriptors by rank, which work duplicates.

    post: tells a client of progress; busy: whether anything is under way. Both for any thread. number: which
    process of the job this is.
    """

    memory: Mapping[int, int]
    post: Callable[[int, bytes], None]
    busy: Callable[[bool], None]
    number: int


class HolderDriver:
    """Serves the launcher at the other end of `line`, and who connects to the address. For one thread.

    work: makes what does the work that ranks ask for, when the first one does; None: there is none.
    Raises OSError if the address is taken: another process holds the same job.
    """

    def __init__(
        self,
        spec: HolderSpec,
        line: socket.socket,
        work: Callable[[HeldMemory], HolderWork] | None = None,
    ) -> None:
        self._make, self._number = work, spec.number
        self._work: HolderWork | None = None
        self._clients_max = TOOLS_MAX + spec.identity.ranks
        self._posted: deque[Event | Reply] = deque()
        """Of the threads of work."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}
        self._clients_made = 0
        self._deadline_ns: int | None = None
        self._is_over = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{spec.address}")
        self._listener.listen(self._clients_max)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        launcher = self._admit(line)
        assert launcher is not None, "it is the first"
        self._machine = Holder(
            spec.job, spec.identity, spec.idle_ns, client=launcher.number, pid=launcher.pid
        )

    def run(self) -> None:
        """Serve until the machine ends."""
        while not self._is_over:
            wait_s = None
            if self._deadline_ns is not None:
                wait_s = max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)
            for key, _ in self._selector.select(wait_s):
                if key.fileobj is self._listener:
                    self._admit(self._listener.accept()[0])
                elif key.fileobj == self._wake:
                    self._take_posted()
                elif isinstance(key.data, _Client) and key.data.number in self._clients:
                    self._receive(key.data)
            if self._deadline_ns is not None and time.monotonic_ns() >= self._deadline_ns:
                self._deadline_ns = None
                self._put(TimerFired())

    def _admit(self, line: socket.socket) -> _Client | None:
        pid, uid = peer_of(line)
        if uid != os.getuid() or len(self._clients) >= self._clients_max:
            line.close()
            return None
        line.settimeout(SEND_S_MAX)
        self._clients_made += 1
        client = self._clients[self._clients_made] = _Client(self._clients_made, pid, line)
        self._selector.register(line, selectors.EVENT_READ, client)
        return client

    def _receive(self, client: _Client) -> None:
        """Take one packet. A client that sends what it must not loses its connection alone."""
        try:
            packet, fds, _, _ = socket.recv_fds(client.line, PACKET_BYTES_MAX + 1, DESCRIPTORS_MAX)
        except OSError:
            packet, fds = b"", []
        if not packet:
            _close(fds)
            self._lose(client)
            return
        try:
            if len(fds) > 1 or not all(map(_is_memfd, fds)):
                raise RemoteProtocolError(f"{len(fds)} descriptors, which are not one memfd")
            asked = Asked(
                client=client.number,
                pid=client.pid,
                request=decode_request(packet),
                memory=fds[0] if fds else None,
            )
            self._put(asked)
        except RemoteProtocolError:
            _close(fds)
            self._lose(client)

    # ---- work, on other threads

    def _perform(self, work: Perform) -> None:
        if self._make is None:
            raise RemoteProtocolError("this snapshot process does no work")
        if self._work is None:
            self._work = self._make(HeldMemory(self._machine.held, self._post, self._busy, self._number))
        self._work.take(work.client, work.payload, work.arguments)

    def _post(self, client: int, payload: bytes) -> None:
        self._put_later(Reply(client=client, answer=Worked(payload=payload)))

    def _busy(self, is_busy: bool) -> None:
        self._put_later(Working(is_busy=is_busy))

    def _put_later(self, what: Event | Reply) -> None:
        self._posted.append(what)
        os.eventfd_write(self._wake, 1)

    def _take_posted(self) -> None:
        os.eventfd_read(self._wake)
        while self._posted:
            what = self._posted.popleft()
            if isinstance(what, Reply):
                self._reply(what)
            else:
                self._put(what)

    def _lose(self, client: _Client) -> None:
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.line)
        client.line.close()
        self._put(ClientLost(client=client.number))

    def _put(self, event: Event) -> None:
        for action in self._machine.handle(event, now_ns=time.monotonic_ns()):
            match action:
                case Reply():
                    self._reply(action)
                case Release(memory=memory):
                    os.close(memory)
                case Perform():
                    self._perform(action)
                case Leave(client=client):
                    if self._work is not None:  # else its request was refused
                        self._work.leave(client)
                case Hasten():
                    assert self._work is not None, "it has begun work"
                    self._work.hasten()
                case End():
                    self._is_over = True
                case SetTimer(at_ns=at_ns):
                    self._deadline_ns = at_ns
                case _:
                    assert_never(action)

    def _reply(self, reply: Reply) -> None:
        client = self._clients.get(reply.client)
        if client is None:
            return
        fds = [] if reply.memory is None else [reply.memory]
        try:
            socket.send_fds(client.line, [encode(reply.answer)], fds, socket.MSG_NOSIGNAL)
        except OSError:  # it reads nothing, or is gone
            self._lose(client)


def _is_memfd(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return True


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def run_holder(
    argv: Sequence[str],
    work: Callable[[HeldMemory], HolderWork] | None = None,
    prepare: Callable[[], object] = lambda: None,
) -> int:
    """Run the holder that `argv` describes; return the exit code: 1 if another one has its address.

    work: as of `HolderDriver`; prepare: called on a thread once memory can be held, such as to import what
    work needs, for which no rank is to wait.
    """
    spec, line = decode_spec(argv[0]), socket.socket(fileno=int(argv[1]))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, line.fileno()}:
        with contextlib.suppress(OSError):  # what lists them is closed by now
            os.close(fd)  # of who has started its launcher
    with contextlib.suppress(OSError):
        set_process_name("zbmd-snapshots")
    make_room(2 * spec.identity.ranks + TOOLS_MAX)
    try:
        driver = HolderDriver(spec, line, work)
    except OSError:
        return 1
    threading.Thread(target=prepare, daemon=True).start()
    driver.run()
    if work is not None:
        os._exit(0)  # a drop waits for no thread
    return 0


if __name__ == "__main__":
    sys.exit(run_holder(sys.argv[1:]))
