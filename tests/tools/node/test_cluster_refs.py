"""References over a real cluster: ranks, nodes and a script reach each other's actors, and hear of ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from programs import PROGRAMS
from programs.node import refs_actors as app
from support.cluster.cluster_nodes import BUDGET, Nodes, Run
from support.processes.polling import pause

from zbmd.actors.core.ref import Monitor, ReasonKind, Ref
from zbmd.actors.session import Session
from zbmd.tools.telemetry.live import once
from zbmd.transport.errors import UserError, ZbmdError

ACTORS = app.__name__
TIMEOUT_S = 180.0


@pytest.fixture(autouse=True)
def environment(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the session, which this process is, at the node n1."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(nodes.directory / "cookie"))
    monkeypatch.setenv("ZBMD_STATE_DIR", str(nodes.directory / "n1"))


async def until(holds: Callable[[], Any]) -> Any:
    """Ask again until it holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (found := await asyncio.to_thread(holds)):
            await pause()
        return found


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_references_work_between_all_processes(nodes: Nodes, links: str) -> None:
    """Each actor asks and tells those of all other processes, and hears of the ends of the killed."""
    first = await nodes.up("n1", "--recovery-budget", BUDGET, "--actors", ACTORS, ZBMD_LINKS=links)
    await first.until("view 1: ")
    second = await nodes.up("n2", "--join", nodes.address("n1"), "--actors", ACTORS, ZBMD_LINKS=links)
    await nodes.agreed("n1", "n2")
    options = ("--no-follow", "--nnodes", "1:2", "-n", "1")
    code, text = await nodes.command("n1", "submit", *options, str(PROGRAMS / "node/refs_rank.py"))
    assert code == 0, text
    session = await asyncio.to_thread(Session.connect)
    try:
        async with script_at(nodes, "n2") as script:
            await meet_and_part(session, second, script)
    finally:
        await asyncio.to_thread(session.close)


@asynccontextmanager
async def script_at(nodes: Nodes, name: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A script that is in the cluster by that node, and gone afterwards."""
    script = await asyncio.create_subprocess_exec(
        sys.executable,
        PROGRAMS / "node/refs_script.py",
        cwd=nodes.directory,
        env=nodes.environment(name),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield script
    finally:
        if script.returncode is None:
            script.kill()
        await script.wait()


async def meet_and_part(session: Session, second: Run, script: asyncio.subprocess.Process) -> None:
    """The test, once both nodes are there and both ranks are to come."""

    def up() -> list[str]:
        found = [name for name, _, _ in session.run(session.system.processes())]
        return found if len(found) == 4 else []

    processes: list[str] = await until(up)
    assert script.stdout is not None
    other_script = (await script.stdout.readline()).decode().partition(" ")[0]
    node = {name: node for name, _, node in session.run(session.system.processes())}
    assert node[other_script.partition("@")[2]] == "n2", "the one that it was given"
    refs = {name: await until(partial(life, session, name)) for name in (*processes, other_script)}
    actors = {**refs, session.system.name: session.spawn(app.Caller, name="caller")}
    for one, ref in actors.items():  # the other script dials others in its turn, after they have dialed it
        for other, there in actors.items():
            if one != other:
                called = await asyncio.to_thread(session.ask, ref, app.Call(there), timeout=TIMEOUT_S)
                wanted = other.partition("@")[0] if other.startswith("rank") else other
                assert called.process == wanted, f"{one} reached {other}"
                assert called.me.process == one, "the reference, in the words of the session"
    shown = await asyncio.to_thread(asyncio.run, once(busiest=True))
    seen = {(reply.process, row.name) for look in shown for reply in look.replies for row in reply.rows}
    assert seen >= {(process, "caller") for process in processes}, "what `zbmd-node top` shows"
    assert {look.target for look in shown} == {"n1", "n2"} and not any(look.silent for look in shown)
    script.kill()
    await all_are_told(session, actors, {other_script})
    with pytest.raises(ZbmdError, match=f"{other_script} has ended"):
        await asyncio.to_thread(session.ask, f"{other_script}/caller", app.Where(), timeout=TIMEOUT_S)
    victims = {name for name, _, node in session.run(session.system.processes()) if node == "n2"}
    assert len(victims) == 2
    monitors = [await asyncio.to_thread(spawn_watched, session, victim) for victim in victims]
    await second.kill()
    for monitor in monitors:
        down = await asyncio.to_thread(session.run, monitor.down(timeout=TIMEOUT_S))
        assert down.reason.kind is ReasonKind.LOST
    await all_are_told(session, {n: ref for n, ref in actors.items() if n != other_script}, victims)
    with pytest.raises(ZbmdError, match=r"no node or rank of the cluster|starting|lost|vacant"):
        await asyncio.to_thread(session.ask, f"{min(victims)}/caller", app.Where(), timeout=10)


async def all_are_told(session: Session, actors: dict[str, Ref], victims: set[str]) -> None:
    """Wait until all others have heard of the ends of these."""
    for name in set(actors) - victims:
        for victim in victims:
            await until(partial(told, session, actors[name], victim))


def spawn_watched(session: Session, process: str) -> Monitor:
    """Spawn an actor of an importable class there, and watch it."""

    async def spawn() -> Monitor:
        return session.system.monitor(
            await session.system.spawn_on(process, f"{ACTORS}:Caller", timeout=TIMEOUT_S)
        )

    return session.run(spawn())


def life(session: Session, process: str) -> Ref | None:
    """The reference that the process's actor gives of itself, once it is there."""
    try:
        found = session.ask(f"{process}/caller", app.Where(), reply=app.Here, timeout=5)
    except ZbmdError:
        return None
    assert isinstance(found.me, Ref)
    return found.me


def told(session: Session, ref: Ref, victim: str) -> bool:
    """That the victim's actor was lost, by the monitor and by the link, each once."""
    if ref.process.startswith("rank") and victim.startswith("rank"):  # in the words of its sibling
        victim = victim.partition("@")[0]
    texts = session.ask(ref, app.Heard(), timeout=TIMEOUT_S).texts
    assert texts.count(f"down {victim} lost") <= 1
    assert texts.count(f"exited {victim} lost") <= 1
    return {f"down {victim} lost", f"exited {victim} lost"} <= set(texts)


async def test_a_session_without_a_node_is_told_what_to_do(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    with pytest.raises(UserError, match="Start one with `zbmd-node up`"):
        await asyncio.to_thread(Session.connect)
