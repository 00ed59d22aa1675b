"""The watchdog of a process: a thread that looks whether all that is under way makes progress.

Once a look it feeds what its sources see to the progress machine (`progress.py`), tells the host that it
runs, and answers when the host asks where the rank stands. A process without a host logs what it finds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

import structlog

from zbmd.actors.core.system import CoreSystem
from zbmd.actors.hangs.progress import Looked, MovedOn, ProgressMachine, Stuck, look_ns
from zbmd.actors.hangs.root_cause import describe_place
from zbmd.actors.hangs.watched import (
    Activity,
    ActivitySource,
    ActorSource,
    GroupSource,
    LoopSource,
    Watched,
    WatchSource,
)
from zbmd.actors.hangs.wire import (
    GROUPS_MAX,
    PACKET_BYTES_MAX,
    PLACES_MAX,
    Ask,
    Beat,
    FromRank,
    Hello,
    Place,
    Standing,
    decode_from_host,
    encode,
)
from zbmd.transport.clock.deadlines import DURATION_S_MAX
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError

log: Final = structlog.stdlib.get_logger("zbmd.actors.watchdog")

CONNECT_S: Final = 5.0
ALLOWANCES_MAX: Final = 1024


class Watchdog:
    """Watches one process; made, started and closed on its event loop.

    name: the process's (`rank2`); deadline_ns: without progress for so long a thing is stuck, 0 watches
    nothing; address: of the host's collector, None for a process without one.
    """

    def __init__(self, name: str, system: CoreSystem, *, deadline_ns: int, address: str | None) -> None:
        self.deadline_ns = deadline_ns
        self._name = name
        self._address = address
        self._activities = ActivitySource(name)
        self._actors = ActorSource(system)
        self._groups: list[GroupSource] = []
        self._allowances: list[int] = []
        self._loop: LoopSource | None = None
        self._machine: ProgressMachine | None = None
        self._under_way: dict[str, Watched] = {}
        self._socket: socket.socket | None = None
        self._wake_fd = -1
        self._thread: threading.Thread | None = None

    # For the program.

    @contextmanager
    def doing(
        self, what: str, *, deadline: float | None = None, progress: Callable[[], int] | None = None
    ) -> Generator[Activity]:
        """Say what this thread or task does, and hold it to its deadline in seconds (default: the setting).

        It is told of when it has not called `at()` of what this yields, nor ended, for so long. `deadline`
        may be longer or shorter than the setting. progress: gives a number that changes with each bit of
        progress; called on the watchdog's thread. Raises `UserError` if `deadline` is no number of seconds.
        """
        with self._activities.doing(what, _limit_ns(deadline), progress) as activity:
            yield activity

    @contextmanager
    def allow(self, seconds: float) -> Generator[None]:
        """Allow everything in this process `seconds` before it is reported, for as long as this lasts.

        For what is known to take long: a large checkpoint, a first compilation. Those who wait for it on
        other ranks must allow it too. Raises `UserError` if it is no number of seconds.
        """
        if len(self._allowances) >= ALLOWANCES_MAX:
            raise LocalProtocolError(f"{ALLOWANCES_MAX} allowances hold already: are they ever ended?")
        limit_ns = _limit_ns(seconds)
        self._allowances.append(limit_ns)
        try:
            yield
        finally:
            self._allowances.remove(limit_ns)

    def add_group(self, group: GroupSource) -> Callable[[], None]:
        """Watch the operations of a group too; returns what ends that."""
        self._groups.append(group)

        def remove() -> None:
            with contextlib.suppress(ValueError):
                self._groups.remove(group)

        return remove

    # Its life.

    def start(self, rank: int, incarnation: int) -> None:
        """Begin to look. Without a connection to the host it logs what it finds."""
        if self.deadline_ns == 0:
            return
        period_ns = look_ns(self.deadline_ns)
        self._machine = ProgressMachine(deadline_ns=self.deadline_ns, look_ns=period_ns)
        self._loop = LoopSource(self._name, period_s=period_ns / 1e9)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        if self._address is not None:
            self._socket = _connect(self._address, Hello(rank=rank, incarnation=incarnation))
        self._thread = threading.Thread(target=self._run, name="zbmd-watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._loop is not None:
            self._loop.close()
        if self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            self._thread = None
            os.close(self._wake_fd)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def standing(self) -> Standing:
        """Return where the process stands: what is stuck first, then what else is under way."""
        assert self._machine is not None and self._loop is not None
        places = [self._place(watched) for watched in self._under_way.values() if self._tells(watched)]
        main = self._loop.main()
        if main is not None:
            places.append(main.place(still_ns=0, stuck=False))
        places.sort(key=lambda place: (not place.stuck, -place.still_ns))
        groups = [
            group.position(
                still_ns=self._machine.still_ns(group.key), stuck=self._machine.is_stuck(group.key)
            )
            for group in list(self._groups)[:GROUPS_MAX]
        ]
        return Standing(places=tuple(places[:PLACES_MAX]), groups=tuple(groups))

    # On its thread.

    def _run(self) -> None:
        assert self._machine is not None
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._socket is not None:
            poller.register(self._socket, select.POLLIN)
        period_ns = self._machine.look_ns
        due_ns = time.monotonic_ns() + period_ns
        while True:
            left_ms = max(0, -(-(due_ns - time.monotonic_ns()) // 1_000_000))
            ready = dict(poller.poll(left_ms))
            if self._wake_fd in ready:
                return
            if self._socket is not None and self._socket.fileno() in ready and not self._answer():
                poller.unregister(self._socket)
                self._socket.close()
                self._socket = None
            if time.monotonic_ns() >= due_ns:
                due_ns = time.monotonic_ns() + period_ns
                self._look()

    def _look(self) -> None:
        assert self._machine is not None and self._loop is not None
        sources: tuple[WatchSource, ...] = (self._loop, self._actors, self._activities, *self._groups)
        self._under_way = {w.sample.key: w for source in sources for w in source.watched()}
        looked = Looked(
            samples=tuple(watched.sample for watched in self._under_way.values()),
            allowed_ns=max(self._allowances, default=0),
        )
        actions = self._machine.handle(looked, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        if self._socket is not None:
            self._send(self.standing() if actions else Beat())
            return
        for action in actions:
            match action:
                case Stuck(key=key):
                    log.warning(describe_place(self._place(self._under_way[key])))
                case MovedOn(key=key):
                    log.warning(f"{self._name}: what was stuck goes on ({key})")

    def _tells(self, watched: Watched) -> bool:
        """Report nothing while the loop turns."""
        assert self._machine is not None and self._loop is not None
        return watched.sample.key != LoopSource.KEY or self._loop.seems_blocked

    def _place(self, watched: Watched) -> Place:
        assert self._machine is not None
        key = watched.sample.key
        return watched.describe().place(
            still_ns=self._machine.still_ns(key), stuck=self._machine.is_stuck(key)
        )

    def _answer(self) -> bool:
        """Take what the host says; False when it is gone."""
        assert self._socket is not None
        try:
            packet = self._socket.recv(PACKET_BYTES_MAX + 1, socket.MSG_DONTWAIT)
            if not packet:
                return False
            match decode_from_host(packet):
                case Ask():
                    self._send(self.standing())
        except BlockingIOError:
            return True
        except (OSError, RemoteProtocolError) as error:
            log.info("the host's collector is gone", reason=str(error))
            return False
        return True

    def _send(self, message: FromRank) -> None:
        """What does not go through at once is not sent: the host reads slowly, and the next look says it
        again."""
        assert self._socket is not None
        with contextlib.suppress(OSError):
            self._socket.send(encode(message), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _connect(address: str, hello: Hello) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        sock.settimeout(CONNECT_S)
        sock.connect(f"\0{address}")
        sock.send(encode(hello))
    except OSError as error:
        log.warning("no connection to the host's collector of hangs", address=address, reason=str(error))
        sock.close()
        return None
    return sock


def _limit_ns(seconds: float | None) -> int:
    if seconds is None:
        return 0
    if not 0 < seconds <= DURATION_S_MAX:
        raise UserError(f"{seconds!r} is not a number of seconds in 0..{DURATION_S_MAX:g}")
    return round(seconds * 1e9)
