"""Kill processes at random for minutes while others ask them, and account for every message.

    python -m zbmd.tools.chaos.soak_actors [--processes 20] [--minutes 5] [--seed N]

A supervisor keeps the processes up (`zbmd.actors.process_pool.devices`), each with a ledger; clients write
entries into the ledgers, and one process after the other is killed with SIGKILL, or stopped for a while so
that asks time out. What a ledger acknowledges must be written there, once and in order; nothing may be
acknowledged by a life that was over; and when the killing ends, every ledger must answer again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
import uvloop

from zbmd.actors.core.ref import Down, Ref
from zbmd.actors.errors import ActorError
from zbmd.actors.process_pool.devices import DeviceWorker, ProcessPool, cpu_cores
from zbmd.actors.supervision.events import BackOff
from zbmd.actors.supervision.machine import INTENSITY_MAX
from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos.soak_ledger import Audit, Bookkeeper, Books, Entry, Written
from zbmd.tools.cli.options import script_parser
from zbmd.transport.errors import DeadlineExceeded, PeerLost, ZbmdError

ASK_S: Final = 2.0
HEAL_S: Final = 120.0
PROCESSES_MAX: Final = 62
LEDGER: Final = "zbmd.tools.chaos.soak_ledger:Ledger"
PAUSE_S: Final = 0.002
"""Between two entries of a client: the soak is about what is lost, not about how fast it is."""


@dataclass(slots=True)
class Soak:
    """One run."""

    system: ActorSystem
    workers: ProcessPool
    names: Sequence[str]
    dice: random.Random
    books: Bookkeeper = field(default_factory=Bookkeeper)
    kills: int = 0
    stops: int = 0
    downs: int = 0
    answered: dict[str, int] = field(default_factory=dict[str, int])
    """By process, the life that has answered last."""
    _numbers: dict[str, int] = field(default_factory=dict[str, int])

    async def run(self, seconds: float, kill_every_s: float) -> None:
        """Write and kill for so long, then see whether all comes back."""
        clients = [asyncio.create_task(self._write(name)) for name in self.names]
        try:
            end_s = time.monotonic() + seconds
            while (left_s := end_s - time.monotonic()) > 0:
                await asyncio.sleep(min(left_s, self.dice.expovariate(1 / kill_every_s)))
                self._strike()
            self.answered.clear()
            async with asyncio.timeout(HEAL_S):
                while len(self.answered) < len(self.names):
                    _raise_failures(clients)
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            missing = sorted(set(self.names) - set(self.answered))
            self.books.violations.append(f"{missing} did not answer {HEAL_S:g} s after the last kill")
        finally:
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)
        _raise_failures(clients)

    def _strike(self) -> None:
        """Kill a process, or stop it for a moment."""
        name = self.dice.choice(self.names)
        cell = self.system.find(name, 0)
        worker = None if cell is None else cell.actor
        if not isinstance(worker, DeviceWorker) or worker.process is None or name not in self.system.peers:
            return  # it is coming up
        pid = worker.process.pid
        if self.dice.random() < 0.8:
            self.kills += 1
            os.kill(pid, signal.SIGKILL)
        else:
            self.stops += 1
            os.kill(pid, signal.SIGSTOP)
            delay_s = self.dice.uniform(0.1, 2 * ASK_S)
            self.system.loop.call_later(delay_s, self._resume, name, cell)

    def _resume(self, name: str, cell: object) -> None:
        found = self.system.find(name, 0)
        if found is not cell or found is None or not isinstance(found.actor, DeviceWorker):
            return  # it was killed meanwhile
        if found.actor.process is not None and found.actor.process.returncode is None:
            os.kill(found.actor.process.pid, signal.SIGCONT)

    async def _write(self, process: str) -> None:
        """One client of one process: it writes to a ledger for as long as that lives, then to the next."""
        while True:
            try:
                ledger = await self.system.spawn_on(process, LEDGER, timeout=ASK_S)
            except (PeerLost, ActorError, DeadlineExceeded):
                await asyncio.sleep(10 * PAUSE_S)
                continue
            self.system.watch(ledger, self._down)
            self._numbers[process] = 0
            while await self._batch(process, ledger):
                pass

    async def _batch(self, process: str, ledger: Ref) -> bool:
        """Some entries, in order, and an audit; False once the ledger is gone."""
        try:
            for _ in range(self.dice.randint(1, 50)):
                self._numbers[process] += 1
                await self._entry(ledger, self._numbers[process])
            self.books.audit(await ledger.ask(Audit(), reply=Books, timeout=ASK_S))
            self.answered[process] = ledger.process_incarnation
        except DeadlineExceeded:
            return True
        except (PeerLost, ActorError):
            return False
        return True

    async def _entry(self, ledger: Ref, number: int) -> None:
        process, life = ledger.process, ledger.process_incarnation
        client = f"{process}.{ledger.incarnation}"
        is_over = (process, life) in self.books.over
        self.books.send(process, life, client, number)
        try:
            written = await ledger.ask(Entry(client, number), reply=Written, timeout=ASK_S)
        except (ZbmdError, asyncio.CancelledError):
            self.books.lose()
            raise
        self.books.acknowledge(life, client, number, written, sent_after_end=is_over)
        await asyncio.sleep(PAUSE_S)

    def _down(self, down: Down) -> None:
        self.downs += 1
        self.books.over.add((down.ref.process, down.ref.process_incarnation))


def _raise_failures(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def soak(processes: int, seconds: float, kill_every_s: float, seed: int) -> Soak:
    """Run it; the result has the books."""
    system = ActorSystem("soak")
    cores = cpu_cores(capacity=PROCESSES_MAX)
    # A kill is no fault of a core: none goes into quarantine.
    workers = ProcessPool(system, cores, modules=["zbmd.tools.chaos.soak_ledger"], failures=1000)
    names = [f"soak{number}" for number in range(processes)]
    made = Soak(system, workers, names, random.Random(seed))
    back_off = BackOff(first_ns=10_000_000, max_ns=500_000_000, seed=seed)
    try:
        children = [workers.child(name, shutdown_s=2.0) for name in names]
        await system.supervise(children, intensity=INTENSITY_MAX, back_off=back_off)
        await made.run(seconds, kill_every_s)
    finally:
        await system.stop(timeout=30.0)
        await workers.close()
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run as told, and print what came of it; the exit code is 1 if a message is not accounted for."""
    parser = script_parser("chaos.soak_actors", __doc__)
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--kill-every", type=float, default=0.5, metavar="S", help="seconds, on average")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    given = parser.parse_args(arguments)
    if not 1 <= given.processes <= PROCESSES_MAX:
        parser.error(f"--processes {given.processes}: give 1 to {PROCESSES_MAX}")
    print(f"seed {given.seed}", file=sys.stderr, flush=True)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    run = uvloop.run(soak(given.processes, given.minutes * 60, given.kill_every, given.seed))
    books = run.books
    result = {
        "seed": given.seed,
        "processes": given.processes,
        "kills": run.kills,
        "stops": run.stops,
        "lives_that_ended": run.downs,
        "sent": books.sent,
        "acknowledged": books.acknowledged,
        "unknown": books.unknown,
        "audits": books.audits,
        "accounted_for": books.acknowledged + books.unknown == books.sent,
        "violations": books.violations,
    }
    print(json.dumps(result, indent=1))
    return 1 if books.violations or not result["accounted_for"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
