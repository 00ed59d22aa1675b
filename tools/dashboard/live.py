"""The live nodes, ranks, actors and links for `/cluster` and `/metrics`, asked at most once a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from zbmd.tools.telemetry.live import LiveView, ProcessSnapshots, Rates
from zbmd.tools.telemetry.measures import Kind, Labels, Measure
from zbmd.transport.errors import ZbmdError

REFRESH_S: Final = 1.0
PROCESSES_MAX: Final = 256
ACTORS_MAX: Final = 100
"""Of each host, the busiest."""


class Live:
    """A view of what is live, for several who ask at once. In one running loop."""

    def __init__(self) -> None:
        self._view = LiveView()
        self._rates = Rates()
        self._busy = asyncio.Lock()
        self._looked_s = -1e9
        self._seen: list[ProcessSnapshots] = []
        self._shown: list[dict[str, Any]] = []
        self._problem = ""

    async def close(self) -> None:
        """Give all lines back."""
        async with self._busy:
            await self._view.close()

    async def answer(self) -> dict[str, Any]:
        """Return what the page shows."""
        await self._look()
        return {"hosts": self._shown, "problem": self._problem}

    async def measures(self) -> list[Measure]:
        """Return metrics of the processes that live now."""
        await self._look()
        return list(_measures(self._seen))

    async def _look(self) -> None:
        async with self._busy:
            if time.monotonic() - self._looked_s < REFRESH_S:
                return
            try:
                self._seen, self._problem = await self._view.look(busiest=True), ""
            except (ZbmdError, TimeoutError) as error:
                self._seen, self._problem = [], str(error) or "the cluster does not answer"
            self._shown = [_shown(one, self._rates) for one in self._seen]
            self._looked_s = time.monotonic()


def _shown(seen: ProcessSnapshots, rates: Rates) -> dict[str, Any]:
    lines = rates.take(seen)
    waiting: dict[str, int] = {}
    for process, row, *_ in lines:
        waiting[process] = waiting.get(process, 0) + row.waiting
    actors = [
        {
            **{"process": process, "name": row.name, "class": row.kind, "state": row.state},
            **{"at": row.handles, "waiting": row.waiting, "bytes": row.nbytes, "per_s": per_s},
            **{"handled": row.handled, "restarts": restarts, "dropped": row.dropped},
        }
        for process, row, per_s, _, restarts in lines[:ACTORS_MAX]
    ]
    processes = [
        {
            **{"process": reply.process, "incarnation": reply.incarnation, "actors": reply.actors},
            **{"waiting": waiting.get(reply.process, 0), "held": reply.held},
            **{"bytes": reply.nbytes, "bytes_max": reply.nbytes_max},
            "links": [msgspec.structs.asdict(link) for link in reply.links],
        }
        for reply in seen.replies[:PROCESSES_MAX]
    ]
    status = seen.status
    ranks = [] if status is None else [msgspec.structs.asdict(rank) for rank in status.ranks]
    shown = {"target": seen.target, "silent": seen.silent, "processes": processes, "actors": actors}
    return {
        **shown,
        "ranks": [{name: value for name, value in rank.items() if name != "actors"} for rank in ranks],
        "job": None
        if status is None
        else {
            **{"pid": status.pid, "epoch": status.epoch, "on_loss": status.on_loss},
            **{"restarts": status.restarts, "uptime_s": status.uptime_s, "hangs": status.hangs},
        },
    }


def _measures(seen: Sequence[ProcessSnapshots]) -> Iterable[Measure]:
    processes: list[tuple[Labels, Any]] = []
    up: list[tuple[Labels, float]] = []
    ranks: list[tuple[Labels, Any]] = []
    for one in seen:
        program: Labels = ("program", one.target), ("pid", str(0 if one.status is None else one.status.pid))
        processes += [((*program, ("process", reply.process)), reply) for reply in one.replies]
        names = [(reply.process, 1.0) for reply in one.replies] + [(name, 0.0) for name in one.silent]
        up += [((*program, ("process", name)), value) for name, value in names]
        if one.status is not None:
            ranks += [((*program, ("rank", str(rank.rank))), rank) for rank in one.status.ranks]
    processes, ranks = processes[:PROCESSES_MAX], ranks[:PROCESSES_MAX]

    def gauge(name: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Measure:
        return Measure(f"zbmd_{name}", Kind.GAUGE, about, tuple(samples))

    yield gauge("process_up", "Whether a live process answered (1) or was silent (0)", up[:PROCESSES_MAX])
    yield gauge("actors", "Actors of a process", [(labels, reply.actors) for labels, reply in processes])
    yield gauge(
        "mailbox_messages",
        "Messages that wait in the mailboxes of a process",
        [(labels, sum(row.waiting for row in reply.rows)) for labels, reply in processes],
    )
    yield gauge(
        "mailbox_bytes",
        "Bytes of what waits in the mailboxes of a process",
        [(labels, reply.nbytes) for labels, reply in processes],
    )
    yield Measure(
        "zbmd_loop_held",
        Kind.COUNTER,
        "How often a handler held up the event loop of a process",
        tuple((labels, reply.held) for labels, reply in processes),
    )
    links: list[tuple[Labels, float]] = []
    waiting: list[tuple[Labels, float]] = []
    for labels, reply in processes:
        for carrier in sorted({link.carrier for link in reply.links}):
            of_it = [link for link in reply.links if link.carrier == carrier]
            key = (*labels, ("carrier", carrier))
            links.append((key, len(of_it)))
            waiting.append((key, sum(link.nbytes for link in of_it)))
    yield gauge("links", "Links of a process to others", links)
    yield gauge("link_waiting_bytes", "Bytes that wait to be sent on the links of a process", waiting)
    yield gauge(
        "rank_memory_bytes",
        "Resident memory of a rank",
        [(labels, rank.memory_bytes) for labels, rank in ranks],
    )
    yield gauge(
        "rank_incarnation",
        "Incarnation of a rank: it grows with every replacement",
        [(labels, rank.incarnation) for labels, rank in ranks],
    )
