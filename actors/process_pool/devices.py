"""Supervised workers of devices: a process for each, which has the device to itself and hosts actors.

A worker is an actor here (`DeviceWorker`), so its supervisor restarts it; it takes a device that is not in
quarantine, another than the one where it failed if there is one. Its process is linked with this one, and
actors are spawned there by `ActorSystem.spawn_on(worker, …)`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import structlog

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.ref import Down, Reason, ReasonKind
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.errors import ActorError
from zbmd.actors.process_pool.forks import Fork, Forks
from zbmd.actors.process_pool.placement import Placement, PlacementMachine
from zbmd.actors.process_pool.process_actor import CommandProcess, Placements, ProcessActor, lifetime_linked
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.transport.errors import LocalProtocolError, UserError, ZbmdError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.shm.connect import ShmListener, listen
from zbmd.transport.shm.link import ShmLink

CHECK: Final = "device"
"""The actor of a worker that checks its device."""
WORKER: Final = "zbmd.actors.process_pool.device_worker"
_WORKER_IMPORTS: Final = (__name__, "zbmd.actors.process.log", "uvloop")
COOKIE_BYTES: Final = 32
CHECK_EVERY_S: Final = 10.0
CHECK_S: Final = 10.0

log: Final = structlog.stdlib.get_logger("zbmd.devices")


class Device(Protocol):
    """One device, as its worker process uses it. Made there, by `kind(index)`."""

    def bind(self) -> None:
        """Make it this process's own; called once, before anything computes. Raises `UserError`."""
        ...

    def check(self) -> str:
        """Compute something there; what is wrong, or nothing. May take a while; called on a thread."""
        ...


