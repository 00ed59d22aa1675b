"""References over a real cluster: ranks, nodes and a script reach each other's actors, and hear of ends."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from support.cluster.cluster_nodes import BUDGET, Nodes, Run

from zbmd.actors.core.ref import Ref
from zbmd.actors.core.signals import Monitor, ReasonKind
from zbmd.actors.session import Session
from zbmd.tools.node.top import once
from zbmd.transport.errors import UserError, ZbmdError

APP = '''
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.signals import Down, Exited
from zbmd.actors.contracts import Contract
from zbmd.actors.core.ref import Ref


class Where(Contract, id="refs.where"):
    pass


class Here(Contract, id="refs.here"):
    process: str
    me: Ref


class Call(Contract, id="refs.call"):
    """Ask the actor that is named, and tie yourself to it."""

    ref: Ref


class Called(Contract, id="refs.called"):
    process: str
    me: Ref


class Note(Contract, id="refs.note"):
    text: str


class Heard(Contract, id="refs.heard"):
    """All that the actor was told so far."""


class Notes(Contract, id="refs.notes"):
    texts: list[str]


class Caller(Actor, remote=True):
    trap_exit = True

    def __init__(self) -> None:
        self.texts = []

    @on(Where)
    async def where(self, _: Where) -> Here:
        return Here(self.system.name, self.ref)

    @on(Call)
    async def call(self, message: Call) -> Called:
        there = await message.ref.ask(Where(), reply=Here, timeout=20)
        await message.ref.tell(Note(f"from {self.system.name}"))
        self.monitor(message.ref)
        self.link(message.ref)
        return Called(there.process, self.ref)

    @on(Note)
    async def note(self, message: Note) -> None:
        self.texts.append(message.text)

    @on(Down)
    async def down(self, down: Down) -> None:
        self.texts.append(f"down {down.ref.process} {down.reason.kind.value}")

    @on(Exited)
    async def exited(self, exited: Exited) -> None:
        self.texts.append(f"exited {exited.ref.process} {exited.reason.kind.value}")

    @on(Heard)
    async def heard(self, _: Heard) -> Notes:
        return Notes(self.texts)


async def start(system) -> None:
    await system.spawn(Caller, name="caller")
'''

JOB = """
import asyncio

import zbmd
from zbmd.actors.core.actor_base import allow_remote_modules
from app import Caller


async def main() -> None:
    allow_remote_modules("app")
    async with zbmd.join() as worker:
        await worker.system.spawn(Caller, name="caller")
        print("ready", flush=True)
        await asyncio.Event().wait()


zbmd.run(main())
"""
SCRIPT = """
import asyncio

import zbmd
from app import Caller


async def main() -> None:
    async with zbmd.connect() as system:
        await system.spawn(Caller, name="caller")
        print(f"{system.name} is in", flush=True)
        await asyncio.Event().wait()


zbmd.run(main())
"""
TIMEOUT_S = 30.0


@pytest.fixture
def app(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The contracts of the job, in this process as well, which is the script."""
    (nodes.directory / "app.py").write_text(APP)
    (nodes.directory / "job.py").write_text(JOB)
    (nodes.directory / "script.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(str(nodes.directory))
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(nodes.directory / "cookie"))
    monkeypatch.setenv("ZBMD_STATE_DIR", str(nodes.directory / "n1"))
    yield importlib.import_module("app")
    del sys.modules["app"]


async def until(holds: Callable[[], Any]) -> Any:
    """Ask again until it holds."""
    async with asyncio.timeout(TIMEOUT_S):
        while not (found := await asyncio.to_thread(holds)):
            pass
        return found


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_references_work_between_all_processes(nodes: Nodes, app: Any, links: str) -> None:
    """Each actor asks and tells those of all other processes, and hears of the ends of the killed."""
    first = await nodes.up("n1", "--recovery-budget", BUDGET, "--actors", "app", ZBMD_LINKS=links)
    await first.until("view 1: ")
    second = await nodes.up("n2", "--join", nodes.address("n1"), "--actors", "app", ZBMD_LINKS=links)
    await nodes.agreed("n1", "n2")
    options = ("--no-follow", "--nnodes", "1:2", "-n", "1")
    code, text = await nodes.command("n1", "submit", *options, "job.py")
    assert code == 0, text
    session = await asyncio.to_thread(Session.connect)
    try:
        async with script_at(nodes, "n2") as script:
            await meet_and_part(session, app, second, script)
    finally:
        await asyncio.to_thread(session.close)


