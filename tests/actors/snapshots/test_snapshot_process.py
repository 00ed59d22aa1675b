"""A real snapshot process: it holds memory beyond its launcher, is replaced when killed, leaks nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
from support.processes.children import children_of
from support.processes.polling import until
from support.processes.stopping import stop

from zbmd.actors.snapshots.client import address_of, attach, drop, find_holders, look, tag_of
from zbmd.actors.snapshots.keeper import HOLDERS_STARTED_MAX, SnapshotKeeper
from zbmd.actors.snapshots.messages import Finish, JobIdentity, Refused, encode
from zbmd.transport.errors import PeerLost, UserError

IDENTITY = JobIdentity(
    run="here", release="1", python="3.11", code="c0", ranks=3, arena_bytes=1 << 20, settings="s0"
)
LONG_NS = 600 * 10**9


@pytest.fixture
def run(tmp_path: object) -> str:
    return f"{tmp_path}\0train.py"


class Launcher:
    """A launcher with one memfd a rank, and what its keeper says."""

    def __init__(self, run: str, *, identity: JobIdentity = IDENTITY, idle_ns: int = LONG_NS) -> None:
        self.said: list[str] = []
        self.keeper = SnapshotKeeper(run, lambda: identity, idle_ns, self.said.append)
        self.memory: dict[int, int] = {}

    def rank(self, rank: int, content: bytes = b"") -> int:
        found = self.keeper.take(rank)
        self.memory[rank] = os.memfd_create("test", os.MFD_CLOEXEC) if found is None else found
        if content:
            os.pwrite(self.memory[rank], content, 0)
        self.keeper.add(rank)
        return self.memory[rank]

    async def holds(self, ranks: int) -> int:
        """Return the holder's process once it has the memory of so many ranks."""

        def is_there() -> bool:
            for address in find_holders(job=self.keeper.job):
                found = look(address.name)
                if found is not None:
                    count = len(found.memory)
                    found.close()
                    return count == ranks
            return False

        await until(is_there)
        return self.keeper.pid


@asynccontextmanager
async def launched(run: str, *, keeps: bool = False, **more: object) -> AsyncGenerator[Launcher]:
    made = Launcher(run, **more)  # type: ignore[arg-type]
    try:
        await made.keeper.find()
        yield made
    finally:
        await made.keeper.close(keeps=keeps)
        for memory in made.memory.values():
            os.close(memory)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was our child is waited for."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.fixture(autouse=True)
def waited_for() -> Generator[None]:
    """A launcher that leaves a holder ends itself; here it does not, and would never wait for it."""
    others = set(children_of())  # processes that tests of other modules share
    yield
    for pid in set(children_of()) - others:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


async def no_holder(run: str) -> None:
    await until(lambda: not find_holders(tag=tag_of(run)))


async def test_memory_outlives_its_launcher_and_goes_to_the_next_one(run: str) -> None:
    async with launched(run, keeps=True) as first:
        for rank in range(2):
            first.rank(rank, b"rank%d" % rank)
        first.keeper.keep(first.memory)
        pid = await first.holds(2)
        first.rank(2, b"late")
        assert await first.holds(3) == pid
        assert os.getsid(pid) == pid, "it is in a session of its own"
    assert is_alive(pid), "the run failed, so its memory waits"
    assert any(f"process {pid} holds the state of this job for 10min" in line for line in first.said)

    async with launched(run) as second:
        assert second.keeper.resumes and second.keeper.job == first.keeper.job
        for rank in range(3):
            expected = b"late" if rank == 2 else b"rank%d" % rank
            assert os.pread(second.rank(rank), 5, 0) == expected
        second.keeper.keep(second.memory)
        assert await second.holds(3) == pid
    await until(lambda: not is_alive(pid))
    assert not find_holders(tag=tag_of(run)), "the job has ended, and its holder with it"


async def test_a_killed_holder_is_reported_and_another_one_gets_all_memory(run: str) -> None:
    async with launched(run, keeps=True) as first:
        for rank in range(3):
            first.rank(rank, b"rank%d" % rank)
        first.keeper.keep(first.memory)
        for _ in range(HOLDERS_STARTED_MAX - 1):
            pid = await first.holds(3)
            os.kill(pid, signal.SIGKILL)
            await until(lambda before=pid: first.keeper.pid not in (0, before))  # type: ignore[misc]
        assert "is lost, killed (SIGKILL): another one takes its place" in first.said[-1]
        last = await first.holds(3)
    async with launched(run) as second:
        assert [os.pread(second.rank(rank), 5, 0) for rank in range(3)] == [b"rank0", b"rank1", b"rank2"]
        os.kill(last, signal.SIGKILL)  # one that another launcher has started
        await until(lambda: any(f"process {last} is lost" in line for line in second.said))


