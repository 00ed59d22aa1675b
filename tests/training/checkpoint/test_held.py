"""A real snapshot process that writes checkpoints: what is asked for, overwritten, refused and lost."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from support.processes.polling import until
from support.processes.stopping import stop

from zbmd.actors.snapshots.client import HolderLine, find_holders
from zbmd.actors.snapshots.keeper import SnapshotKeeper
from zbmd.actors.snapshots.messages import JobIdentity, Work
from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.held import line as lines
from zbmd.training.checkpoint.held.line import HeldLine
from zbmd.training.checkpoint.held.messages import (
    Event,
    Heard,
    HeldPiece,
    SaveShard,
    Span,
    arguments_of,
    decode_asked,
    decode_heard,
    decode_shard,
    encode,
    put_arguments,
)
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import Piece, open_state, stem_of
from zbmd.training.checkpoint.writer import NICE_MAX, YIELDING, WriterThreads
from zbmd.training.redundancy.stamped import STATE_BLOCK, StampedSlots, StateName
from zbmd.training.run.ledger import LOG_FORMAT, LOG_NAME, CommitLog, CommitRecord, LogHeader
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.kept import _ENTRY, file_of
from zbmd.transport.memory.memfd import TABLE_BYTES

ELEMENTS, RANKS = 5000, 2
WHOLE = RANKS * ELEMENTS


class Rank:
    """One rank: its memory, as its arena has it, and its line to the snapshot process."""

    def __init__(self, rank: int, job: int) -> None:
        self.rank = rank
        name = StateName(run=job, place=rank, ranks=RANKS, elements=ELEMENTS)
        self.fd = os.memfd_create(f"rank{rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.fd, TABLE_BYTES + name.nbytes)
        os.pwrite(self.fd, _ENTRY.pack(STATE_BLOCK.encode(), TABLE_BYTES, name.nbytes), 0)
        memory = np.frombuffer(mmap.mmap(self.fd, 0), np.uint8)[TABLE_BYTES:]
        self.slots = StampedSlots(memory, name)
        self.line = HeldLine(rank, memory, file_of(self.fd), job=job)

    def hold(self, version: int) -> None:
        slot = version % 2
        self.slots.begin(slot)
        self.slots.slots[slot][:] = np.arange(ELEMENTS) + 1000 * self.rank + version
        self.slots.end(slot, version, 1)

    def save(self, version: int, out: Path, *, token: int = 1, commits: bool = True, **more: object) -> None:
        counter, count = self.slots.begun(version % 2)
        request = SaveShard(
            version=version,
            stem=stem_of(version, token),
            rank=self.rank,
            place=self.rank,
            homes=(0,) * RANKS,
            block=STATE_BLOCK,
            counter=counter,
            count=count,
            storage=str(out),
            log=str(out.parent / LOG_NAME),
            plan="{}",
            loss_scale=(),
            keep=2,
            every=0,
            codec=Codec.NONE,
            pieces=(),
        )
        fields = {name: getattr(request, name) for name in request.__struct_fields__}
        start = self.rank * ELEMENTS
        cut = flat_slice(WHOLE, start, start + ELEMENTS)
        apart = np.full(ELEMENTS, 7 + self.rank, np.float32)  # lies in no memory that is held
        piece = Piece("w", cut, (self.slots.slots[version % 2], apart), ("weights", "mean"))
        assert self.line.is_there and self.line.save(SaveShard(**{**fields, **more}), [piece])  # type: ignore[arg-type]
        if commits:
            self.line.decided(is_committed=True)


def test_the_thread_that_writes_yields_until_ranks_wait() -> None:
    def nice() -> int:
        return threads.writer.submit(os.getpriority, os.PRIO_PROCESS, 0).result()

    with closing(WriterThreads(yields=True)) as threads, closing(WriterThreads()) as others:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert nice() == min(own + YIELDING, NICE_MAX)
        threads.hurry()
        assert nice() in (own, min(own + YIELDING, NICE_MAX))  # as this process may
        threads.hurry(False)
        assert nice() == min(own + YIELDING, NICE_MAX)
        assert others.writer.submit(os.getpriority, os.PRIO_PROCESS, 0).result() == own


class Job:
    """The ranks of a job, and the launcher of its snapshot process."""

    def __init__(self, run: str) -> None:
        self.said: list[str] = []
        identity = JobIdentity(
            run="run", release="1", python="3", code="c", ranks=RANKS, arena_bytes=1, settings="s"
        )
        program = "zbmd.training.run.snapshots"
        self.keeper = SnapshotKeeper(run, lambda: identity, 60 * 10**9, self.said.append, program=program)
        self.ranks = [Rank(rank, self.keeper.job) for rank in range(RANKS)]
        self.memory = {rank.rank: rank.fd for rank in self.ranks}

    async def there(self) -> None:
        await until(lambda: all(rank.line.is_there for rank in self.ranks))

    async def heard(self, rank: int, *events: Event) -> list[Heard]:
        """Return what a rank hears until one of the events."""
        found = list[Heard]()

        def has() -> bool:
            found.extend(self.ranks[rank].line.heard())
            return any(each.event in events for each in found) or self.ranks[rank].line.lost

        await until(has)
        return found


def waited_for() -> None:
    """A launcher waits for its own snapshot process alone."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LOOK_S", 0.02)
    monkeypatch.setattr(lines, "LOOK_SHARE", 1)


