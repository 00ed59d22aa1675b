"""This process in its job, for code without an event loop: the membership, and groups by ranks.

The loop runs in a thread of its own. The process stays a member until it ends: process groups come and go.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

import structlog
import uvloop

from zbmd.actors.process.exit import at_script_end
from zbmd.actors.rank.member import Worker, join
from zbmd.collectives.group.group import Group, group
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.collectives.torch")

LEAVE_S_MAX = 5.0
"""Seconds that a process whose script has ended waits for the others, and again to leave, at most."""

ResultT = TypeVar("ResultT")


class World:
    """The membership of this process. Used from any thread but its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = uvloop.new_event_loop()
        self._membership = AsyncExitStack()
        self._worker: Worker | None = None
        self._base: Group | None = None
        self._groups: set[Group] = set()
        self._guard = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="zbmd-torch", daemon=True)
        self._thread.start()
        at_script_end(self._end)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self, work: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Begin a coroutine on the loop; those begun by one thread take their first steps in order."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def group(self, ranks: Sequence[int], *, rank: int, size: int, timeout_s: float) -> Group:
        """Return the group of these ranks, in this order; all of them call this. No ranks: all of the job.

        rank, size: those that torch expects. Raises `UserError` if the job says
        otherwise, and what `Group.subgroup` raises.
        """
        return self.start(self._open(tuple(ranks), rank, size, timeout_s)).result()

    def close(self, opened: Group) -> None:
        """Close a group; see `Group.close`."""
        with self._guard:
            self._groups.discard(opened)
        self.start(opened.close()).result()

    async def _open(self, ranks: tuple[int, ...], rank: int, size: int, timeout_s: float) -> Group:
        async with asyncio.timeout(timeout_s):
            base = await self._base_group()
        members, own = ranks or base.members, base.members[base.rank]
        if len(members) != size or own not in members or members.index(own) != rank:
            raise UserError(
                f"torch.distributed takes this process for rank {rank} of {size}, and zbmd for rank "
                f"{own} of {list(base.members)}: start it by `zbmd-node run`, and leave "
                "rank and world_size to its environment"
            )
        if missing := set(members) - set(base.members):
            raise UserError(
                f"ranks {sorted(missing)} are not members of the job now: {list(base.members)} are"
            )
        made = await base.subgroup([base.members.index(member) for member in members], timeout=timeout_s)
        with self._guard:
            self._groups.add(made)
        return made

    async def _base_group(self) -> Group:
        """Return the group of all ranks, of a view in which none is known to have ended."""
        if self._worker is None:
            self._worker = await self._membership.enter_async_context(join(enter=False))
        base = self._base
        if base is None:
            base = self._base = await group(self._worker)
        elif self._is_over(base, self._worker):
            over, base = base, await group(self._worker, after=base.epoch)
            self._base = base
            await over.close()
        return base

    @staticmethod
    def _is_over(base: Group, worker: Worker) -> bool:
        lost = worker.segment.lost_mask()
        return worker.latest.epoch != base.epoch or any(lost >> rank & 1 for rank in base.members)

    def _end(self, failed: bool) -> None:
        """The script has ended: leave, once the others are through with what they do with this rank.

        A process that has failed leaves at once; what others wait for from it will not come.
        """
        with self._guard:
            groups = [*self._groups]
        end_ns = now_ns() + round(LEAVE_S_MAX * 1e9)
        if self._base is not None and not failed:
            with contextlib.suppress(ZbmdError):
                self._base.submit(lambda c: c.barrier(deadline_ns=end_ns)).result()
        for opened in groups if self._base is None else [*groups, self._base]:
            opened.communicator.give_up()
        leaving = self.start(self._membership.aclose())
        try:
            leaving.result(LEAVE_S_MAX)
        except (TimeoutError, ZbmdError) as error:
            log.info("the job was not left in an orderly way", reason=str(error))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LEAVE_S_MAX)


_world: World | None = None
_guard = threading.Lock()


def world() -> World:
    """Return the world of this process, made at the first call. A forked child makes its own."""
    global _world
    with _guard:
        if _world is None or _world.pid != os.getpid():
            _world = World()
        return _world