async def test_after_a_number_of_lost_holders_none_is_started_and_the_job_goes_on(run: str) -> None:
    async with launched(run) as first:
        first.rank(0)
        first.keeper.keep(first.memory)
        for _ in range(HOLDERS_STARTED_MAX):
            os.kill(await first.holds(1), signal.SIGKILL)
            told = len(first.said)
            await until(lambda: len(first.said) > told)  # noqa: B023
        assert "the job goes on from its last checkpoint" in first.said[-1]
        assert first.keeper.pid == 0
    assert not find_holders(tag=tag_of(run))


@pytest.mark.parametrize("handed", range(3))
async def test_a_holder_that_is_killed_in_the_middle_of_a_hand_over(run: str, handed: int) -> None:
    """The first one has so many ranks when it is killed; the next one has all."""
    async with launched(run) as first:
        for rank in range(handed):
            first.rank(rank)
        first.keeper.keep(first.memory)
        if handed:
            pid = await first.holds(handed)
        else:
            await until(lambda: first.keeper.pid != 0)
            pid = first.keeper.pid
        stop(pid)
        for rank in range(handed, 3):
            first.rank(rank)  # these wait in its socket
        os.kill(pid, signal.SIGKILL)
        await until(lambda: first.keeper.pid not in (0, pid))
        await first.holds(3)


async def test_another_launcher_with_another_code_is_told_and_gets_nothing(run: str) -> None:
    async with launched(run, keeps=True) as first:
        first.rank(0, b"state")
        first.keeper.keep(first.memory)
        await first.holds(1)
    other = msgspec.structs.replace(IDENTITY, code="c1", release="2")
    async with launched(run, identity=other) as second:
        assert not second.keeper.resumes and second.keeper.job != first.keeper.job
        assert "these snapshots are of another release, code" in second.said[0]
        assert second.keeper.take(0) is None
    (address,) = find_holders(tag=tag_of(run))
    assert drop(address.name) == ""
    await no_holder(run)
    assert drop(address.name) == "", "it has ended already"
    with pytest.raises(PeerLost):
        attach(address.name, IDENTITY)


async def test_a_second_launcher_of_a_job_that_runs_is_another_job(run: str) -> None:
    async with launched(run) as first:
        first.rank(0)
        first.keeper.keep(first.memory)
        await first.holds(1)
        (address,) = find_holders(tag=tag_of(run))
        assert isinstance(attach(address.name, IDENTITY), Refused)
        assert f"process {os.getpid()} runs the job" in drop(address.name)
        async with launched(run) as second:
            assert not second.said and second.keeper.job != first.keeper.job
            second.rank(0)
            second.keeper.keep(second.memory)
            await second.holds(1)
            assert len(find_holders(tag=tag_of(run))) == 2
    await no_holder(run)


async def test_it_ends_by_itself_when_no_launcher_comes(run: str) -> None:
    async with launched(run, keeps=True, idle_ns=10**7) as first:
        first.rank(0)
        first.keeper.keep(first.memory)
        pid = await first.holds(1)
    await until(lambda: not is_alive(pid))
    assert not find_holders(tag=tag_of(run))


async def test_strangers_lose_their_own_connection_alone(run: str) -> None:
    async with launched(run) as first:
        first.rank(0)
        first.keeper.keep(first.memory)
        await first.holds(1)
        address = address_of(tag_of(run), first.keeper.job)
        reads, writes = os.pipe()
        sends: list[Callable[[socket.socket], object]] = [
            lambda line: line.send(b"\xc1 no message"),
            lambda line: line.send(encode(Finish())),
            lambda line: socket.send_fds(line, [encode(Finish())], [first.memory[0]]),
            lambda line: socket.send_fds(line, [b"\x91\xa4look"], [reads]),
        ]
        for send in sends:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
                line.settimeout(60)
                line.connect(f"\0{address}")
                send(line)
                assert line.recv(1) == b"", "it closes the connection"
        os.close(reads)
        os.close(writes)
        assert await first.holds(1) == first.keeper.pid


async def test_an_identity_that_cannot_be_read_is_said_and_costs_the_job_nothing(run: str) -> None:
    def unreadable() -> JobIdentity:
        raise UserError("there are more than 20000 Python files")

    said: list[str] = []
    keeper = SnapshotKeeper(run, unreadable, LONG_NS, said.append)
    memory = {0: os.memfd_create("test", os.MFD_CLOEXEC)}
    await keeper.find()
    keeper.keep(memory)
    await until(lambda: bool(said))
    assert "there are more than 20000 Python files" in said[0]
    async with asyncio.timeout(120):
        await keeper.close(keeps=True)
    os.close(memory[0])
