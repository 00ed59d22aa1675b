"""Simulated disks: what an fsync keeps, what a crash may take, and how they fail."""

from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.sim import (
    Crash,
    DiskFull,
    DiskReadErrors,
    DiskSlow,
    SimDisk,
    SimProcess,
    TornWrites,
    World,
)

MS = 1_000_000


def disk(seed: int = 0, **options: int) -> SimDisk:
    return SimDisk(random.Random(seed), lambda busy_ns: None, **options)


def test_calls_see_their_own_effects() -> None:
    made = disk()
    made.write("a", b"hello")
    made.write("a", b"J")
    made.append("a", b"!")
    made.write("b", b"x", offset=3)
    assert (made.read("a"), made.read("b")) == (b"Jello!", b"\0\0\0x")
    made.rename("a", "b")
    assert (made.names(), made.read("b"), made.used_bytes) == (("b",), b"Jello!", 6)
    made.remove("b")
    assert made.names() == ()
    for call in (made.read, made.remove, made.fsync, lambda path: made.rename(path, "c")):
        with pytest.raises(FileNotFoundError):
            call("b")


@given(
    seed=st.integers(0, 2**32),
    writes=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=10),
    synced=st.integers(0, 10),
    torn=st.booleans(),
)
def test_what_was_synced_survives_and_the_rest_may(
    seed: int, writes: list[bytes], synced: int, torn: bool
) -> None:
    made = disk(seed)
    made.torn = torn
    kept = b""
    for number, data in enumerate(writes):
        made.append("log", data)
        if number == synced:
            made.fsync("log")
            kept = made.read("log")
    made.crash()
    if "log" not in made.names():
        assert not kept
        return
    survived, whole = made.read("log"), b"".join(writes)
    assert survived.startswith(kept)
    if not torn:
        assert whole.startswith(survived)
        assert survived in {b"".join(writes[:count]) for count in range(len(writes) + 1)}
    made.crash()
    assert made.read("log") == survived


def outcomes(*, sync_file: bool, sync_names: bool, torn: bool = False) -> set[bytes | None]:
    """The bytes under "new" after a crash that follows write, rename, over 200 seeds."""
    found: set[bytes | None] = set()
    for seed in range(200):
        made = disk(seed)
        made.torn = torn
        made.write("new", b"old")
        made.fsync("new")
        made.write("tmp", b"0123456789")
        if sync_file:
            made.fsync("tmp")
        made.rename("tmp", "new")
        if sync_names:
            made.sync_directory()
        made.crash()
        found.add(made.read("new") if "new" in made.names() else None)
    return found


def test_a_careful_rename_is_atomic_and_a_careless_one_is_not() -> None:
    whole = b"0123456789"
    assert outcomes(sync_file=True, sync_names=True) == {whole}
    assert outcomes(sync_file=True, sync_names=False) == {b"old", whole}
    assert outcomes(sync_file=False, sync_names=True) == {b"", whole}
    torn = outcomes(sync_file=False, sync_names=True, torn=True)
    assert len(torn) > 5
    assert all(whole.startswith(found) for found in torn if found is not None)


def test_a_full_disk_refuses_and_changes_nothing() -> None:
    made = disk(limit_bytes=10)
    made.write("a", bytes(8))
    with pytest.raises(OSError, match="No space") as caught:
        made.append("a", bytes(3))
    assert caught.value.errno == errno.ENOSPC
    assert made.read("a") == bytes(8)
    made.write("a", bytes(10))
    made.full = True
    with pytest.raises(OSError, match="No space"):
        made.write("b", b"")
    assert made.names() == ("a",)


def test_what_is_never_synced_becomes_durable_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbmd.transport.sim.storage.UNSYNCED_MAX", 10)
    for seed in range(20):
        made = disk(seed)
        for number in range(100):
            made.append("log", bytes([number]))
            made.write(f"file{number}", b"")
        made.crash()
        assert made.read("log")[:89] == bytes(range(89))
        assert len(made.names()) >= 90


def test_faults_strike_the_disk_of_a_process_over_its_restarts() -> None:
    seen: list[tuple[str, int]] = []

    async def program(process: SimProcess) -> None:
        before_ns = process.world.loop.monotonic_ns()
        try:
            if not process.disk.names():
                process.disk.write("a", b"kept")
                process.disk.fsync("a")
            process.disk.append("a", b"more")
            process.disk.read("a")
            seen.append(("ok", process.world.loop.monotonic_ns() - before_ns))
        except OSError as error:
            seen.append((errno.errorcode[error.errno or 0], 0))

    with World(1) as world:
        world.add("a", program)
        world.apply(DiskFull(process="a", at_ns=10 * MS, for_ns=10 * MS))
        world.apply(DiskReadErrors(process="a", probability=1.0, at_ns=30 * MS, for_ns=10 * MS))
        world.apply(DiskSlow(process="a", delay_ns=500 * MS, at_ns=50 * MS, for_ns=1000 * MS))
        for at_ns in (15 * MS, 35 * MS, 55 * MS):
            world.apply(Crash(process="a", at_ns=at_ns, for_ns=MS))
        world.run()
        assert world.place("a").disk.read("a").startswith(b"kept")
    assert [what for what, _ in seen] == ["ok", "ENOSPC", "EIO", "ok"]
    assert seen[0][1] < 10 * MS
    assert seen[3][1] > 1000 * MS


def test_torn_writes_are_a_fault() -> None:
    async def program(process: SimProcess) -> None:
        process.disk.write("a", b"")
        process.disk.fsync("a")
        process.disk.append("a", bytes(100))
        await process.world.loop.create_future()

    lengths: set[int] = set()
    for seed in range(40):
        with World(seed) as world:
            world.add("a", program)
            world.apply(TornWrites(process="a", at_ns=0, for_ns=100 * MS))
            world.apply(Crash(process="a", at_ns=50 * MS, for_ns=0))
            world.run(for_ns=60 * MS)
            lengths.add(len(world.place("a").disk.read("a")))
    assert lengths - {0, 100}
