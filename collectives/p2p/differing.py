"""The calls of a group's ranks where they differ, in the words of those who made them.

A call as text is `all_reduce(float32[3, 4], SUM) #5 of default_pg`: what was called, its number in the group,
and the group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from zbmd.collectives.errors import CollectiveError, Desynchronised, OperationAborted

CALLS_DIFFER: Final = "gave up: Desynchronised: "
"""Begins the reason of a rank that has found that its calls and another's differ."""
MADE_MAX: Final = 8
"""Different calls that an error names."""
ADVICE: Final = (
    "every rank of a group must make the same calls in the same order: look for a condition, a loop or a "
    "size that is not the same on all of them, and make the group again"
)


def ended_by(who: str, reason: str, waits: str = "") -> CollectiveError:
    """Return the error of what waited for `who`, which has ended its part of the group for this reason."""
    if reason.startswith(CALLS_DIFFER):
        return Desynchronised(reason.removeprefix(CALLS_DIFFER), {})
    return OperationAborted(f"{who} {reason}{waits}")


def message_differs(calls: Mapping[int, str], members: Sequence[int]) -> Desynchronised:
    """Return the error of a receive that does not fit its message. calls: of its two ranks in the group."""
    text = (
        f"{by_ranks(calls)}: a message is received into a tensor of its dtype and size; make the group again "
        "when the calls fit"
    )
    return Desynchronised(text, {members[rank]: call for rank, call in calls.items()})


class Difference(NamedTuple):
    """The first call that is not the same on all ranks. calls: what each rank called, without the number."""

    number: int
    title: str
    calls: dict[int, str]

    def text(self, detail: str = "") -> str:
        """Return the text of an error. detail: what more is known of it."""
        more = f" ({detail})" if detail else ""
        return f"call #{self.number} of {self.title} differs: {by_ranks(self.calls)}{more}; {ADVICE}"


def first_difference(calls: Mapping[int, Sequence[str]]) -> Difference | None:
    """Return where ranks first differ, as far as their last calls say it; None if these look alike.

    calls: the last calls of each rank, the latest first. A rank may learn late that an earlier call did not
    fit, so what is looked at first is the latest call that all of them have come to.
    """
    numbered = {rank: _numbered(texts) for rank, texts in calls.items()}
    numbered = {rank: found for rank, found in numbered.items() if found}
    if len(numbered) < 2:
        return None
    for number in range(min(max(found) for found in numbered.values()), 0, -1):
        made = {rank: found[number] for rank, found in numbered.items() if number in found}
        if len(made) < len(numbered):
            return None
        if len({call for call, _ in made.values()}) > 1:
            title = made[min(made)][1]
            return Difference(number, title, {rank: call for rank, (call, _) in made.items()})
    return None


def by_ranks(calls: Mapping[int, str]) -> str:
    """Return `all_reduce(float32[3, 4], SUM) on ranks 0, 2; broadcast(float32[12], src=1) on rank 1`."""
    ranks: dict[str, list[int]] = {}
    for rank in sorted(calls):
        ranks.setdefault(calls[rank], []).append(rank)
    parts = [f"{call} on {_named(of)}" for call, of in [*ranks.items()][:MADE_MAX]]
    left = sum(len(of) for of in [*ranks.values()][MADE_MAX:])
    return "; ".join(parts + ([f"others on {left} more ranks"] if left else []))


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _numbered(texts: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return the calls by their numbers, each with the title of its group."""
    found: dict[int, tuple[str, str]] = {}
    for text in texts:
        call, _, place = text.partition(") #")
        number, _, title = place.partition(" of ")
        if number.isdecimal():  # a loop's own calls have no numbers of theirs: the latest one counts
            found.setdefault(int(number), (f"{call})", title))
    return found