@asynccontextmanager
async def started(tmp_path: Path) -> AsyncGenerator[Job]:
    job = Job(f"{tmp_path}\0train")
    job.keeper.keep(job.memory)
    try:
        await job.there()
        for rank in job.ranks:
            rank.hold(3)
        yield job
    finally:
        for rank in job.ranks:
            rank.line.close()
        await job.keeper.close(keeps=False)
        for fd in job.memory.values():
            os.close(fd)
        job.ranks.clear()
        gc.collect()  # a map has a descriptor of its own
        waited_for()


def saved(out: Path) -> tuple[int, np.ndarray, np.ndarray]:
    with closing(open_state(out, plan="{}")) as state:
        state.verify()
        (slot,) = ParameterLayout.of({"w": (WHOLE,)}).slots
        return state.version, state.parameter("weights", slot), state.parameter("mean", slot)


async def test_shards_are_copied_written_and_published_without_the_ranks(quick: None, tmp_path: Path) -> None:
    out = tmp_path / "saved"
    async with started(tmp_path) as job:
        for rank in job.ranks:
            rank.save(3, out)
        for rank in job.ranks:
            assert rank.line.staged()
            rank.hold(5)  # the slot is used again: what was copied counts
            rank.line.close()  # and they are killed
        await until((out / SHARDS_NAME).exists)
        version, weights, mean = saved(out)
        expected = [np.arange(ELEMENTS) + 1000 * rank + 3 for rank in range(RANKS)]
        assert version == 3 and np.array_equal(weights, np.concatenate(expected).astype(np.float32))
        assert np.array_equal(mean, np.repeat(np.array([7, 8], np.float32), ELEMENTS))


async def test_memory_that_was_overwritten_before_it_was_copied_is_not_written(
    quick: None, tmp_path: Path
) -> None:
    """That is what a replacement does to the memory of a dead rank, whose request waits."""
    out = tmp_path / "saved"
    async with started(tmp_path) as job:
        stop(job.keeper.pid)
        for rank in job.ranks:
            rank.save(3, out)
        job.ranks[1].hold(5)
        os.kill(job.keeper.pid, signal.SIGCONT)
        heard = await job.heard(0, Event.GAVE_UP)
        assert "rank 1 was lost, and its state overwritten before it was copied" in heard[0].reason
        assert [each.event for each in heard] == [Event.FAILED, Event.GAVE_UP]
        assert not out.exists() or not list(out.iterdir())
        for rank in job.ranks:
            rank.hold(5)
            rank.save(5, out, token=2)
        assert (await job.heard(1, Event.PUBLISHED))[-1].event is Event.PUBLISHED


async def test_one_that_a_rank_never_asks_for_gives_way_to_the_next(quick: None, tmp_path: Path) -> None:
    out = tmp_path / "saved"
    async with started(tmp_path) as job:
        job.ranks[0].save(3, out)
        assert job.ranks[0].line.staged()
        for rank in job.ranks:
            rank.hold(4)
            rank.save(4, out, token=2)
        for rank in range(RANKS):
            assert (await job.heard(rank, Event.PUBLISHED))[-1].header > 0
        assert saved(out)[0] == 4 and not [path for path in out.iterdir() if "-3-" in path.name]


