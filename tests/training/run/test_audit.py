"""The audit of a loop's log: it finds each way in which a log can differ from one whole run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.training.run.audit import Amend, LoopAudit, Proof, amendment, audit_loop
from zbmd.training.run.ledger import CommitRecord, LedgerBroken
from zbmd.training.run.loop_steps import Deal, Drawn, Ids, LoopStep, ids_max
from zbmd.transport.errors import RemoteProtocolError

DEAL = Deal(samples=11, below=11, together=True, again=1)
BATCHES = 3


def step(version: int, kind: Ids = Ids.SAMPLES) -> CommitRecord:
    """Record of a loop of two ranks over 11 samples, two a rank and step: sample 0 is dealt again."""
    of_pass, batch = divmod(version - 1, BATCHES)
    ids = {rank: tuple((4 * batch + 2 * rank + i) % 11 for i in range(2)) for rank in range(2)}
    if kind is Ids.BATCH:
        ids = dict.fromkeys(range(2), (of_pass, batch))
    return CommitRecord(
        version=version,
        epoch=1,
        members=(0, 1),
        shards=ids,
        losses={0: 1.0},
        rng_key=(1, version),
        digest="",
        at_ns=version,
        loop=LoopStep(
            ids=(kind, kind),
            of_pass=of_pass,
            batch=batch,
            batches=BATCHES,
            deal=DEAL if kind is Ids.SAMPLES else None,
        ),
    )


def audited(records: list[CommitRecord], last: int = 0) -> LoopAudit:
    return audit_loop(records, base_version=0, last_version=last)


def with_samples(record: CommitRecord, rank: int, *ids: int) -> CommitRecord:
    return msgspec.structs.replace(record, shards={**record.shards, rank: ids})


def test_a_whole_log_proves_each_sample_and_says_what_the_sampler_itself_repeats() -> None:
    found = audited([step(version) for version in range(1, 7)])
    assert found.is_whole and found.proves is Proof.SAMPLES
    assert (found.steps, found.passes, found.passes_unfinished, found.batches) == (6, 2, 0, 12)
    assert (found.samples, found.samples_padding) == (24, 2)


def test_batches_without_indices_are_proved_by_their_order() -> None:
    found = audited([step(version, Ids.BATCH) for version in range(1, 5)])
    assert found.is_whole and found.proves is Proof.BATCHES
    assert (found.batches, found.samples, found.passes_unfinished) == (8, 0, 1)
    moved = with_samples(step(2, Ids.BATCH), 1, 0, 2)
    assert audited([step(1, Ids.BATCH), moved]).batches_misplaced == 1


def test_one_pass_that_is_left_misses_no_sample() -> None:
    found = audited([step(version) for version in range(1, 6)])
    assert found.is_whole and (found.passes_unfinished, found.samples_skipped) == (1, 0)


@pytest.mark.parametrize(
    ("tamper", "field"),
    [
        (lambda r: r[:1] + r[2:], "steps_lost"),
        (lambda r: [*r[:2], r[1], *r[2:]], "steps_repeated"),
        (lambda r: [r[1], r[0], *r[2:]], "steps_repeated"),
        (lambda r: [with_samples(r[0], 0, 0, 7), *r[1:]], "samples_skipped"),
        (lambda r: [with_samples(r[0], 0, 0, 7), *r[1:]], "samples_repeated"),
        (lambda r: [with_samples(r[0], 1, 2, 11), *r[1:]], "samples_skipped"),
        (lambda r: [with_samples(r[0], 1, 2), *r[1:]], "samples_skipped"),
        (lambda r: [msgspec.structs.replace(r[0], shards={0: (0, 1)}), *r[1:]], "batches_misplaced"),
        (lambda r: [msgspec.structs.replace(r[0], loop=None), *r[1:]], "batches_misplaced"),
    ],
)
def test_a_tampered_log_is_found(
    tamper: Callable[[list[CommitRecord]], list[CommitRecord]], field: str
) -> None:
    found = audited(tamper([step(version) for version in range(1, 7)]))
    assert getattr(found, field) > 0 and not found.is_whole


def test_records_behind_damage_are_lost() -> None:
    assert audited([step(1), step(2)], last=6).steps_lost == 4


@given(st.permutations(range(11)), st.integers(0, 11), st.integers(0, 10))
def test_any_order_is_whole_and_any_other_sample_is_found(order: list[int], at: int, other: int) -> None:
    dealt = [*order, order[0]]
    assert audited(_loop_of(dealt)).is_whole
    changed = [*dealt[:at], other, *dealt[at + 1 :]]
    assert audited(_loop_of(changed)).is_whole == (set(changed) == set(order))


def _loop_of(dealt: list[int]) -> list[CommitRecord]:
    """Return one pass in which rank 0 has the first two samples of each four, rank 1 the others."""
    return [
        msgspec.structs.replace(
            step(at + 1), shards={rank: tuple(dealt[4 * at + 2 * rank :][:2]) for rank in range(2)}
        )
        for at in range(BATCHES)
    ]


@given(st.lists(st.sampled_from(["logged", "seen", "neither"]), max_size=20))
def test_the_log_ends_with_the_last_committed_step_whenever_its_writer_dies(deaths: list[str]) -> None:
    """Each death of the writer is in a step: after it was logged, seen by others, or before both."""
    logged: list[int] = []
    step = 0
    for death in deaths:
        if death == "seen":  # a survivor has all votes; the writer died before it logged them
            step += 1
        elif death == "logged":  # the writer alone has all votes, and the step is repeated
            logged.append(step + 1)
        todo = amendment(logged=len(logged), step=step)
        if todo is Amend.APPEND:
            logged.append(step)
        elif todo is Amend.TAKE_BACK:
            logged.pop()
        assert logged == list(range(1, step + 1))


def test_a_log_of_other_steps_is_refused() -> None:
    for logged, committed in ((0, 2), (5, 3)):
        with pytest.raises(LedgerBroken, match=f"ends with step {logged}, and {committed} steps"):
            amendment(logged=logged, step=committed)


def test_a_vote_has_a_bounded_number_of_ids() -> None:
    assert ids_max(4) == 16_384
    Drawn(kind=Ids.SAMPLES, of_pass=0, batch=0, ids=tuple(range(64))).check(1024)
    for bad in (
        Drawn(kind=Ids.SAMPLES, of_pass=0, batch=0, ids=tuple(range(65))),
        Drawn(kind=Ids.DIGEST, of_pass=0, batch=0, ids=(1,)),
        Drawn(kind=Ids.NONE, ids=(1,)),
    ):
        with pytest.raises(RemoteProtocolError, match="ids of kind"):
            bad.check(1024)
