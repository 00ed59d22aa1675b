"""`zbmd-node run` over several nodes: real ones, as torchrun's users, srun, pods and etcd start them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import Generator
from functools import partial

import pytest
from programs import PROGRAMS
from programs.node import greeter
from support.cluster.cluster_nodes import TIMEOUT_S, Nodes, Run
from support.cluster.etcd_server import EtcdServer, etcd_server, free_ports

from zbmd.actors.session import Session

BUDGET = "2s"
"""Deaths are proven by the kernel here; a busy machine is not to be taken for one."""
TELL, WAIT, MEET = (str(PROGRAMS / "node" / name) for name in ("tell_variables.py", "wait.py", "meet.py"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


async def started(nodes: Nodes, name: str, *argv: str, **variables: str) -> Run:
    return await nodes.start(name, "run", *argv, cwd=None, ZBMD_ARENA="1MiB", **variables)


class Door:
    """Options that name one door, the same on all nodes."""

    def __init__(self, nodes: Nodes, *options: str, ranks: int = 1) -> None:
        self.nodes = nodes
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.options = (
            *("--rdzv-endpoint", self.address, "--recovery-budget", BUDGET),
            *("--nproc-per-node", str(ranks), *options),
        )

    async def run(self, name: str, *argv: str, **variables: str) -> Run:
        """One node of the run."""
        return await started(self.nodes, name, *self.options, *argv, **variables)

    async def numbered(self, count: int, *argv: str) -> list[Run]:
        """Nodes 0 to `count` - 1."""
        return [await self.run(f"n{n}", "--node-rank", str(n), *argv) for n in range(count)]


async def codes(*runs: Run) -> list[int]:
    try:
        return [await run.ended() for run in runs]
    except TimeoutError:
        pytest.fail("still there:\n" + "\n\n".join(map(str, runs)))


def printed(run: Run) -> list[str]:
    """Return what its ranks printed, in the order of ranks."""
    return sorted(line for line in run.lines if line.startswith("[rank"))


async def test_torchruns_flags_run_over_two_nodes_the_founder_being_late(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes=2", "--rdzv_id", "seven", ranks=2)
    second = await door.run("n1", "--node_rank", "1", TELL)
    await second.until("not let in yet: .*nobody listens")
    first = await door.run("n0", "--node_rank", "0", TELL)
    assert await codes(first, second) == [0, 0], f"{first}\n{second}"
    host, port = printed(first)[0].split()[6:8]
    assert printed(first) == [f"[rank{r}]: {r} {r} 4 2 0 {host} {port} seven" for r in (0, 1)]
    assert printed(second) == [f"[rank{r}]: {r} {r - 2} 4 2 1 {host} {port} seven" for r in (2, 3)]
    with socket.create_server((host, int(port))):
        assert port != door.address.rpartition(":")[2], "rank 0 has a port of its own"


@pytest.mark.parametrize(("how", "code"), [("exit", 2), ("raise", 1)])
async def test_a_job_that_fails_ends_with_its_code_on_every_node(nodes: Nodes, how: str, code: int) -> None:
    runs = await Door(nodes, "--nnodes", "2", "--max-restarts", "0").numbered(2, WAIT, how)
    assert await codes(*runs) == [code, code], "\n".join(map(str, runs))
    for run in runs:
        assert re.search(r"\[zbmd\]: the run failed: .*rank1 failed", str(run)), run


async def test_without_numbers_whoever_holds_the_address_founds(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "3:3", "--rdzv-backend", "c10d")
    runs = [await door.run(name, TELL) for name in ("a", "b", "c")]
    assert await codes(*runs) == [0, 0, 0], "\n".join(map(str, runs))
    ranks = [int(line.split()[1]) for run in runs for line in printed(run)]
    assert sorted(ranks) == [0, 1, 2]


async def test_any_node_may_be_killed_the_founder_included(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "2:4", "--on-loss", "shrink")
    runs = await door.numbered(4, WAIT)
    for run in runs:
        await run.until(r"rank \d of \d")
    await runs[0].kill()
    await runs[3].until("-0 is gone")
    await runs[2].kill()
    await runs[3].until("-2 is gone")
    (nodes.directory / "done").touch()
    assert await codes(runs[1], runs[3]) == [0, 0], f"{runs[1]}\n{runs[3]}"


async def test_references_work_between_ranks_nodes_and_a_script(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a job under `zbmd-node up`: each rank asks all that it finds, and a script."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(nodes.directory / "cookie"))
    door = Door(nodes, "--nnodes", "2")
    runs = await door.numbered(2, MEET)
    for run in runs:
        await run.until("rank. has met 4 processes by address, and rank0 and rank1 by name and group")
    session = await asyncio.to_thread(Session.connect, door.address)
    try:
        mine = await asyncio.to_thread(session.spawn, greeter.Greeter, name="greeter")
        ranks = [name for name, _, _ in session.run(session.system.processes()) if name.startswith("rank")]
        for rank in sorted(ranks):
            call = partial(
                session.ask, f"{rank}/greeter", greeter.Call(mine), reply=greeter.Here, timeout=TIMEOUT_S
            )
            assert (await asyncio.to_thread(call)).process == session.system.name, f"{rank} asked the script"
        assert len(ranks) == 2
    finally:
        await asyncio.to_thread(session.close)
    (nodes.directory / "done").touch()
    assert await codes(*runs) == [0, 0], "\n".join(map(str, runs))


async def test_a_node_that_is_killed_is_replaced_by_another(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "3", "--max-restarts", "9")
    runs = await door.numbered(3, WAIT)
    for run in runs:
        await run.until(r"rank \d of 3")
    await runs[2].kill()
    await runs[0].until("3 nodes are needed, 2 are here; waiting for at most 10min")
    again = await door.run("n2", "--node-rank", "2", WAIT)
    await again.until("rank 2 of 3")
    (nodes.directory / "done").touch()
    assert await codes(runs[0], runs[1], again) == [0, 0, 0], f"{runs[0]}\n{again}"


async def test_the_founder_may_die_before_the_job_begins(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "4")
    runs = await door.numbered(3, TELL)
    for run in runs:
        await run.until("3 of 4 nodes are here")
    await runs[0].kill()
    await runs[1].until("-0 is gone")
    found = await runs[1].until(r"this node is \S+ at (\S+);")
    there = ("--rdzv-endpoint", found[1], "--port", str(free_ports(1)[0]))
    others = [
        await door.run("m0", *there, "--node-rank", "0", TELL),
        await door.run("m3", *there[:2], "--node-rank", "3", TELL),
    ]
    assert await codes(*runs[1:], *others) == [0] * 4, "\n".join(map(str, [*runs, *others]))


async def test_ctrl_c_on_one_node_stops_the_job_on_all(nodes: Nodes) -> None:
    runs = await Door(nodes, "--nnodes", "2").numbered(2, WAIT)
    await runs[0].until("rank 0 of 2")
    runs[1].signal(signal.SIGINT)
    assert await codes(*runs) == [1, 130], f"{runs[0]}\n{runs[1]}"
    await runs[0].until(r"\[zbmd\]: stopped: SIGINT received on \S+-1")


async def test_sigterm_takes_one_node_out(nodes: Nodes) -> None:
    runs = await Door(nodes, "--nnodes", "1:2", "--on-loss", "shrink").numbered(2, WAIT)
    await runs[0].until(r"rank 0 of \d")
    await runs[1].until(r"rank 1 of \d")
    runs[1].signal(signal.SIGTERM)
    assert await runs[1].ended() == 128 + signal.SIGTERM, str(runs[1])
    await runs[0].until("-1 is gone")
    (nodes.directory / "done").touch()
    assert await runs[0].ended() == 0, str(runs[0])


async def test_a_founder_that_leaves_and_comes_back_is_found_again(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "2", "--join-timeout", "60s")
    first, second = await door.numbered(2, WAIT)
    for node in (first, second):
        await node.until(r"^\[rank\d\]: ")
    first.signal(signal.SIGTERM)
    assert await first.ended() == 128 + signal.SIGTERM
    await second.until("2 nodes are needed, 1 are here; waiting for at most 1min")
    again = await door.run("n0", "--node-rank", "0", WAIT)
    await second.until(r"the run has begun again at \S+-0: this node joins it there")
    await again.until("the job runs on 2 of 2 nodes")
    again.signal(signal.SIGINT)
    assert await codes(again, second) == [128 + signal.SIGINT, 1]


async def test_a_founder_that_is_killed_and_comes_back_joins_the_run_that_goes_on(nodes: Nodes) -> None:
    """It knows nobody, and could begin alone: another run of the same job beside the first."""
    door = Door(nodes, "--nnodes", "1:3")
    runs = await door.numbered(3, WAIT)
    for run in runs:
        await run.until(r"^\[rank\d\]: ")
    await runs[0].kill()
    await runs[1].until("-0 is gone")
    again = await door.run("n0", "--node-rank", "0", WAIT)
    await again.until(r"the run is under way at \S+-1: this node joins it there")
    await again.until("the job runs on 3 of 3 nodes")
    await again.until(r"^\[rank\d\]: ")
    assert not any("the job runs on 1 of" in line for line in again.lines), again
    (nodes.directory / "done").touch()
    assert await codes(*runs[1:], again) == [0] * 3, "\n".join(map(str, [*runs, again]))


async def test_who_waits_for_nodes_gives_up(nodes: Nodes) -> None:
    doors = [Door(nodes, "--nnodes", "2", "--join-timeout", "1s") for _ in range(2)]
    alone, nobody = [await door.run(f"n{n}", "--node-rank", str(n), TELL) for n, door in enumerate(doors)]
    assert await codes(alone, nobody) == [1, 1], f"{alone}\n{nobody}"
    await alone.until("given up after 1s: 1 of 2 nodes are here. Start zbmd-node run on the others too")
    await nobody.until("no member of a cluster has let this node in.*nobody listens at its address")


async def test_who_has_no_cookie_is_told_what_to_do(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "2")
    first = await door.run("n0", "--node-rank", "0", TELL)
    await first.until("1 of 2 nodes are here")
    cookie = str(nodes.directory / "elsewhere" / "cookie")
    second = await door.run("n1", "--node-rank", "1", TELL, ZBMD_COOKIE_FILE=cookie)
    assert await second.ended() == 2
    await second.until(rf"another cookie.*copy its cookie file to {cookie}")


async def test_a_node_that_was_started_otherwise_is_told_so(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "2", "--rdzv-id", "one")
    first = await door.run("n0", "--node-rank", "0", TELL)
    second = await door.run("n1", "--node-rank", "1", TELL, "--lr", "3")
    assert await codes(first, second) == [0, 0]
    await second.until(r"was started with another arguments than \S+, which has given the job")


@pytest.mark.parametrize("names", [("A", "B"), ("A", ""), ("", "")])
@pytest.mark.parametrize("number", ["0", "1"])
async def test_a_node_of_another_run_is_refused_and_runs_nothing(
    nodes: Nodes, names: tuple[str, str], number: str
) -> None:
    door = Door(nodes, "--nnodes", "2", "--join-timeout", "60s")
    options = [("--rdzv-id", name) if name else () for name in names]
    first = await door.run("a0", "--node-rank", "0", *options[0], TELL, "a")
    await first.until("1 of 2 nodes are here")
    other = await door.run("b", "--node-rank", number, *options[1], TELL, "b")
    assert await other.ended() == 2
    whose = "the run A" if names[0] else f"the run of `{TELL} a`"
    mine = f"the run {names[1]}" if names[1] else f"the run of `{TELL} b`"
    assert f"it belongs to {whose}, and this node was started for {mine}. Two runs have met" in str(other)
    assert not printed(first) and not printed(other)
    second = await door.run("a1", "--node-rank", "1", *options[0], TELL, "a")
    assert await codes(first, second) == [0, 0], f"{first}\n{second}"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            ("--nnodes", "40", "-n", "26"),
            "the ranks of a job must be 1 to 1022, not 1040. Give fewer with --nnodes",
        ),
        (("--nnodes", "2", "--local-addr", "192.0.2.77"), "no interface of this machine has that address"),
        (("--nnodes", "2", "--join-timeout", "5"), "--join-timeout: '5' is not a duration"),
    ],
)
async def test_what_cannot_be_is_told_in_words(
    nodes: Nodes, options: tuple[str, ...], complaint: str
) -> None:
    run = await Door(nodes).run("n0", "--node-rank", "0", *options, TELL)
    assert await run.ended() == 2
    assert complaint in str(run)


async def test_a_founders_port_that_another_has_is_told(nodes: Nodes) -> None:
    door = Door(nodes, "--nnodes", "2")
    host, _, port = door.address.partition(":")
    with socket.create_server((host, int(port))):
        run = await door.run("n0", "--node-rank", "0", TELL)
        assert await run.ended() == 2
    assert "the port is in use" in str(run)


# --- launchers ------------------------------------------------------------------------------------------


def _on(number: int) -> tuple[str, ...]:
    """Every node of a step listens at the same port; here on a loopback address of its own."""
    return "-n", "2", "--local-addr", f"127.0.0.{number + 1}"


async def test_a_step_of_slurm(nodes: Nodes) -> None:
    step: dict[str, str] = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_RESV_PORTS": str(free_ports(1)[0]),
    }
    runs = [await started(nodes, f"n{n}", *_on(n), TELL, SLURM_NODEID=str(n), **step) for n in (1, 0)]
    assert await codes(*runs) == [0, 0], f"{runs[0]}\n{runs[1]}"
    told = [line.split()[1:7] for line in printed(runs[1]) + printed(runs[0])]
    assert told == [[str(r), str(r % 2), "4", "2", str(r // 2), "127.0.0.1"] for r in range(4)]


async def test_workers_of_torchrun(nodes: Nodes) -> None:
    worker = {
        "TORCHELASTIC_RUN_ID": f"run{os.getpid()}",
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    runs = [
        await started(nodes, f"n{rank}", TELL, GROUP_RANK=str(rank // 2), LOCAL_RANK=str(rank % 2), **worker)
        for rank in range(4)
    ]
    assert await codes(*runs) == [0] * 4, "\n".join(map(str, runs))
    assert [len(printed(run)) for run in runs] == [2, 0, 2, 0]
    assert "nothing to do here: it is process 1 of 2 on this host" in str(runs[1])
    ports = {line.split()[7] for run in runs for line in printed(run)}
    assert len(ports) == 1 and "29500" not in ports, "torchrun's own store listens there"


async def test_pods_of_a_job(nodes: Nodes) -> None:
    port = str(free_ports(1)[0])
    pods = [
        {"JOB_COMPLETION_INDEX": str(n), "POD_IP": f"127.0.0.{n + 1}", "ZBMD_SERVICE": "localhost"}
        for n in range(2)
    ]
    options = ("--nnodes", "2", "-n", "1", "--port", port)
    runs = [
        await started(nodes, f"n{n}", *options, TELL, **pod) for n, pod in reversed(list(enumerate(pods)))
    ]
    assert await codes(*runs) == [0, 0], f"{runs[0]}\n{runs[1]}"


async def test_a_store_says_who_founds_and_either_of_two_may_be_lost(
    nodes: Nodes, server: EtcdServer
) -> None:
    options = ("--nnodes", "1:2", "-n", "1", "--on-loss", "shrink", "--recovery-budget", BUDGET)
    store = ("--store", f"{server.url}/run")
    runs = [await started(nodes, name, *options, *store, WAIT) for name in ("a", "b")]
    await runs[1].until(r"rank \d of \d")
    first = await runs[0].until(r"rank (\d) of \d")
    founder, other = runs if first[1] == "0" else reversed(runs)
    founder.signal(signal.SIGSTOP)
    await other.until("is gone")
    (nodes.directory / "done").touch()
    assert await other.ended() == 0, str(other)
    await founder.kill()
