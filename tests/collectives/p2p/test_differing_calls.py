"""The call at which the ranks of a group differ, by the last calls of each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zbmd.collectives.errors import Desynchronised, OperationAborted
from zbmd.collectives.p2p.differing import CALLS_DIFFER, MADE_MAX, by_ranks, ended_by, first_difference


def calls(*made: str, of: str = "default_pg", first: int = 1) -> list[str]:
    """Return these calls as a rank reports them, the latest first."""
    return [f"{call} #{number} of {of}" for number, call in enumerate(made, first)][::-1]


def test_ranks_with_the_same_call_are_named_together() -> None:
    found = first_difference(
        {
            2: calls("all_reduce(float32[3, 4], SUM)"),
            1: calls("broadcast(float32[12], src=1)"),
            0: calls("all_reduce(float32[3, 4], SUM)"),
        }
    )
    assert found is not None and found.number == 1
    assert (
        "call #1 of default_pg differs: all_reduce(float32[3, 4], SUM) on ranks 0, 2; "
        "broadcast(float32[12], src=1) on rank 1; every rank of a group must"
    ) in found.text()
    assert "on rank 1 (rank 0 sends 2); every" in found.text("rank 0 sends 2")


def test_a_rank_that_has_gone_on_is_compared_where_the_others_are() -> None:
    found = first_difference({0: calls("a()", "c()", "d()"), 1: calls("a()", "b()")})
    assert found is not None and (found.number, found.calls) == (2, {0: "c()", 1: "b()"})


def test_an_earlier_call_is_named_if_the_latest_is_the_same() -> None:
    found = first_difference({0: calls("a()", "c()", "d()"), 1: calls("a()", "b()", "d()")})
    assert found is not None and found.number == 2


def test_of_calls_with_one_number_the_latest_counts() -> None:
    """A loop's own calls bear the number that the next one of the script will have."""
    made = calls("a()", "run.step()"), calls("b()", first=2)
    found = first_difference({0: [*made[1], *made[0]], 1: [*calls("c()", first=2), *made[0]]})
    assert found is not None and found.calls == {0: "b()", 1: "c()"}


def test_nothing_is_named_where_calls_look_alike_or_are_not_known() -> None:
    assert first_difference({0: calls("a()", "b()"), 1: calls("a()", "b()")}) is None
    assert first_difference({0: calls("a()"), 1: []}) is None
    assert first_difference({0: calls("a()", first=9), 1: calls("b()")}) is None, "no call is known of both"
    assert first_difference({0: ["all_reduce #3 of the group"], 1: ["without a number"]}) is None


def test_of_many_different_calls_the_first_are_named() -> None:
    text = by_ranks({rank: f"send(dst={rank})" for rank in range(MADE_MAX + 3)})
    assert text.endswith("; others on 3 more ranks") and f"on rank {MADE_MAX}" not in text


def test_a_reason_says_which_error_it_is() -> None:
    assert isinstance(ended_by("rank 1", f"{CALLS_DIFFER}a() on rank 0"), Desynchronised)
    left = ended_by("rank 1", "finished its script", "; barrier() waits for it")
    assert isinstance(left, OperationAborted)
    assert str(left) == "rank 1 finished its script; barrier() waits for it"


@given(st.dictionaries(st.integers(0, 9), st.lists(st.text(max_size=30), max_size=4), max_size=5))
def test_whatever_ranks_report_does_no_harm(reported: dict[int, list[str]]) -> None:
    """Texts come from other processes."""
    found = first_difference(reported)
    assert found is None or len(found.calls) >= 2
