"""Runs of two ranks whose state is held by a snapshot process, killed as a whole while that lives on."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from programs import PROGRAMS

from support.jobs.by_words import plain_by
from support.processes.launcher import Running, kill_marked
from zbmd.actors.snapshots.client import HolderAddress, look
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import read_names
from zbmd.training.job.overwrite import holders_of
from zbmd.training.redundancy.stamped import STATE_BLOCK, slots_in
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.transport.memory.kept import block_of

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

STEPS = 40
GATE = 20
"""Before this step a run waits until a test opens the gate: so long its state is to be held."""
GATED = (
    *("--preload", "zbmd.tools.demo.overhead,zbmd.tools.train.command"),
    str(PROGRAMS / "tools" / "gated.py"),
)
OPTIONS = (
    *("--data", "text", "--steps", str(STEPS), "--context", "16", "--width", "16", "--heads", "2"),
    *("--layers", "2", "--sequences-per-shard", "1", "--shards", "4", "--evaluate-every", "0"),
    *("--checkpoint-every", "0"),
)
HOLDER = "zbmd-snapshots"
PATIENT = ("--recovery-budget", "1min")
"""For runs over several nodes: none that gets no processor for a while counts as gone."""
CALM: dict[tuple[bytes, tuple[str, ...]], str] = {}
"""The weights of undisturbed runs, by their text and options."""


def job(ranks: int, *more: str, out: str = "run") -> tuple[str, ...]:
    """Return a run that stands still before its gates."""
    return ("run", "-n", str(ranks), *GATED, "train", *OPTIONS, "--out", out, *more)


@contextmanager
def started(
    launcher: Launcher, *arguments: str, gates: tuple[int, ...] | str = (GATE,), **variables: str
) -> Generator[Running]:
    """As `Launcher.start`, with snapshots, and a process that holds them may be left behind."""
    gates = gates if isinstance(gates, str) else ",".join(map(str, gates))
    variables = {"ZBMD_SNAPSHOTS": "60s", "GATES": gates, **variables}
    with launcher.session(*arguments, spares=HOLDER, fresh=False, **variables) as running:
        yield running
        running.end()


def open_gate(run: Path, gate: int = GATE) -> None:
    """Have a run go on beyond a step."""
    (run.parent / f"go{gate}").touch()


def kill_all(running: Running) -> None:
    """Kill launcher, reaper, template and ranks at once, and not the snapshot process."""
    kill_marked(running.marker, HOLDER)


def until_held(running: Running, ranks: int, run: Path) -> None:
    """Wait until the state of so many ranks is held."""

    def is_held() -> bool:
        for holder in holders_of(run):
            found = look(holder.name)
            if found is not None:
                count = len(found.memory)
                found.close()
                return count == ranks
        return False

    running.until_holds(is_held, f"the state of {ranks} ranks is held")


def kill_all_when_held(running: Running, ranks: int, run: Path, *, step: int = 1) -> HolderAddress:
    """Kill a run as a whole in `step` or later, after its state is held; return the process that has it."""
    running.until(rf"^step {step} loss")
    until_held(running, ranks, run)
    kill_all(running)
    assert running.end() == -signal.SIGKILL
    (holder,) = holders_of(run)
    return holder


def killed(launcher: Launcher, ranks: int, *arguments: str) -> HolderAddress:
    """Start a run and kill it as a whole; return the process that has its state. The gate is open then."""
    run = launcher.directory / "run"
    with started(launcher, *arguments) as running:
        holder = kill_all_when_held(running, ranks, run)
    open_gate(run)
    return holder


def last_committed(directory: Path) -> int:
    return read_log(directory / LOG_NAME)[1][-1].version


def weights_of(text: str) -> str:
    found = re.findall(r'"weights_sha256":"([0-9a-f]+)"', text)
    assert found, text
    return found[-1]


def undisturbed(launcher: Launcher, *more: str) -> str:
    """Return the weights that a bare loop of the same job ends with. Of each text it is run once."""
    data, out = launcher.directory / "text", launcher.directory / "calm"
    kind = data.read_bytes(), more
    if kind not in CALM:
        CALM[kind] = plain_by([*OPTIONS, *more, "--data", str(data), "--out", str(out)]).weights_sha256
    return CALM[kind]


def saved_in(run: Path) -> int:
    """Return the version of the newest checkpoint of a run; 0: there is none."""
    return read_names(run).version if (run / SHARDS_NAME).exists() else 0


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