@pytest.mark.parametrize("has", ["told", "logged", "withdrawn", "lost"])
async def test_a_checkpoint_is_published_once_its_step_is_committed(
    quick: None, tmp_path: Path, has: str
) -> None:
    """Rank 0 says so; if it is lost before, the log does."""
    out, log = tmp_path / "saved", tmp_path / LOG_NAME
    async with started(tmp_path) as job:
        for rank in job.ranks:
            rank.save(3, out, commits=rank.rank == 1)  # which does not write the log
        await until(lambda: len(list(out.glob("*.safetensors"))) == RANKS)
        assert job.ranks[0].line.staged() and not (out / SHARDS_NAME).exists()
        if has == "logged":
            header = LogHeader(format=LOG_FORMAT, run_id="", base_version=2, plan="", seed=0)
            with closing(CommitLog(log, header)) as logged:
                logged.append(record(3))
        if has in ("told", "withdrawn"):
            job.ranks[0].line.decided(is_committed=has == "told")
        else:
            job.ranks[0].line.close()
        (heard,) = await job.heard(1, Event.PUBLISHED, Event.GAVE_UP)
        if has in ("told", "logged"):
            assert heard.event is Event.PUBLISHED and saved(out)[0] == 3
        else:
            assert heard == Heard(stem_of(3, 1), Event.GAVE_UP) and not list(out.iterdir())


def record(version: int) -> CommitRecord:
    return CommitRecord(
        version=version, epoch=1, members=(0,), shards={}, losses={}, rng_key=(0, 0), digest="", at_ns=1
    )


APART = (0, 1)
"""Each of the ranks is on a host of its own."""


@asynccontextmanager
async def hosts(tmp_path: Path) -> AsyncGenerator[tuple[Job, Job]]:
    """Two hosts; of the first one, rank 0 is used, and of the other one, rank 1."""
    async with started(tmp_path / "one") as one, started(tmp_path / "two") as two:
        yield one, two


async def test_shards_of_several_processes_are_published_without_the_ranks(
    quick: None, tmp_path: Path
) -> None:
    out = tmp_path / "saved"
    async with hosts(tmp_path) as (one, two):
        one.ranks[0].save(3, out, homes=APART)
        (heard,) = await one.heard(0, Event.WROTE)
        assert heard.header > 0
        stem = stem_of(3, 1)
        assert {path.name for path in out.iterdir()} == {f"{stem}-0.safetensors", f"{stem}-part-0.json"}
        two.ranks[1].save(3, out, homes=APART)
        for rank in (one.ranks[0], two.ranks[1]):
            assert rank.line.staged()
            rank.line.close()  # and they are killed
        await until((out / SHARDS_NAME).exists)
        await until(lambda: not [path for path in out.iterdir() if "-part-" in path.name])
        version, weights, _ = saved(out)
        expected = [np.arange(ELEMENTS) + 1000 * rank + 3 for rank in range(RANKS)]
        assert version == 3 and np.array_equal(weights, np.concatenate(expected).astype(np.float32))
        assert len(list(out.iterdir())) == 4


