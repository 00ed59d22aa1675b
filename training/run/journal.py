"""The journal of a run: commit log, checkpoints, and progress reports.

Every member keeps the journal; the lowest rank of the epoch writes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from zbmd.actors.rank.member import Worker
from zbmd.collectives.commit import events as cm
from zbmd.training.autograd.array_module import to_host
from zbmd.training.checkpoint.sharded import (
    checkpoint_in,
    open_state,
    read_names,
    take_state,
    whole_pieces,
    write_alone,
)
from zbmd.training.model.gpt import GPT
from zbmd.training.model.weights import WEIGHTS_NAME, save_weights
from zbmd.training.optim.elementwise import AdamWState, StateArray
from zbmd.training.run.ledger import LOG_NAME, CommitLog, CommitRecord, LogHeader, VotePart, loss_of
from zbmd.training.step.two_slot_store import Slot
from zbmd.transport.capture.registry import ActionT, EventT, MachineKind
from zbmd.transport.capture.tap import ThreadTap
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.machine import Machine
from zbmd.transport.shm.death_notice import DeathNotice


def captured_machine(
    worker: Worker,
    kind: MachineKind[EventT, ActionT],
    name: str,
    machine: Machine[EventT, ActionT],
    config: Mapping[str, Any],
) -> ThreadTap[EventT, ActionT]:
    """Return `machine`, for the thread that trains, recorded if the process of `worker` writes a log.

    Like the operations of a group, it is too expensive for the ring in memory that is always on.
    """
    loop = worker.system.loop
    return ThreadTap(worker.capture.whole, kind, name, machine, config, post=loop.call_soon_threadsafe)


def report_result(worker: Worker, result: Any) -> None:
    """Print `result`, a struct or dataclass, as a line of JSON, and report it; return once the host has it.

    Called on the training thread while all ranks are still present: if this rank is killed before it returns,
    the other ranks notice, and its replacement reports the same result.
    """
    print(msgspec.json.encode(result).decode(), flush=True)
    worker.report({"kind": "result", **msgspec.to_builtins(result)})
    asyncio.run_coroutine_threadsafe(worker.reported(), worker.system.loop).result()


def report_losses(worker: Worker) -> Callable[[], None]:
    """Report each rank that is lost; call the result to stop."""

    def report(rank: int, incarnation: int, notice: DeathNotice) -> None:
        if not notice.clean:
            worker.report({"kind": "lost", "peer": rank, "incarnation": incarnation, "at_ns": notice.at_ns})

    return worker.on_peer_lost(report)


Report = dict[str, Any]


class Journal:
    """The journal of one rank for the run in `directory`.

    `model`, `arrays`: what a state consists of; see `zbmd.training.optim.arrays_of`. `report` sends progress
    to the host, and must not block.
    """

    def __init__(
        self,
        directory: Path,
        header: LogHeader,
        model: GPT,
        arrays: Sequence[StateArray],
        *,
        rank: int,
        report: Callable[[Report], None],
        checkpoint_every: int,
    ) -> None:
        self.directory = directory
        self.log = CommitLog(directory / LOG_NAME, header)
        self._model, self._arrays = model, arrays
        self._rank = rank
        self._report = report
        self._checkpoint_every = checkpoint_every
        self._members: tuple[int, ...] = ()
        self._last_record: CommitRecord | None = None
        self._saving: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None
        """The last record; written before anything that arrives later is handled on the loop."""

    def _is_writer(self) -> bool:
        return self._members[0] == self._rank

    async def epoch_installed(self, epoch: int, members: tuple[int, ...], *, whole: bool) -> None:
        """Write our last record if the last writer died before it did; close the log for the next writer.

        `whole`: all members of the previous epoch continue, so the last writer lives. Raises `UserError` as
        `committed`.
        """
        await self._written()
        self._members = members
        if self._last_record is not None and epoch > self._last_record.epoch and not whole:
            self.log.append(self._last_record)
        self.log.close()

    async def committed(self, commit: cm.Commit, members: tuple[int, ...], slot: Slot) -> None:
        """Record a commit; the writer logs and reports it, and starts a checkpoint when one is due.

        It logs one turn of the loop later, in parallel to the beginning of the next step and before it can
        vote for that one: if it dies in between, this record is the last of the other members, and they log
        it.

        Raises `UserError` if the disk is full, also for the log of the previous commit and the checkpoint
        that was started at an earlier one.
        """
        if not commit.parts:
            return  # learnt from a report: a member that has the votes logs it
        await self._written()
        record, part_norm = _record_of(commit, members, self.log.header.seed)
        self._last_record = record
        if not self._is_writer():
            return
        self._writing = asyncio.create_task(self._write(record, part_norm))
        if self._saving is not None and self._saving.done():
            saved, self._saving = self._saving, None
            await saved  # if it failed, the run is to end now and not at the next checkpoint
        if self._checkpoint_every and commit.version % self._checkpoint_every == 0:
            await self._start_checkpoint(commit.version, slot)

    async def _write(self, record: CommitRecord, grad_norm: float) -> None:
        self.log.append(record)
        self._report(step_report(record, grad_norm))

    async def _written(self) -> None:
        """Wait for the record that is being written. Raises its error, once."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing

    def adopted(self, adopted: cm.Adopted) -> None:
        """Report that this rank has caught up by a pull or a recall."""
        self._report(adopted_report(adopted.version, adopted.epoch))

    def read_preserved(self, version: int, slot: Slot) -> bool:
        """Read the state of `version` into `slot` if the checkpoint on disk has it; return whether it has.

        Raises `UserError` if the checkpoint is damaged or of another run.
        """
        path, layout = checkpoint_in(self.directory), self._model.layout
        if path is None or read_names(path).version != version:
            return False
        with closing(open_state(path, plan=self.log.header.plan)) as saved:
            take_state(saved, slot.state, layout, self._arrays, xp=self._model.xp)
        return True

    async def preserve(self, version: int, slot: Slot) -> None:
        """Write weights and checkpoint of the last version; durable on return. Raises `UserError`."""
        await self._start_checkpoint(version, slot)
        await self.settle()
        weights = slot.state.weights
        path = self.directory / WEIGHTS_NAME
        await asyncio.to_thread(save_weights, path, weights, self._model.config, step=version)

    async def settle(self) -> None:
        """Wait for the record and checkpoint that are being written, and close the log. Raises their
        errors."""
        await self._written()
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving
        self.log.close()

    async def _start_checkpoint(self, version: int, slot: Slot) -> None:
        if self._saving is not None:
            await self._saving  # one at a time: a disk slower than the training slows it down, in the open
        # A copy: the slot is written again one commit from now, while the file is still being made.
        layout, arrays = self._model.layout, self._arrays
        state = AdamWState.of(to_host(slot.flat).copy(), layout.size, len(arrays))
        pieces, plan = whole_pieces(layout, state, arrays), self.log.header.plan
        save = asyncio.to_thread(write_alone, self.directory, pieces, version=version, plan=plan)
        self._saving = asyncio.create_task(save)


