"""Names and groups of the ranks of a job, which are real processes: one is killed, and another comes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.processes.kept_lines import Lines

from zbmd.actors.host.events import HostEvent, RankReport
from zbmd.actors.host.supervisor import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

JOB = '''
import asyncio
import contextlib

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.signals import Down
from zbmd.actors.contracts import Contract
from zbmd.actors.core.deferred import DeferredReply
from zbmd.actors.rank.member import join
from zbmd.transport.errors import PeerLost


class WhoAreYou(Contract, id="directory_ranks.who"):
    pass


class Life(Contract, id="directory_ranks.life"):
    rank: int
    incarnation: int


class Bye(Contract, id="directory_ranks.bye"):
    """Answered once all have said it."""


class Member(Actor):
    def __init__(self, worker):
        self.worker = worker
        self.leaving = []

    @on(Bye)
    async def bye(self, _: Bye) -> DeferredReply | None:
        self.leaving.append(later := self.defer())
        if len(self.leaving) == self.worker.world_size:
            for each in self.leaving:
                each.reply(None)
        return later

    @on(WhoAreYou)
    async def who(self, _: WhoAreYou) -> Life:
        return Life(self.worker.rank, self.worker.incarnation)


def is_first():
    try:
        open(f"{__file__}.lived", "x").close()
    except FileExistsError:
        return False
    return True


async def first_life(worker, group, victim):
    """Rank 2 waits for its end; the others see it, and who comes in its place."""
    before = await victim.ask(WhoAreYou(), timeout=10, reply=Life)
    assert before.rank == 2
    monitor = worker.system.monitor(victim)
    worker.report({"first": worker.rank})
    if worker.rank == 2:
        await asyncio.Event().wait()
    down = await monitor.down(timeout=20)
    assert (down.ref, down.reason.kind.value) == (victim, "lost"), down
    await worker.view(after=worker.epoch)
    async for _ in group.changes():
        others = [ref for ref in group.members if ref.process == "rank2" and ref != victim]
        if others:
            break
    found = None
    while found is None:  # until the new life has it
        found = await worker.system.whereis("worker2", timeout=10)
        assert found is None or found == others[0], (found, others)
    after = await found.ask(WhoAreYou(), timeout=10, reply=Life)
    assert after.rank == 2 and after.incarnation > before.incarnation


async def main():
    async with join() as worker:
        system = worker.system
        me = await system.spawn(Member, worker)
        await system.register(f"worker{worker.rank}", me)
        group = await system.group("workers")
        await group.join(me)
        async for _ in group.changes():
            if len(group.members) == worker.world_size:
                break
        if worker.rank != 2 or is_first():
            await first_life(worker, group, await system.whereis("worker2", timeout=10))
        worker.report({"second": worker.rank})
        with contextlib.suppress(PeerLost):
            await (await system.whereis("worker0")).ask(Bye(), timeout=20)

asyncio.run(main())
'''


@pytest.fixture(autouse=True)
def cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


async def test_names_and_groups_of_a_job_go_with_a_rank_and_come_with_the_next(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    output, first, second = Lines(), set[int](), set[int]()

    async def observe(event: HostEvent) -> None:
        match event:
            case RankReport(payload={"first": rank}):
                first.add(rank)
                if first == {0, 1, 2} and len(second) == 0:
                    os.kill(host.ranks[2].pid, signal.SIGKILL)
            case RankReport(payload={"second": rank}):
                second.add(rank)
            case _:
                pass

    config = HostConfig(
        target=str(script),
        world_size=3,
        on_loss=OnLoss.REPLACE,
        arena_bytes=1 << 20,
        preload=("zbmd.actors.rank.member",),
    )
    host = Host(config, output=output, observer=observe)
    async with asyncio.timeout(60):
        result = await host.run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    assert (first, second, result.restarts) == ({0, 1, 2}, {0, 1, 2}, 1)