@pytest.mark.parametrize("point", ["shards.parted", "shards.index", "shards.named"])
async def test_a_process_that_is_killed_after_its_part_needs_not_publish(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The other one does, or finds that it has. To come so far, the first one writes its part last."""
    out = tmp_path / "saved"
    async with started(tmp_path / "two") as two:
        monkeypatch.setenv(faults.FAULT_VARIABLE, f"snapshots:{point}")
        async with started(tmp_path / "one") as one:
            if point != "shards.parted":
                two.ranks[1].save(3, out, homes=APART)
                await two.heard(1, Event.WROTE)
            stop(two.keeper.pid)  # it would publish as soon as the other part is there
            one.ranks[0].save(3, out, homes=APART)
            await until(lambda: any("is lost, killed (SIGKILL)" in each for each in one.said))
            os.kill(two.keeper.pid, signal.SIGCONT)
            if point == "shards.parted":
                two.ranks[1].save(3, out, homes=APART)
            heard = await two.heard(1, Event.PUBLISHED)
            assert heard[-1].event is Event.PUBLISHED and saved(out)[0] == 3
            await one.there()  # another process is


async def test_what_never_became_whole_goes_once_the_next_one_is_published(
    quick: None, tmp_path: Path
) -> None:
    out = tmp_path / "saved"
    async with hosts(tmp_path) as (one, two):
        one.ranks[0].save(3, out, homes=APART)  # and rank 1 is killed before it asks
        await one.heard(0, Event.WROTE)
        for rank in (one.ranks[0], two.ranks[1]):
            rank.hold(4)
            rank.save(4, out, homes=APART, token=2)
        await one.heard(0, Event.PUBLISHED)
        await two.heard(1, Event.PUBLISHED)
        assert saved(out)[0] == 4 and not [path for path in out.iterdir() if "-3-" in path.name]


async def test_a_host_that_cannot_write_gives_up_and_leaves_nothing(quick: None, tmp_path: Path) -> None:
    """Its shard would be complete without the other's, which nobody publishes: both go."""
    out = tmp_path / "saved"
    async with hosts(tmp_path) as (one, two):
        one.ranks[0].save(3, out, homes=APART)
        await one.heard(0, Event.WROTE)
        stop(two.keeper.pid)
        two.ranks[1].save(3, out, homes=APART)
        two.ranks[1].hold(5)  # a replacement overwrites it before it is copied
        os.kill(two.keeper.pid, signal.SIGCONT)
        heard = await two.heard(1, Event.GAVE_UP)
        assert [each.event for each in heard] == [Event.FAILED, Event.GAVE_UP]
        await until(lambda: not list(out.iterdir()))


@contextmanager
def small_disk(nbytes: int) -> Generator[Path]:
    """A file system of so many bytes, in the mount namespace of a process, seen from here."""
    mount = f"mount -t tmpfs -o size={nbytes},mode=1777 tmpfs /mnt && echo mounted && read -r _"
    with subprocess.Popen(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", mount],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        if (said := process.stdout.readline()) != "mounted\n":
            pytest.skip(f"no mount namespace can be made here: {said}")
        yield Path(f"/proc/{process.pid}/root/mnt")
        process.stdin.close()


@pytest.mark.optional
async def test_a_full_disk_is_told_once_and_the_checkpoint_follows_when_there_is_room(
    quick: None, tmp_path: Path
) -> None:
    """The disk holds two checkpoints, beside other files one: that one stays whole meanwhile."""
    nbytes = RANKS * 2 * 4 * ELEMENTS  # of a checkpoint, without its headers
    with small_disk(3 * nbytes) as disk:
        (disk / "other").write_bytes(b"x" * (5 * nbytes // 4))
        out = disk / "saved"
        async with started(tmp_path) as job:
            for rank in job.ranks:
                rank.save(3, out)
            assert [each.event for each in await job.heard(0, Event.PUBLISHED)][-1] is Event.PUBLISHED
            for rank in job.ranks:
                rank.hold(4)
                rank.save(4, out, token=2)
            (failed,) = await job.heard(0, Event.FAILED, Event.PUBLISHED)
            assert failed.event is Event.FAILED and "the disk is full" in failed.reason
            assert "No space left on device" in failed.reason and saved(out)[0] == 3
            (disk / "other").unlink()
            (published,) = await job.heard(0, Event.PUBLISHED, Event.GAVE_UP)
            assert published.event is Event.PUBLISHED and saved(out)[0] == 4
            assert not job.ranks[0].line.lost and not job.said


async def test_a_storage_that_cannot_be_used_is_told_once_and_given_up(quick: None, tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("no directory")
    async with started(tmp_path) as job:
        for rank in job.ranks:
            rank.save(3, out)
        assert all(rank.line.settle() for rank in job.ranks)
        told = list(job.ranks[0].line.heard())
        assert [each.event for each in told] == [Event.FAILED, Event.GAVE_UP] and told[0].reason
        assert [(each.event, each.reason) for each in job.ranks[1].line.heard()] == [(Event.GAVE_UP, "")]


@pytest.mark.parametrize(
    "point", ["shards.staged", "shards.write", "shards.written", "shards.held", "shards.index"]
)
async def test_a_process_that_is_killed_at_any_point_is_lost_to_all_ranks(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    monkeypatch.setenv(faults.FAULT_VARIABLE, f"snapshots:{point},rank0:job.begin")
    out = tmp_path / "saved"
    async with started(tmp_path) as job:
        for rank in job.ranks:
            rank.save(3, out)
        for rank in job.ranks:
            assert not rank.line.settle() and rank.line.lost
        assert not (out / SHARDS_NAME).exists()
        await job.there()  # another one is
        for rank in job.ranks:
            rank.save(3, out, token=2)
        assert all(rank.line.settle() for rank in job.ranks)
        assert saved(out)[0] == 3


async def test_a_shard_stays_lost_where_another_process_is_found_before_its_rank_has_asked(
    quick: None, tmp_path: Path
) -> None:
    async with started(tmp_path) as job:
        pid = job.keeper.pid
        job.ranks[0].save(3, tmp_path / "saved")  # and rank 1 does not: it cannot be written
        os.kill(pid, signal.SIGKILL)
        await until(lambda: job.keeper.pid not in (0, pid))
        await job.there()
        assert job.ranks[0].line.lost and not job.ranks[0].line.settle()
        for rank in job.ranks:
            rank.save(3, tmp_path / "saved", token=2)
        assert all(rank.line.settle() and not rank.line.lost for rank in job.ranks)


async def test_a_process_that_does_not_answer_is_killed_so_that_it_writes_nothing_later(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "SILENT_S", 0.02)
    async with started(tmp_path) as job:
        pid = job.keeper.pid
        stop(pid)
        job.ranks[0].save(3, tmp_path / "saved")
        assert not job.ranks[0].line.staged() and job.ranks[0].line.lost
        await until(lambda: job.keeper.pid not in (0, pid))
        assert f"the snapshot process {pid} is lost, killed (SIGKILL)" in job.said[-1]


async def test_memory_that_is_not_held_is_refused(quick: None, tmp_path: Path) -> None:
    async with started(tmp_path) as job:
        job.ranks[0].save(3, tmp_path, block="another")
        assert not job.ranks[0].line.staged() and job.ranks[0].line.lost
        await job.there()
        job.ranks[0].save(3, tmp_path, counter=1 << 40)
        assert not job.ranks[0].line.settle(), "it asks for memory beyond its own"


async def test_strangers_lose_their_own_connection_alone(quick: None, tmp_path: Path) -> None:
    async with started(tmp_path) as job:
        (address,) = find_holders(job=job.keeper.job)
        for payload in (b"", b"\xc1", encode(Heard("x", Event.COPIED)), encode(["save"])):
            with closing(HolderLine(address.name)) as line:
                line.line.settimeout(60)
                line.send(Work(payload=payload))
                assert line.line.recv(1) == b""
        assert all(rank.line.is_there for rank in job.ranks)


def bad_requests(good: SaveShard) -> Sequence[bytes]:
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    cut = flat_slice(4, 0, 4)
    piece = HeldPiece("w", cut, ("weights",), "", (Span(0, 4, "F32"),))
    changes: list[dict[str, object]] = [
        {"place": 4},
        {"homes": ()},
        {"homes": (0, 0, 1)},
        {"homes": (0, 2)},
        {"homes": (-1,)},
        {"rank": -1},
        {"version": 1 << 41},
        {"keep": 0},
        {"pieces": (HeldPiece("w", cut, (), "", piece.spans),)},
        {"pieces": (HeldPiece("w", cut, ("weights",), "BF7", piece.spans),)},
        {"pieces": (HeldPiece("w", cut, ("weights",), "", (Span(-1, 4, "F32"),)),)},
        {"pieces": (HeldPiece("w", cut, ("weights",), "", (Span(0, 4, "F32", True),)),)},
    ]
    return [b"", b"\xc1", *(encode(SaveShard(**{**fields, **each})) for each in changes)]  # type: ignore[arg-type]


def test_messages_are_checked() -> None:
    good = SaveShard(
        version=1, stem="s", rank=0, place=0, homes=(0, 0, 2, 2), block="b", counter=0, count=1,
        storage="/", log="/log", plan="", loss_scale=(1.0,), keep=1, every=0, codec=Codec.ZSTD, pieces=(),
    )  # fmt: skip
    assert decode_shard(encode(good)) == good
    for bad in bad_requests(good):
        with pytest.raises(RemoteProtocolError):
            decode_shard(bad)
    for bad in (b"", b"\xc1", encode(Heard("s", Event.COPIED, -1))):
        with pytest.raises(RemoteProtocolError):
            decode_heard(bad)
    with pytest.raises(RemoteProtocolError):
        decode_asked(b"\x91\xa4none")
    memory = os.memfd_create("test")
    with pytest.raises(RemoteProtocolError):
        arguments_of(memory)
    assert put_arguments(memory, good) % 64 == 0 and arguments_of(memory)[0] == good
    os.close(memory)
