"""`zbmd snapshots`: the state of a run in memory that outlives its ranks, and on disk; verified."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import rich.table

from zbmd.actors.snapshots.client import HolderAddress, Snapshots, drop, find_holders, look
from zbmd.tools.cli.console import screen_for_tables
from zbmd.tools.cli.options import add_command, add_json
from zbmd.training.checkpoint.sharded import checkpoint_in, open_state, read_names
from zbmd.training.job.overwrite import holders_of
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.redundancy.stamped import STATE_BLOCK, StampedSlots, digest_of, slots_in
from zbmd.training.run.ledger import LOG_NAME, has_log, read_record
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import UserError
from zbmd.transport.memory.kept import block_of
from zbmd.transport.memory.memfd import in_words

WHOLE: Final = "whole"
DAMAGED: Final = "damaged"
WRITTEN: Final = "being written"
MEMORY: Final = "memory"
DISK: Final = "disk"


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version in one tier. age_s: since its commit, None if that is not known. state: `WHOLE`, `DAMAGED`
    or `WRITTEN`; digests are computed again for that.
    """

    tier: str
    rank: int | None
    version: int | None
    nbytes: int
    age_s: float | None
    state: str
    where: str


class HeldRun(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of a job. launcher: the process that runs it, 0 if none does; left_s: until the memory is
    given back then.
    """

    job: str
    run: str
    holder: int
    launcher: int
    left_s: float
    versions: tuple[HeldVersion, ...]


def held_runs(holders: list[HolderAddress], directory: Path | None) -> Iterator[HeldRun]:
    """Yield what each of the holders has. directory: of their run, whose log dates the versions."""
    for address in holders:
        found = look(address.name)
        if found is None:
            continue
        standing = found.standing
        try:
            versions = tuple(_in_memory(found, directory))
        finally:
            found.close()
        yield HeldRun(
            job=f"{standing.job:016x}",
            run=standing.identity.run,
            holder=found.pid,
            launcher=standing.launcher,
            left_s=standing.left_ns / 1e9,
            versions=versions,
        )


def _in_memory(found: Snapshots, directory: Path | None) -> Iterator[HeldVersion]:
    where = f"process {found.pid}"
    for rank, memory in sorted(found.memory.items()):
        block = block_of(memory, STATE_BLOCK)
        held = None if block is None else slots_in(block)
        if held is None:
            yield HeldVersion(
                tier=MEMORY, rank=rank, version=None, nbytes=0, age_s=None, state=WRITTEN, where=where
            )
            continue
        name, slots = held
        for slot in range(SLOTS):
            version, state = verified(slots, slot)
            yield HeldVersion(
                tier=MEMORY,
                rank=rank,
                version=version,
                nbytes=4 * name.elements,
                age_s=_age_s(directory, version),
                state=state,
                where=where,
            )


def verified(slots: StampedSlots, slot: int) -> tuple[int | None, str]:
    """Return the version in a slot that its rank may be writing, and its state: the digest is verified."""
    version, digest = slots.version_in(slot), slots.digest_in(slot)
    if version is None:
        return None, WRITTEN
    same = digest_of(slots.slots[slot]) == digest
    if slots.version_in(slot) != version:
        return None, WRITTEN
    return version, WHOLE if same else DAMAGED


def on_disk(directory: Path) -> HeldVersion | None:
    """Return the last checkpoint of the run in a directory, read and verified; None if there is none."""
    path = checkpoint_in(directory)
    if path is None:
        return None
    version, nbytes, state = None, 0, DAMAGED
    with contextlib.suppress(UserError, OSError):
        names = read_names(path)
        version = names.version
        nbytes = sum((directory / name).stat().st_size for name in names.files)
        with contextlib.closing(open_state(path, plan=names.plan)) as saved:
            saved.verify()
        state = WHOLE
    age_s = max(0.0, time.time() - path.stat().st_mtime)
    return HeldVersion(
        tier=DISK, rank=None, version=version, nbytes=nbytes, age_s=age_s, state=state, where=str(path)
    )


def _age_s(directory: Path | None, version: int | None) -> float | None:
    if directory is None or version is None or not has_log(directory / LOG_NAME):
        return None
    record = read_record(directory / LOG_NAME, version)
    return None if record is None else max(0.0, (time.monotonic_ns() - record.at_ns) / 1e9)


def add_snapshots(commands: Any) -> None:
    """Add `snapshots` to the commands of `zbmd`."""
    made = add_command(
        commands,
        "snapshots",
        "show the state of a run that is held in memory and on disk, verified",
        description=__doc__,
        examples=("zbmd snapshots zbmd-runs/train", "zbmd snapshots --json", "zbmd snapshots RUN --drop"),
    )
    made.add_argument(
        "run", type=Path, nargs="?", metavar="RUN", help="a run's directory; default: all of this host"
    )
    made.add_argument("--job", metavar="ID", help="the job of that number, hexadecimal")
    made.add_argument("--drop", action="store_true", help="give back the memory of a run that does not go on")
    add_json(made)
    made.set_defaults(run_command=_snapshots)


def _snapshots(arguments: argparse.Namespace) -> int:
    directory: Path | None = arguments.run
    if directory is not None and not directory.is_dir():
        raise UserError(
            f"there is no directory {directory}: give that of a run, or none for all of this host."
        )
    holders = find_holders(job=_job(arguments.job)) if directory is None else holders_of(directory)
    if arguments.drop:
        if directory is None and arguments.job is None:
            raise UserError("--drop: expected the directory of a run, or --job and its number.")
        return _drop(holders)
    runs = list(held_runs(holders, directory))
    saved = None if directory is None else on_disk(directory)
    if arguments.json:
        print(msgspec.json.encode({"runs": runs, "checkpoint": saved}).decode())
    else:
        _show(runs, saved)
    damaged = [one for run in runs for one in run.versions if one.state == DAMAGED]
    return 1 if damaged or (saved is not None and saved.state == DAMAGED) else 0


def _job(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 16)
    except ValueError:
        raise UserError(f"--job: expected a hexadecimal number, got {text!r}") from None


def _drop(holders: list[HolderAddress]) -> int:
    if not holders:
        print("no memory is held of that run on this host")
    problems = [f"{holder.job:x}: {problem}" for holder in holders if (problem := drop(holder.name))]
    if problems:
        raise UserError(f"the memory is not given back: {'; '.join(problems)}.")
    return 0


def _show(runs: list[HeldRun], saved: HeldVersion | None) -> None:
    screen = screen_for_tables()
    for run in runs:
        left = format_duration(round(run.left_s * 1e9))
        stands = f"run by process {run.launcher}" if run.launcher else f"waits for {left} more"
        title = f"job {run.job}  {stands}  holder pid {run.holder}"
        _print_table(screen, title, run.versions)
    if saved is not None:
        _print_table(screen, "checkpoint", (saved,))
    if not runs and saved is None:
        screen.print("no state is held of that here: a run has some from its first step on")


def _print_table(screen: Any, title: str, versions: tuple[HeldVersion, ...]) -> None:
    table = rich.table.Table(title=title, title_justify="left")
    for column in ("tier", "rank", "version", "age", "size", "state", "where"):
        table.add_column(column, justify="left" if column in ("tier", "state", "where") else "right")
    for one in versions:
        table.add_row(
            one.tier,
            "all" if one.rank is None else str(one.rank),
            "-" if one.version is None else str(one.version),
            "-" if one.age_s is None else f"{one.age_s:,.1f} s",
            in_words(one.nbytes),
            one.state,
            one.where,
        )
    screen.print(table)