def step_report(record: CommitRecord, grad_norm: float) -> Report:
    """Return the report to the host about a logged step."""
    return {
        "kind": "step",
        "version": record.version,
        "epoch": record.epoch,
        "members": list(record.members),
        "loss": loss_of(record),
        "grad_norm": grad_norm,
        "held_out_loss": record.held_out_loss,
        "at_ns": record.at_ns,
    }


def adopted_report(version: int, epoch: int) -> Report:
    """Return the report to the host that a rank has caught up with `version`."""
    return {"kind": "adopted", "version": version, "epoch": epoch, "at_ns": time.monotonic_ns()}


def read_parts(parts: tuple[bytes, ...]) -> list[VotePart]:
    """Return the members' shares of the ledger, in rank order. Raises `RemoteProtocolError`."""
    try:
        return [msgspec.msgpack.decode(part, type=VotePart) for part in parts]
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"a member voted with an invalid share of the ledger: {error}") from error


def _record_of(commit: cm.Commit, members: tuple[int, ...], seed: int) -> tuple[CommitRecord, float]:
    parts = read_parts(commit.parts)
    windows = sum(part.held_out[1] for part in parts)
    record = CommitRecord(
        version=commit.version,
        epoch=commit.epoch,
        members=members,
        shards={shard: ids for part in parts for shard, ids in part.shards.items()},
        losses={shard: loss for part in parts for shard, loss in part.losses.items()},
        rng_key=(seed, commit.version - 1),
        digest=commit.digest.hex(),
        at_ns=time.monotonic_ns(),
        held_out_loss=sum(part.held_out[0] for part in parts) / windows if windows else None,
    )
    return record, parts[0].grad_norm
