"""Audits of commit logs: each step, batch and sample once; and what amends a loop's after a loss.

Imports nothing of PyTorch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise

from zbmd.training.run.ledger import CommitRecord, LedgerBroken
from zbmd.training.run.loop_steps import Deal, Ids, LoopStep


class Amend(Enum):
    """The change that the next writer makes to the log of one that was lost."""

    NOTHING = "nothing"
    APPEND = "append"
    """The last step was committed, and its writer did not live to log it."""
    TAKE_BACK = "take back"
    """The writer logged a step whose commit nobody else saw: it is repeated."""


def amendment(*, logged: int, step: int) -> Amend:
    """Return what is to be done to a log up to `logged`, if `step` steps are committed.

    Raises `LedgerBroken` if a loss cannot explain the difference.
    """
    if logged == step:
        return Amend.NOTHING
    if logged == step - 1:
        return Amend.APPEND
    if logged == step + 1:
        return Amend.TAKE_BACK
    raise LedgerBroken(
        f"the log of the loop ends with step {logged}, and {step} steps are committed: was another file put "
        "there?"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The result of an audit of a run."""

    steps: int
    steps_lost: int
    samples: int
    samples_skipped: int
    samples_repeated: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost, skipped or repeated."""
        return not (self.steps_lost or self.samples_skipped or self.samples_repeated)


def audit(
    records: Iterable[CommitRecord],
    expected: Callable[[int], Iterable[int]],
    *,
    base_version: int,
    steps: int,
) -> Audit:
    """Compare what was committed with what should have been.

    `expected(version)` are the sample ids that belong to a version. A sample is skipped if an expected one
    was not consumed in its step, repeated if it was consumed there more often than expected.
    """
    by_version: dict[int, Counter[int]] = {}
    for record in records:
        consumed = Counter(sample for ids in record.shards.values() for sample in ids)
        by_version[record.version] = by_version.get(record.version, Counter()) + consumed
    skipped = repeated = samples = 0
    for version in range(base_version + 1, base_version + steps + 1):
        want, got = Counter(expected(version)), by_version.get(version, Counter())
        samples += want.total()
        skipped += (want - got).total()
        repeated += (got - want).total()
    return Audit(
        steps=len(by_version),
        steps_lost=steps - len(by_version),
        samples=samples,
        samples_skipped=skipped,
        samples_repeated=repeated,
    )


class Proof(Enum):
    """The statement that a whole log proves, by what its ranks know of their batches."""

    SAMPLES = "every sample of each pass exactly once"
    BATCHES = "every batch of each pass exactly once, in order"
    STEPS = "every step exactly once"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopAudit(Audit):
    """The result of an audit of a loop.

    proves: for its weakest step. steps_repeated: versions that are there again, or out of order.
    batches_misplaced: of a rank, which are not the next one of their pass. passes_unfinished: left before
    their last batch: by the script, by the end of the run, or one under way; their other samples are not
    counted as skipped. samples_padding: which the sampler itself deals again, to fill up the last batches.
    """

    proves: Proof
    steps_repeated: int
    passes: int
    passes_unfinished: int
    batches: int
    batches_misplaced: int
    samples_padding: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is lost, repeated or out of place."""
        return not any(
            (
                self.steps_lost,
                self.steps_repeated,
                self.batches_misplaced,
                self.samples_skipped,
                self.samples_repeated,
            )
        )


@dataclass(slots=True)
class _Samples:
    """Counts of one pass."""

    all: int = 0
    skipped: int = 0
    repeated: int = 0
    padding: int = 0


