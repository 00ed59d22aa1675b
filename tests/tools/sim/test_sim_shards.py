"""Bugs planted in the machine of a PyTorch loop with shards; see `support.machines.mutations`."""

from __future__ import annotations

import pytest
from support.machines.mutations import ANY, BROKEN, Edit, Mutation, require_found

LOOP = "zbmd.training.torch.transaction:Transactions"
DIVISION = "zbmd.training.torch.fsdp.division"

MUTATIONS = [
    Mutation(
        "a vote is cast before the ward's gradients are here",
        "shards",
        (Edit(f"{LOOP}._prepared", "self.sharded and (event.updates or self.leaves)", "False"),),
        BROKEN,
        seed=0,
    ),
    Mutation(
        "shards move while a rank is in the middle of a step",
        "shards",
        (Edit(f"{LOOP}._go_on", "self._behind and (plan.moves or plan.divides)", "False"),),
        ANY,
        seed=8,
    ),
    Mutation(
        "a shard is taken from a rank that has lost its copy",
        "shards",
        (Edit(f"{DIVISION}:holders_of", "if keeps and size > 1", "if size > 1"),),
        BROKEN,
        seed=2,
    ),
    Mutation(
        "a replacement counts as a buddy before it has the copy",
        "shards",
        (
            Edit(
                f"{DIVISION}:plan_of",
                "tuple(moves_of(reports, version, source, distinct))",
                "tuple(move for move in moves_of(reports, version, source, distinct)"
                " if move.what is not What.COPY or not reports[move.target].fresh)",
            ),
        ),
        BROKEN,
        seed=0,
    ),
    Mutation(
        "the copies of two ranks are sent in a circle",
        "shards",
        (
            Edit(
                f"{LOOP}._go_on",
                "if self._place in (move.source, move.target)]",
                "if self._place in (move.source, move.target)][:: -1 if self._place else 1]",
            ),
        ),
        ANY,
        "--ranks 3 --length 1 --faults 1",
        seed=7,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_planted_bug_is_found_shrunk_and_seen_again(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_found(mutation, monkeypatch, capsys, whole=mutation is MUTATIONS[0])
