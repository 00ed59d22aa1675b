"""Results and records of steps: what one member knows, all learn, from numbers that a peer sends."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.view import RANKS_MAX
from zbmd.training.job.results import StepResults
from zbmd.training.job.task import ResultRow, StepResult

ROW = ResultRow(2, 3)


def result(version: int) -> StepResult:
    return StepResult(version=version, losses=(0.5, 1.25), samples=((1, 2, 3), (4, 5, 2**40)), grad_norm=2.5)


def results_of(version: int) -> StepResults:
    results = StepResults(ROW, seed=7)
    results.keep(result(version))
    return results


@given(
    version=st.integers(1, 2**40),
    members=st.sets(st.integers(0, RANKS_MAX - 1), min_size=1, max_size=5),
    digest=st.integers(0, 2**64 - 1),
    held_out=st.none() | st.floats(0, 100),
)
def test_a_record_comes_as_it_was_shared(
    version: int, members: set[int], digest: int, held_out: float | None
) -> None:
    ranks = sorted(members)
    writer, other = results_of(version), StepResults(ROW, seed=7)
    found = writer.committed(
        version,
        [digest] * len(ranks),
        epoch=3,
        members=ranks,
        keys=[0] * len(ranks),
        at_ns=12345,
        held_out_loss=held_out,
    )
    assert found is not None and found.record.members == tuple(ranks)
    other.learn_records([other.share().tolist(), writer.share().tolist()])
    assert other.missing(version - 1) == found and other.missing(version) is None
    assert other.result(version) == result(version) and other.logged == version


def test_a_digest_does_not_depend_on_how_many_hold_the_same() -> None:
    def digest(digests: list[int], keys: list[int]) -> str:
        found = results_of(1).committed(1, digests, epoch=1, members=range(len(digests)), keys=keys, at_ns=1)
        assert found is not None
        return found.record.digest

    assert digest([5, 6, 5, 6], [0, 1, 0, 1]) == digest([5, 6], [0, 1]) == digest([5, 6], [])
    assert digest([5, 6], []) != digest([6, 5], [])


def test_a_version_is_logged_once() -> None:
    results = results_of(4)
    for again in (False, True):
        found = results.committed(4, [1], epoch=1, members=[0], keys=[], at_ns=1)
        assert (found is None) == again
    assert results.committed(5, [1], epoch=1, members=[0], keys=[], at_ns=1) is None, "it has no result"


@given(st.lists(st.floats(), min_size=0, max_size=60), st.booleans())
def test_whatever_numbers_a_peer_sends_are_a_record_or_none(numbers: list[float], whole: bool) -> None:
    length = len(StepResults(ROW, seed=7).share())
    row = (numbers + [0.0] * length)[:length] if whole else numbers
    results = StepResults(ROW, seed=7)
    results.learn_records([row])
    found = results.missing(0)
    assert found is None or found.record.version == found.done.version >= 1
    results.learn(1, [row])
    assert np.isfinite(results.share()[:3]).all()
