"""Supervisors of devices and of nodes, with real processes that are really killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from programs import PROGRAMS
from programs.actors import device_kinds

from zbmd.actors.core.ref import Ref
from zbmd.actors.process_pool.devices import (
    CHECK,
    CheckDevice,
    DeviceChecked,
    DeviceSpec,
    DeviceWorker,
    ProcessPool,
)
from zbmd.actors.process_pool.placement import Placement, PlacementMachine, PlacementState
from zbmd.actors.process_pool.process_actor import NodeProcess, Placements, node_child
from zbmd.actors.supervision.events import BackOff
from zbmd.actors.supervision.supervisor import AddChild, Children, ChildrenFailed, WhichChildren
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import UserError, ZbmdError

SOON = BackOff(first_ns=1_000_000, max_ns=50_000_000)
CORE = device_kinds.CORE
KIND = "programs.actors.device_kinds:Core"


@pytest.fixture
async def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ActorSystem]:
    """One that supervises; its workers have a device that is healthy unless a file says otherwise."""
    monkeypatch.setenv(device_kinds.SICK_VARIABLE, str(tmp_path))
    made = ActorSystem("boss")
    yield made
    await made.stop()


def worker(system: ActorSystem, name: str) -> DeviceWorker:
    cell = system.find(name, 0)
    assert cell is not None and isinstance(cell.actor, DeviceWorker)
    return cell.actor


async def up(system: ActorSystem, supervisor: Ref, name: str, starts: int) -> None:
    """Wait until the child has been started that often, and runs."""
    async with asyncio.timeout(60):
        while True:
            children = await supervisor.ask(WhichChildren(), reply=Children, timeout=120)
            if any(c[0] == name and c[1] == "running" and c[2] >= starts for c in children.children):
                return


async def test_a_worker_has_a_device_and_moves_to_another_when_it_fails(
    system: ActorSystem, tmp_path: Path
) -> None:
    devices = [DeviceSpec(name=f"dev{n}", kind=KIND, index=n) for n in range(2)]
    workers = ProcessPool(
        system, devices, modules=["programs.actors.device_kinds"], failures=1, quarantine_s=0.2
    )
    supervisor = await system.supervise([workers.child("w")], intensity=20, back_off=SOON)
    first = worker(system, "w")
    assert first.place == "dev0" and first.process is not None
    teller = await system.spawn_on("w", "programs.actors.device_kinds:Teller", name="teller", timeout=120)
    here = await teller.ask(device_kinds.Where(), timeout=120)
    assert (here.pid, here.cores) == (first.process.pid, [CORE])
    (tmp_path / "sick0").touch()
    checked = await system.ref(f"w/{CHECK}").ask(CheckDevice(), reply=DeviceChecked, timeout=120)
    assert checked.problem == "it is sick"
    os.kill(first.process.pid, signal.SIGKILL)
    await up(system, supervisor, "w", 2)
    second = worker(system, "w")
    assert second.place == "dev1" and second is not first
    assert workers.places.states["dev0"].value != "open", "its probes find that it is sick"
    (tmp_path / "sick0").unlink()
    async with asyncio.timeout(120):
        while workers.places.states["dev0"] is not PlacementState.OPEN:
            workers.places.news.clear()
            await workers.places.news.wait()
    assert second.process is not None
    await system.terminate(supervisor)
    assert second.process.returncode == 0, "it was asked to"
    await workers.close()


async def test_a_device_that_is_not_healthy_takes_no_worker(system: ActorSystem, tmp_path: Path) -> None:
    (tmp_path / "sick0").touch()
    workers = ProcessPool(system, [DeviceSpec(name="dev0", kind=KIND, index=0)], failures=1)
    with pytest.raises(ZbmdError, match="dev0 is not healthy: it is sick"):
        await system.supervise([workers.child("w")])
    with pytest.raises(ZbmdError, match="no place for w: dev0 quarantined"):
        await system.supervise([workers.child("w")])
    await workers.close()


async def test_a_kind_of_device_that_is_not_there_is_told(system: ActorSystem) -> None:
    cuda = DeviceSpec(name="cuda0", kind="zbmd.training.model_actors.operator_devices:CudaDevice", index=0)
    missing = DeviceSpec(name="gone", kind="no_such_module:Device", index=0)
    for device, words in ((missing, "there is no kind of device 'no_such_module:Device'"), (cuda, "cuda")):
        workers = ProcessPool(system, [device])
        with pytest.raises((ChildrenFailed, ZbmdError), match=words):
            await system.supervise([workers.child("w")])
        await workers.close()


async def test_workers_end_with_their_supervisor_and_with_its_process(system: ActorSystem) -> None:
    workers = ProcessPool(system, [DeviceSpec(name="dev", kind=KIND, index=0, capacity=4)])
    supervisor = await system.supervise([workers.child("a")], template=workers.child("template"))
    await supervisor.ask(AddChild(name="b"), timeout=60)
    pids = [os.pidfd_open(p.pid) for n in "ab" if (p := worker(system, n).process) is not None]
    down = await system.terminate(supervisor, timeout=0.0)
    assert down.reason.kind.value in ("killed", "shutdown")
    for fd in pids:
        await _ended(fd)
    await workers.close()


async def _ended(fd: int) -> None:
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: gone.done() or gone.set_result(None))
    try:
        async with asyncio.timeout(120):
            await gone
    finally:
        loop.remove_reader(fd)
        os.close(fd)


# Nodes.

NODE = PROGRAMS / "actors/node.py"


async def healthy(place: str) -> str:
    return ""


async def test_a_node_is_started_elsewhere_when_its_host_is_down(system: ActorSystem, tmp_path: Path) -> None:
    machine = PlacementMachine([Placement(name="h1"), Placement(name="h2")], failures=2)
    hosts = Placements(machine, healthy)
    command = (sys.executable, str(NODE), "{host}", str(tmp_path))
    supervisor = await system.supervise([node_child("n", hosts, command)], intensity=20, back_off=SOON)
    for starts, (down, there) in enumerate([("h1", "h2"), ("h2", "h1")], start=2):
        cell = system.find("n", 0)
        assert cell is not None and isinstance(cell.actor, NodeProcess) and cell.actor.process is not None
        assert cell.actor.place == down
        (tmp_path / f"down-{down}").touch()
        (tmp_path / f"down-{there}").unlink(missing_ok=True)
        os.killpg(cell.actor.process.pid, signal.SIGKILL)
        await up(system, supervisor, "n", starts)
        cell = system.find("n", 0)
        assert cell is not None and isinstance(cell.actor, NodeProcess) and cell.actor.place == there
    await system.terminate(supervisor)
    await hosts.close()


async def test_a_command_that_ends_before_it_is_ready_says_why(system: ActorSystem) -> None:
    hosts = Placements(PlacementMachine([Placement(name="h1")]), healthy)
    with pytest.raises(ZbmdError, match=r"n at h1: exit code 1; it said: no-such-command cannot be run"):
        await system.supervise([node_child("n", hosts, ("no-such-command", "{host}"))])
    await hosts.close()


async def test_a_command_that_is_never_ready_is_ended_and_says_so(
    system: ActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NodeProcess, "ready_s", 0.1)
    hosts = Placements(PlacementMachine([Placement(name="h1")]), healthy)
    with pytest.raises(ZbmdError, match=r"n at h1: not ready 0\.1 s after its start: it runs"):
        await system.supervise([node_child("n", hosts, ("sleep", "600"))])
    await hosts.close()


def test_a_device_without_hardware_says_so() -> None:
    from zbmd.training.model_actors.operator_devices import CudaDevice

    with pytest.raises(UserError, match=r"cupy|GPU"):
        CudaDevice(0).bind()