def audit_loop(records: Sequence[CommitRecord], *, base_version: int, last_version: int) -> LoopAudit:
    """Audit the records of a loop. last_version: of the last record in the file, whole or not.

    A run that goes on from a checkpoint may have another number of ranks: from the end of a pass on.
    """
    versions = [record.version for record in records]
    due = range(base_version + 1, max(last_version, *versions, base_version) + 1)
    there = set(versions) & set(due)
    misplaced = sum(_strangers(record) for record in records)
    passes = unfinished = batches = 0
    total = _Samples()
    for _, group in groupby(_drawn(records), key=lambda pair: pair[1].of_pass):
        steps = list(group)
        last, ranks = steps[-1][1], len(steps[-1][1].ids)
        passes += 1
        batches += len(steps) * ranks
        misplaced += ranks * sum(step.batch != at for at, (_, step) in enumerate(steps))
        misplaced += sum(abs(len(step.ids) - ranks) for _, step in steps)
        finished = last.batches in (-1, last.batch + 1)
        unfinished += not finished
        found = _samples_of(ranks, steps, finished=finished and last.batches >= 0)
        total.all += found.all
        total.skipped += found.skipped
        total.repeated += found.repeated
        total.padding += found.padding
    return LoopAudit(
        proves=_proof(records),
        steps=len(there),
        steps_lost=len(due) - len(there),
        steps_repeated=len(versions) - len(there) + sum(b < a for a, b in pairwise(versions)),
        passes=passes,
        passes_unfinished=unfinished,
        batches=batches,
        batches_misplaced=misplaced,
        samples=total.all,
        samples_skipped=total.skipped,
        samples_repeated=total.repeated,
        samples_padding=total.padding,
    )


def _drawn(records: Iterable[CommitRecord]) -> Iterable[tuple[CommitRecord, LoopStep]]:
    """Yield the steps that have a batch."""
    for record in records:
        if record.loop is not None and record.loop.batch >= 0:
            yield record, record.loop


def _strangers(record: CommitRecord) -> int:
    """Return how many shares are missing in a record, or have been at another batch."""
    step, shares = record.loop, len(record.shards)
    if step is None or len(step.ids) != shares or record.shards.keys() != set(range(shares)):
        return max(shares, 1)
    place = (step.of_pass, step.batch)
    return sum(kind is Ids.BATCH and record.shards[rank] != place for rank, kind in enumerate(step.ids))


def _samples_of(ranks: int, steps: Sequence[tuple[CommitRecord, LoopStep]], *, finished: bool) -> _Samples:
    """Compare the samples of one pass with what the samplers deal."""
    found = _Samples()
    deal = steps[0][1].deal
    by_rank: list[Counter[int]] = [Counter() for _ in range(ranks)]
    known = deal is not None
    for record, step in steps:
        known = known and step.deal == deal
        for rank, kind in enumerate(step.ids):
            ids = record.shards.get(rank, ())
            if kind is Ids.DIGEST and len(ids) == 2:
                found.all += ids[1]
            elif kind is Ids.SAMPLES and rank < ranks:
                by_rank[rank].update(ids)
                found.all += len(ids)
            known = known and kind is Ids.SAMPLES
    if deal is None or not known:
        return found
    for consumed in [sum(by_rank, Counter[int]())] if deal.together else by_rank:
        _compare(found, consumed, deal, finished=finished)
    return found


def _compare(found: _Samples, consumed: Counter[int], deal: Deal, *, finished: bool) -> None:
    known = {sample for sample in consumed if 0 <= sample < deal.below}
    again = consumed.total() - len(known)
    found.padding += min(again, deal.again)
    found.repeated += max(0, again - deal.again)
    if finished:
        found.skipped += max(0, deal.samples - deal.left_out - len(known))


def _proof(records: Iterable[CommitRecord]) -> Proof:
    kinds: set[Proof] = set()
    for record in records:
        for kind in () if record.loop is None else record.loop.ids:
            counts = kind is Ids.SAMPLES and record.loop is not None and record.loop.deal is not None
            kinds.add(Proof.SAMPLES if counts else Proof.STEPS if kind is Ids.NONE else Proof.BATCHES)
    return next((proof for proof in (Proof.BATCHES, Proof.SAMPLES) if proof in kinds), Proof.STEPS)