@asynccontextmanager
async def script_at(nodes: Nodes, name: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A script that is in the cluster by that node, and gone afterwards."""
    script = await asyncio.create_subprocess_exec(
        sys.executable,
        "script.py",
        cwd=nodes.directory,
        env={**nodes.environment(name), "PYTHONPATH": str(nodes.directory)},
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield script
    finally:
        if script.returncode is None:
            script.kill()
        await script.wait()


async def meet_and_part(session: Session, app: Any, second: Run, script: asyncio.subprocess.Process) -> None:
    """The test, once both nodes are there and both ranks are to come."""

    def up() -> list[str]:
        found = [name for name, _, _ in session.run(session.system.processes())]
        return found if len(found) == 4 else []

    processes: list[str] = await until(up)
    assert script.stdout is not None
    other_script = (await script.stdout.readline()).decode().partition(" ")[0]
    node = {name: node for name, _, node in session.run(session.system.processes())}
    assert node[other_script.partition("@")[2]] == "n2", "the one that it was told"
    refs = {name: await until(partial(life, session, name, app)) for name in (*processes, other_script)}
    actors = {**refs, session.system.name: session.spawn(app.Caller, name="caller")}
    for one, ref in actors.items():  # the other script dials others in its turn, after they have dialed it
        for other, there in actors.items():
            if one != other:
                called = await asyncio.to_thread(session.ask, ref, app.Call(there), timeout=20)
                wanted = other.partition("@")[0] if other.startswith("rank") else other
                assert called.process == wanted, f"{one} reached {other}"
                assert called.me.process == one, "the reference, in the words of the session"
    shown = await asyncio.to_thread(asyncio.run, once(busiest=True))
    seen = {(reply.process, row.name) for look in shown for reply in look.replies for row in reply.rows}
    assert seen >= {(process, "caller") for process in processes}, "what `zbmd-node top` shows"
    assert {look.target for look in shown} == {"n1", "n2"} and not any(look.silent for look in shown)
    script.kill()
    await all_are_told(session, app, actors, {other_script})
    with pytest.raises(ZbmdError, match=f"{other_script} has ended"):
        await asyncio.to_thread(session.ask, f"{other_script}/caller", app.Where(), timeout=10)
    victims = {name for name, _, node in session.run(session.system.processes()) if node == "n2"}
    assert len(victims) == 2
    monitors = [await asyncio.to_thread(spawn_watched, session, victim) for victim in victims]
    await second.kill()
    for monitor in monitors:
        down = await asyncio.to_thread(session.run, monitor.down(timeout=TIMEOUT_S))
        assert down.reason.kind is ReasonKind.LOST
    await all_are_told(session, app, {n: ref for n, ref in actors.items() if n != other_script}, victims)
    with pytest.raises(ZbmdError, match=r"no node or rank of the cluster|starting|lost|vacant"):
        await asyncio.to_thread(session.ask, f"{min(victims)}/caller", app.Where(), timeout=10)


async def all_are_told(session: Session, app: Any, actors: dict[str, Ref], victims: set[str]) -> None:
    """Wait until all others have heard of the ends of these."""
    for name in set(actors) - victims:
        for victim in victims:
            await until(partial(told, session, actors[name], app, victim))


def spawn_watched(session: Session, process: str) -> Monitor:
    """Spawn an actor of an importable class there, and watch it."""

    async def spawn() -> Monitor:
        return session.system.monitor(await session.system.spawn_on(process, "app:Caller", timeout=20))

    return session.run(spawn())


def life(session: Session, process: str, app: Any) -> Ref | None:
    """The reference that the process's actor gives of itself, once it is there."""
    try:
        found = session.ask(f"{process}/caller", app.Where(), reply=app.Here, timeout=5)
    except ZbmdError:
        return None
    assert isinstance(found.me, Ref)
    return found.me


def told(session: Session, ref: Ref, app: Any, victim: str) -> bool:
    """That the victim's actor was lost, by the monitor and by the link, each once."""
    if ref.process.startswith("rank") and victim.startswith("rank"):  # in the words of its sibling
        victim = victim.partition("@")[0]
    texts = session.ask(ref, app.Heard(), timeout=10).texts
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
