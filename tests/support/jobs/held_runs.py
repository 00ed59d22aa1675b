"""Runs of two ranks whose state is held by a snapshot process, killed as a whole while that lives on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes.launcher import Running, kill_marked
from zbmd.actors.snapshots.client import HolderAddress, look
from zbmd.training.job.overwrite import holders_of
from zbmd.training.redundancy.stamped import STATE_BLOCK, slots_in
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.transport.memory.kept import block_of

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

STEPS = 250
"""Two ranks take some seconds for them: in one of these their state is held."""
OPTIONS = (
    *("--data", "text", "--steps", str(STEPS), "--context", "16", "--width", "16", "--heads", "2"),
    *("--layers", "2", "--sequences-per-shard", "1", "--shards", "4", "--evaluate-every", "0"),
    *("--checkpoint-every", "0"),
)
HOLDER = "zbmd-snapshots"


def job(ranks: int, *more: str, out: str = "run") -> tuple[str, ...]:
    return ("run", "-n", str(ranks), "-m", "zbmd", "train", *OPTIONS, "--out", out, *more)


@contextmanager
def started(launcher: Launcher, *arguments: str, **variables: str) -> Generator[Running]:
    """As `Launcher.start`, with snapshots, and a process that holds them may be left behind."""
    with launcher.session(*arguments, spares=HOLDER, **{"ZBMD_SNAPSHOTS": "60s", **variables}) as running:
        yield running
        running.end()


def kill_all(running: Running) -> None:
    """Kill launcher, reaper, template and ranks at once, and not the snapshot process."""
    kill_marked(running.marker, HOLDER)


def until_held(running: Running, ranks: int, run: Path, *, step: int = 1) -> int:
    """Read steps from `step` until the state of so many ranks is held; return the last one."""

    def is_held() -> bool:
        for holder in holders_of(run):
            found = look(holder.name)
            if found is not None:
                count = len(found.memory)
                found.close()
                return count == ranks
        return False

    while not is_held():
        running.until(rf"^step {step} loss")
        step += 1
    running.until(rf"^step {step} loss")
    return step


def kill_all_when_held(running: Running, ranks: int, run: Path, *, step: int = 1) -> HolderAddress:
    """Kill a run as a whole in `step` or later, after its state is held; return the process that has it."""
    until_held(running, ranks, run, step=step)
    kill_all(running)
    assert running.end() == -signal.SIGKILL
    (holder,) = holders_of(run)
    return holder


def killed(launcher: Launcher, ranks: int, *arguments: str) -> HolderAddress:
    """Start a run and kill it as a whole; return the process that has its state."""
    with started(launcher, *arguments) as running:
        return kill_all_when_held(running, ranks, launcher.directory / "run")


def last_committed(directory: Path) -> int:
    return read_log(directory / LOG_NAME)[1][-1].version


def weights_of(text: str) -> str:
    found = re.findall(r'"weights_sha256":"([0-9a-f]+)"', text)
    assert found, text
    return found[-1]


def undisturbed(launcher: Launcher, ranks: int, *more: str) -> str:
    ended = launcher.run(*job(ranks, *more, out="calm"))
    assert ended.code == 0, ended
    return weights_of("\n".join(ended.out))


def damage(holder: HolderAddress, rank: int, *, newest: bool = False) -> list[int]:
    """Change one byte of each whole version of a rank, or of the newest alone; return these versions."""
    found = look(holder.name)
    assert found is not None
    block = block_of(found.memory[rank], STATE_BLOCK)
    assert block is not None
    held = slots_in(block)
    assert held is not None
    name, slots = held
    data = os.pread(found.memory[rank], os.fstat(found.memory[rank]).st_size, 0)
    begin = data.find(bytes(block[:64]))  # of the block in the memory
    versions = [one for one in (slots.version_in(0), slots.version_in(1)) if one is not None]
    versions = [max(versions)] if newest else versions
    for version in versions:
        at = name.head_bytes + version % 2 * name.slot_bytes + name.elements
        os.pwrite(found.memory[rank], bytes([block[at] ^ 1]), begin + at)
    found.close()
    return versions