class CpuCore:
    """A core of this host: its worker runs on no other."""

    def __init__(self, index: int) -> None:
        self._index = index

    def bind(self) -> None:
        """See `Device`."""
        try:
            os.sched_setaffinity(0, {self._index})
        except OSError as error:
            raise UserError(f"this process may not run on core {self._index}: {error.strerror}") from error

    def check(self) -> str:
        """See `Device`: whether the core is still ours, and computes."""
        if os.sched_getaffinity(0) != {self._index}:
            return f"core {self._index} has been taken away"
        wanted = sum(range(100_000))
        return "" if wanted == 4_999_950_000 else f"core {self._index} computes {wanted} for 4999950000"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device of this host. kind: `"module:Class"` of its `Device`; capacity: workers at once."""

    name: str
    kind: str
    index: int
    capacity: int = 1


def cpu_cores(*, capacity: int = 1) -> list[DeviceSpec]:
    """Return the cores that this process may run on."""
    return [
        DeviceSpec(name=f"cpu{index}", kind=f"{__name__}:CpuCore", index=index, capacity=capacity)
        for index in sorted(os.sched_getaffinity(0))
    ]


class CheckDevice(Contract, id="zbmd.device.check"):
    """Ask a worker whether its device is healthy."""


class DeviceChecked(Contract, id="zbmd.device.checked"):
    """problem: empty if it is."""

    problem: str


class ProcessPool:
    """Worker processes, one or more for each device. `close` it before the system.

    Workers are forked from a template that has imported what they need, where that starts no thread; else
    each is a new interpreter.

    modules: what workers import, and whose actor classes may be spawned there. failures, period_s,
    quarantine_s: see `PlacementMachine`.
    """

    def __init__(
        self,
        system: CoreSystem,
        devices: Sequence[DeviceSpec],
        *,
        modules: Sequence[str] = (),
        failures: int = 2,
        period_s: float = 60.0,
        quarantine_s: float = 5.0,
    ) -> None:
        self.devices: Mapping[str, DeviceSpec] = {device.name: device for device in devices}
        self.modules = tuple(modules)
        kinds = [device.kind.partition(":")[0] for device in devices]
        self.forks = Forks([*_WORKER_IMPORTS, *kinds, *modules], on_task=system.linger)
        self.cookie = os.urandom(COOKIE_BYTES)
        self.address = f"zbmd-workers-{os.getpid()}-{os.urandom(8).hex()}"
        places = [Placement(name=device.name, capacity=device.capacity) for device in devices]
        machine = PlacementMachine(
            places,
            failures=failures,
            period_ns=int(period_s * 1e9),
            quarantine_ns=int(quarantine_s * 1e9),
        )
        self.places = Placements(machine, self._probe)
        self._system = system
        self._expected: dict[str, tuple[int, asyncio.Future[None], Callable[[str], None]]] = {}
        identity = Identity(
            name=system.name,
            pid=os.getpid(),
            uid=os.getuid(),
            incarnation=system.incarnation,
            contracts=fingerprints(),
        )
        endpoint = Endpoint(identity=identity, cookie=self.cookie)
        self._listener: ShmListener = listen(self.address, self._accepted, endpoint)

    def child(
        self, name: str, *, restart: Restart = Restart.PERMANENT, shutdown_s: float | None = None
    ) -> ChildSpec:
        """Return a child for a supervisor of this process. `name` is the name of its process, too."""
        args = (self.places, self)
        return ChildSpec(name=name, actor=DeviceWorker, args=args, restart=restart, shutdown_s=shutdown_s)

    async def close(self) -> None:
        """Take no workers any more."""
        self._listener.close()
        await self._listener.wait_closed()
        await self.places.close()
        await self.forks.close()

    def expect(self, name: str, incarnation: int, lost: Callable[[str], None]) -> asyncio.Future[None]:
        """Wait until the worker that is being started has linked. lost: called when that link ends."""
        came: asyncio.Future[None] = self._system.loop.create_future()
        self._expected[name] = (incarnation, came, lost)
        return came

    def _accepted(self, link: ShmLink) -> None:
        incarnation, came, lost = self._expected.get(link.peer.name, (0, None, None))
        if came is None or lost is None or came.done() or link.peer.incarnation != incarnation:
            log.warning("link of a stranger closed", name=link.peer.name)
            link.close()
            return
        try:
            self._system.attach(link, on_closed=lambda error: lost(str(error or "it closed its link")))
        except ZbmdError as error:
            log.warning("link of a worker not taken", name=link.peer.name, reason=str(error))
            link.close()
            return
        came.set_result(None)

    async def _probe(self, place: str) -> str:
        """In a process of its own, which binds the device, checks it, and ends."""
        device = self.devices[place]
        process = await asyncio.create_subprocess_exec(
            *lifetime_linked([sys.executable, "-m", WORKER, device.kind, str(device.index), "--probe"]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, errors = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        return "" if process.returncode == 0 else errors.decode(errors="replace")[-500:] or "it does not say"


class DeviceWorker(ProcessActor):
    """One worker: `name` in its supervisor, and as a process. Made by `ProcessPool.child`."""

    stopping_s = 5.0

    def __init__(self, places: Placements, workers: ProcessPool) -> None:
        super().__init__(places)
        self._workers = workers
        self._checking: asyncio.Task[None] | None = None

    def command(self) -> Sequence[str]:
        """See `ProcessActor`."""
        return [sys.executable, "-m", WORKER, *self._arguments()]

    def _arguments(self) -> list[str]:
        name, incarnation = self.ref.actor, str(self.ref.incarnation)
        device = self._workers.devices[self.place]
        return [
            device.kind,
            str(device.index),
            name,
            incarnation,
            self._workers.address,
            *self._workers.modules,
        ]

    async def launch(self) -> CommandProcess | Fork:
        """See `ProcessActor`: a fork, where there are any."""
        fork = await self._workers.forks.fork(WORKER, self._arguments())
        return await super().launch() if fork is None else fork

    def first_words(self) -> bytes:
        """Return the cookie; in its arguments anybody could read it."""
        return self._workers.cookie.hex().encode() + b"\n"

    async def ready(self) -> None:
        """Wait until its process has linked and its device is healthy."""
        lost = partial(self._lost, self.ref.incarnation)
        await self._workers.expect(self.ref.actor, self.ref.incarnation, lost)
        problem = await self._check()
        if problem:
            raise LocalProtocolError(f"{self.place} is not healthy: {problem}")
        self._checking = self.system.loop.create_task(self._check_on(), name=f"checks of {self.place}")
        self._running_cell().watch(self._check_no_more)

    def _check_no_more(self, _: Down) -> None:
        if self._checking is not None:
            self._checking.cancel()

    def _lost(self, incarnation: int, reason: str) -> None:
        """The link has ended: without it the worker is of no use."""
        if self._cell is not None and self._cell.is_alive and self.ref.incarnation == incarnation:
            self.system.exit(self.ref, Reason(ReasonKind.FAILED, f"at {self.place}: {reason}"))

    async def _check(self) -> str:
        name = f"{self.ref.actor}/{CHECK}"
        checked = await self.system.ref(name).ask(CheckDevice(), reply=DeviceChecked, timeout=CHECK_S)
        return checked.problem

    async def _check_on(self) -> None:
        """Ask for its health from time to time; one that does not answer, or is not healthy, has failed."""
        problem = ""
        while not problem:
            await asyncio.sleep(CHECK_EVERY_S)
            try:
                problem = await self._check()
            except (ActorError, ZbmdError) as error:
                problem = str(error)
        self.system.exit(self.ref, Reason(ReasonKind.FAILED, f"{self.place} is not healthy: {problem}"))
