"""The records of a loop: `resilient(..., out=…)` writes the commit log of `zbmd train`, and its metrics.

Rank 0 writes. It logs a step when it has seen all votes, before it votes again, so of all that is committed
the log can only lack the last step. A replaced writer has the votes of that from a survivor, and puts the log
right (`amend`) before the loop goes on.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import xxhash

from zbmd.training.job.overwrite import claimed
from zbmd.training.job.records import Records, keep_until
from zbmd.training.job.results import state_digest
from zbmd.training.run.audit import Amend, amendment
from zbmd.training.run.ledger import (
    LOCK_NAME,
    LOG_NAME,
    CommitRecord,
    LedgerBroken,
    RunLog,
    has_log,
    locked,
    log_is_gone,
    nobody_writes,
    read_header,
)
from zbmd.training.run.loop_steps import LoopPlan, LoopStep
from zbmd.training.torch import points
from zbmd.training.torch.transfer import described, own_tensors
from zbmd.training.torch.votes import ballot_of, means_of, noted_of
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.native._native import now_ns

LOSS: Final = "loss"
"""The mean that is the loss of a step."""


@contextmanager
def claiming(out: Path, *, resume: bool, held: str = "") -> Generator[str]:
    """Keep other loops out of `out` meanwhile; yield why this one must not be recorded there, "" if it may.

    resume: whether it goes on with the run that is there. held: the run that it goes on with from memory.
    """
    with ExitStack() as claim:
        refused = ""
        try:
            claim.enter_context(claimed(out))
            if resume or held:
                with nobody_writes(out):
                    pass
                if held and (not has_log(path := out / LOG_NAME) or read_header(path).run_id != held):
                    refused = str(log_is_gone(path, held))
            elif has_log(path := out / LOG_NAME):
                header = read_header(path)
                refused = (
                    f"{path} belongs to another run ({header.run_id}, seed {header.seed}): give "
                    "zbmd.torch.resilient(out=…) a directory of its own, or continue that run by resume=True"
                )
        except UserError as error:
            refused = str(error)
        except OSError as error:
            refused = (
                f"zbmd.torch.resilient(out={str(out)!r}): {error.strerror}: give a directory that can be "
                "written"
            )
        yield refused


def plan_of(models: Sequence[Any], optimizers: Sequence[Any], ranks: int) -> LoopPlan:
    """Return the plan of a loop, for the header of its log."""
    tensors = "\n".join(described(name, tensor) for name, tensor in own_tensors(models))
    return LoopPlan(
        loop="+".join(type(each).__name__ for each in optimizers),
        ranks=ranks,
        parameters=sum(each.numel() for model in models for each in model.parameters()),
        model=hashlib.sha256(tensors.encode()).hexdigest()[:32],
    )


def record_of(rows: Sequence[bytes], *, seed: int, epoch: int, at_ns: int) -> CommitRecord | None:
    """Return the record of the step that all have voted for; None if these are votes for something else.

    rows: the votes of all ranks. Raises `RemoteProtocolError`.
    """
    noted = [each for row in rows if (each := noted_of(row, len(rows))) is not None]
    if not rows or len(noted) != len(rows) or not noted[0].step:
        return None
    if len({(each.step, each.names) for each in noted}) > 1:
        steps, names = [each.step for each in noted], [each.names for each in noted]
        raise RemoteProtocolError(f"ranks vote for steps {steps} with means {names}: all give the same")
    ballots = [ballot_of(row) for row in rows]
    means = means_of(rows, noted[0].names)
    drawn = [each for one in noted for each in one.drawn]
    first = drawn[0]
    known = {
        rank: xxhash.xxh3_64_intdigest(struct.pack(f"<{len(ballot.digests)}Q", *ballot.digests))
        for rank, ballot in enumerate(ballots)
        if ballot.digests
    }
    return CommitRecord(
        version=noted[0].step,
        epoch=epoch,
        members=tuple(range(len(rows))),
        shards={share: each.ids for share, each in enumerate(drawn)},
        losses={0: means[LOSS]} if LOSS in means else {},
        rng_key=(seed, noted[0].step - 1),
        digest=state_digest(known) if known else "",
        at_ns=at_ns,
        loop=LoopStep(
            ids=tuple(each.kind for each in drawn),
            of_pass=first.of_pass,
            batch=first.batch,
            batches=first.batches,
            deal=first.deal,
        ),
    )


class Recorder:
    """The files of the writer in `out`. fresh: this rank replaces the last one. Raises `UserError`.

    resumed: the step of the checkpoint that the run goes on from; None: it begins.
    """

    def __init__(
        self,
        out: Path,
        *,
        run_id: str,
        plan: LoopPlan,
        seed: int,
        fresh: bool,
        resumed: int | None = None,
    ) -> None:
        self._out, self._seed, self._fresh = out, seed, fresh
        path = out / LOG_NAME
        begun = fresh and has_log(path) and read_header(path).run_id == run_id
        first = 0 if begun or resumed is None else resumed
        self._log = RunLog(
            out,
            run_id=run_id,
            first=first,
            plan=plan.text(),
            seed=seed,
            resumed=None if resumed is None else out,
            may_begin=True,
            goes_back=resumed is not None and not fresh,
            on_begin=lambda: keep_until(out, first),
        )
        self._lock = locked(out / LOCK_NAME, fcntl.LOCK_SH)
        """Held from the beginning: the log takes it with its first record."""
        self._records: Records | None = None
        self._is_closed = False

    def amend(self, rows: Sequence[bytes], step: int, epoch: int) -> None:
        """Have the log end with `step`, the last one that is committed. rows: the last votes.

        Of a state from memory of which the newest version was damaged, the log may have two steps more.
        """
        last = self._log.last_version()
        if last == step + 2:
            self._log.take_back(last)
            last -= 1
        todo = amendment(logged=last, step=step)
        if todo is Amend.TAKE_BACK:
            self._log.take_back(last)
            keep_until(self._out, step)
        record = record_of(rows, seed=self._seed, epoch=epoch, at_ns=now_ns())
        if record is not None and record.version == step:
            self._put(record, rows, logged=todo is not Amend.APPEND)
        elif todo is Amend.APPEND:
            raise LedgerBroken(f"step {step} is committed, and nobody has its votes")

    def put(self, rows: Sequence[bytes], epoch: int) -> None:
        """Log the step that all have voted for, if it is one."""
        record = record_of(rows, seed=self._seed, epoch=epoch, at_ns=now_ns())
        if record is not None:
            self._put(record, rows)

    def _put(self, record: CommitRecord, rows: Sequence[bytes], *, logged: bool = False) -> None:
        if not logged:
            self._log.append(record)
        faults.hit(points.LOGGED)
        noted = noted_of(rows[0], len(rows))
        records = self._opened()
        if noted is not None and noted.names:
            records.put(record.version, **means_of(rows, noted.names))

    def note_pace(self, step: int, values: Mapping[str, float], says: bool) -> None:
        """Note what `PaceClock` has measured, unless this is closed. says: whether a line says so."""
        if not self._is_closed and self._opened().put(step, **values) and says:
            Records.tell(step, **values)

    def _opened(self) -> Records:
        if self._records is None:
            self._records = Records(self._out, tensorboard=False, again=self._fresh)
        return self._records

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._is_closed = True
        self._log.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._records is not None:
            self._records.close()
            self._records = None
