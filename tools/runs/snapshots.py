"""`zbmd snapshots`: the state of a run in memory that outlives its ranks, and on disk; verified."""

from __future__ import annotations

import argparse
import contextlib
import time
import tomllib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import rich.table

from zbmd.actors.snapshots.client import HolderAddress, Snapshots, drop, find_holders, look
from zbmd.tools.cli.console import screen_for_tables
from zbmd.tools.cli.options import add_command, add_json
from zbmd.training.checkpoint.storage import storage_of, url_of
from zbmd.training.checkpoint.verified import each_checkpoint
from zbmd.training.job.overwrite import holders_of
from zbmd.training.redundancy.holdings import SLOTS
from zbmd.training.redundancy.stamped import NAME, STATE_BLOCKS, StampedSlots, StateName, digest_of, slots_in
from zbmd.training.run.ledger import LOG_NAME, has_log, read_record
from zbmd.training.sharded.options import RECIPE_NAME
from zbmd.transport.clock.deadlines import format_duration
from zbmd.transport.errors import UserError
from zbmd.transport.memory.kept import block_of
from zbmd.transport.memory.memfd import in_words

WHOLE: Final = "whole"
DAMAGED: Final = "damaged"
WRITTEN: Final = "being written"
MEMORY: Final = "memory"
DISK: Final = "disk"
OBJECTS: Final = "objects"


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
    problem: str = ""


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


def _slots_of(memory: int) -> list[tuple[StateName, StampedSlots]]:
    """Return the versions that lie in the memory of a rank: in more than one block while a state is recut."""
    return [one for one in map(slots_in, _blocks_of(memory)) if one is not None]


def _blocks_of(memory: int) -> list[memoryview]:
    return [one for name in STATE_BLOCKS if (one := block_of(memory, name)) is not None]


def _in_memory(found: Snapshots, directory: Path | None) -> Iterator[HeldVersion]:
    where = f"process {found.pid}"
    for rank, memory in sorted(found.memory.items()):
        held = _slots_of(memory)
        if not held:
            is_damaged = any(any(block[: NAME.size]) for block in _blocks_of(memory))  # what is made has none
            yield HeldVersion(
                tier=MEMORY,
                rank=rank,
                version=None,
                nbytes=0,
                age_s=None,
                state=DAMAGED if is_damaged else WRITTEN,
                where=where,
            )
        for (name, slots), slot in product(held, range(SLOTS)):
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


def newest_in_memory(directory: Path) -> dict[int, tuple[int, float | None]]:
    """Return the newest version of each rank of a run that snapshot processes of this host have, and its age.

    Digests are not verified. The age in seconds is that of its commit; None if that is not known.
    """
    newest: dict[int, int] = {}
    for address in holders_of(directory):
        found = look(address.name)
        if found is None:
            continue
        with contextlib.closing(found):
            for rank, memory in found.memory.items():
                versions = [
                    slots.version_in(slot) for (_, slots), slot in product(_slots_of(memory), range(SLOTS))
                ]
                whole = [version for version in versions if version is not None]
                if whole:
                    newest[rank] = max([*whole, newest.get(rank, 0)])
    return {rank: (version, _age_s(directory, version)) for rank, version in newest.items()}


def verified(slots: StampedSlots, slot: int) -> tuple[int | None, str]:
    """Return the version in a slot that its rank may be writing, and its state: by digest and seals."""
    before, version = slots.stamp(slot), slots.version_in(slot)
    damage, digest = slots.damage_in(slot), slots.digest_in(slot)
    if version is None and not damage:
        return None, WRITTEN
    same = not damage and digest_of(slots.slots[slot]) == digest
    if slots.stamp(slot) != before or (damage and not slots.damage_in(slot)):
        return None, WRITTEN
    return before[0] if version is None else version, WHOLE if same else DAMAGED


def saved_by(directory: Path) -> Iterator[HeldVersion]:
    """Yield the checkpoints of the run in a directory, the newest first, each read and verified.

    They lie there, or where the recipe of the run says. Raises `UserError` for a place that cannot be read.
    """
    place = _checkpoint_to(directory)
    storage, tier = storage_of(place or directory), DISK if url_of(place) is None else OBJECTS
    for name, names, problem in each_checkpoint(storage):
        nbytes, age_s = 0, None
        with contextlib.suppress(OSError):  # a shard may be missing
            for file in () if names is None else names.files:
                with contextlib.closing(storage.open(file)) as opened:
                    nbytes += opened.size
        with contextlib.suppress(OSError):
            age_s = max(0.0, time.time() - Path(storage.where(name)).stat().st_mtime)
        yield HeldVersion(
            tier=tier,
            rank=None,
            version=None if names is None else names.version,
            nbytes=nbytes,
            age_s=age_s,
            state=DAMAGED if problem else WHOLE,
            where=storage.where(name),
            problem=problem,
        )


def _checkpoint_to(directory: Path) -> str:
    """Return where the recipe of a run has its checkpoints; empty: in its directory."""
    try:
        with (directory / RECIPE_NAME).open("rb") as file:
            return str(tomllib.load(file).get("checkpoint_to", ""))
    except (OSError, ValueError):
        return ""


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
    saved = () if directory is None else tuple(saved_by(directory))
    if arguments.json:
        print(msgspec.json.encode({"runs": runs, "checkpoints": saved}).decode())
    else:
        _show(runs, saved)
    damaged = [one for run in runs for one in run.versions if one.state == DAMAGED]
    return 1 if damaged or any(one.state == DAMAGED for one in saved) else 0


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


def _show(runs: list[HeldRun], saved: tuple[HeldVersion, ...]) -> None:
    screen = screen_for_tables()
    for run in runs:
        left = format_duration(round(run.left_s * 1e9))
        stands = f"run by process {run.launcher}" if run.launcher else f"waits for {left} more"
        title = f"job {run.job}  {stands}  holder pid {run.holder}"
        _print_table(screen, title, run.versions)
    if saved:
        _print_table(screen, "checkpoints", saved)
        for one in saved:
            if one.problem:
                screen.print(one.problem, style="red")
    if not runs and not saved:
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
