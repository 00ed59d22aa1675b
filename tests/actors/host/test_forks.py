"""Supervised processes that are forked: as if they had been started, and none is left, whoever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.processes.polling import pause

from zbmd.actors.process.early_template import descendants
from zbmd.actors.process_pool.devices import DeviceWorker, ProcessPool, cpu_cores
from zbmd.actors.process_pool.forks import Fork, Forks
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import LocalProtocolError

SOON_S = 180.0
READS = "import sys\nprint(sys.argv[1:], sys.stdin.readline(), flush=True)\nsys.stdin.read()\n"
TELLS = "import os\nprint(os.environ['PYTHONPATH'], os.environ['MORE'], os.getcwd())\nraise SystemExit(3)\n"


@pytest.fixture
async def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Forks]:
    """A template that finds the modules of the test, and receives its end after it."""
    (tmp_path / "fork_reads.py").write_text(READS)
    (tmp_path / "fork_tells.py").write_text(TELLS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ends: list[asyncio.Task[None]] = []
    made = Forks(["json"], on_task=ends.append)
    yield made
    template = made.template_pid
    await made.close()
    await asyncio.gather(*ends)
    if template:
        await gone(template)


async def forked(forks: Forks, *arguments: str) -> Fork:
    """One that waits for the end of its input, and has begun."""
    fork = await forks.fork("fork_reads", arguments)
    assert fork is not None and fork.stdin is not None
    fork.stdin.write(b"hello\n")
    async with asyncio.timeout(SOON_S):
        await fork.stdout.readuntil(b"hello\n")
    return fork


async def over(fork: Fork) -> int:
    async with asyncio.timeout(SOON_S):
        code = await fork.wait()
    assert fork.returncode == code
    fork.close()
    return code


async def gone(pid: int) -> None:
    """Wait for the end of a process that is not ours to reap."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(SOON_S):
            await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


async def test_a_fork_is_like_a_process_that_was_started(forks: Forks, tmp_path: Path) -> None:
    first = await forked(forks, "a", "b")
    assert first.pid != os.getpid() and forks.template_pid
    told = await forks.fork("fork_tells", (), {"MORE": "1"})
    assert told is not None
    assert (await told.stdout.read()).decode() == f"{tmp_path} 1 {os.getcwd()}\n"
    assert await over(told) == 3
    first.stdin.close()
    assert await over(first) == 0
    killed = await forked(forks)
    killed.send_signal(signal.SIGTERM)
    assert await over(killed) == -signal.SIGTERM
    killed.send_signal(signal.SIGKILL)  # whoever has that number now is safe from it


async def test_forks_end_with_their_template_and_another_takes_its_place(forks: Forks) -> None:
    pair = [await forked(forks), await forked(forks)]
    template = forks.template_pid
    os.kill(template, signal.SIGKILL)
    assert [await over(fork) for fork in pair] == [-signal.SIGKILL] * 2
    await gone(template)
    again = await forked(forks)
    assert forks.template_pid not in (0, template)
    again.send_signal(signal.SIGKILL)
    assert await over(again) == -signal.SIGKILL


async def test_a_fork_that_nobody_waits_for_any_more_is_killed(forks: Forks) -> None:
    await over(await _ended(await forked(forks)))
    template = forks.template_pid
    asking = asyncio.create_task(forks.fork("fork_reads", ()))
    while not forks._forks:  # noqa: ASYNC110 (turn by turn)
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await forks.close()
    await gone(template)
    assert not forks._forks
    with pytest.raises(LocalProtocolError):
        await forks.fork("fork_reads", ())


async def _ended(fork: Fork) -> Fork:
    fork.send_signal(signal.SIGKILL)
    await fork.wait()
    return fork


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n",
            "threads",
        ),
        ("raise ValueError('broken')\n", "cannot be imported"),
    ],
)
async def test_what_cannot_be_forked_is_said_once(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fork_unfit.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ends: list[asyncio.Task[None]] = []
    unfit = Forks(["fork_unfit"], on_task=ends.append)
    assert await unfit.fork("fork_unfit", ()) is None
    assert why in unfit.why_not and not unfit.template_pid
    assert await unfit.fork("fork_unfit", ()) is None
    await unfit.close()
    assert not ends


def process_of(system: ActorSystem, name: str) -> Fork:
    cell = system.find(name, 0)
    assert cell is not None and isinstance(cell.actor, DeviceWorker) and isinstance(cell.actor.process, Fork)
    return cell.actor.process


async def test_a_worker_is_forked_again_by_the_same_template() -> None:
    system = ActorSystem("boss")
    workers = ProcessPool(system, cpu_cores(capacity=2), failures=100)
    supervisor = await system.supervise([workers.child("w")], intensity=9)
    template, first = workers.forks.template_pid, process_of(system, "w")
    os.kill(first.pid, signal.SIGKILL)
    await first.wait()
    async with asyncio.timeout(SOON_S):
        while (cell := system.find("w", 0)) is None or system.peers.get("w") != cell.ref.incarnation:
            await pause()
    await system.until_started(cell)
    assert process_of(system, "w").pid != first.pid and workers.forks.template_pid == template != 0
    await system.terminate(supervisor)
    await workers.close()
    await gone(template)
    await system.stop()


async def test_nothing_is_left_of_a_supervisor_that_is_killed() -> None:
    program = str(PROGRAMS / "actors/pool_supervisor.py")
    boss = await asyncio.create_subprocess_exec(sys.executable, program, stdout=asyncio.subprocess.PIPE)
    assert boss.stdout is not None
    async with asyncio.timeout(SOON_S):
        template = int(await boss.stdout.readline())
    family = descendants(boss.pid)
    assert template in family and len(family) == 4, "its reaper, the template and two workers"
    boss.kill()
    await boss.wait()
    for pid in family:
        await gone(pid)
