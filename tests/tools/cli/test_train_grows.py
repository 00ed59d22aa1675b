"""A training run takes in a node that joins its cluster, and loses it; its bits stay those of one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import Nodes, Run

from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.train.command import recipe_of
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.sharded.run import train

STEPS = 24
"""A run trains on for some steps while nodes come and go, each of whose ranks may be a view of its own."""
SHAPE = ("--width", "16", "--heads", "2", "--layers", "2", "--context", "8", "--shards", "4")
PROGRAM = str(PROGRAMS / "training/waits_for_a_view.py")
ELASTIC = ("--nnodes", "1:2", "--on-loss")


async def submitted(
    nodes: Nodes, zero: str, mesh: str, *, files: bool, groups: Sequence[int], on_loss: str = "shrink"
) -> tuple[int, Run]:
    """Submit a run that waits for groups of so many nodes, and have the second node join the first group.

    Return the ranks of a node, and who follows the run.
    """
    await nodes.form("n1")
    ranks = 2 if "," in mesh else 1
    waits, folder = ",".join(str(size * ranks) for size in groups), str(nodes.directory / "files")
    where = ("--data", str(write_text(nodes.directory / "text")), "--out", str(nodes.directory / "out"))
    more = ("--offload", folder) if files else ()
    job = (waits, "train", *SHAPE, "--steps", f"{STEPS}", "--zero", zero, "--mesh", mesh, *where, *more)
    follower = await nodes.start(
        "n1", "submit", "--follow", *ELASTIC, on_loss, "-n", str(ranks), PROGRAM, *job
    )
    await follower.until(f"waits in a group of {ranks}")
    await nodes.up("n2", "--join", nodes.address("n1"))
    return ranks, follower


async def check_ended_as_alone(nodes: Nodes, follower: Run) -> None:
    """Follow the run to its end: its weights are those of one rank that is left alone."""
    told = await follower.until(r"(\{.*weights_sha256.*\})")
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)
    data, alone = str(nodes.directory / "text"), str(nodes.directory / "alone")
    calm = await train(recipe_of((*SHAPE, "--steps", f"{STEPS}", "--data", data, "--out", alone)))
    assert calm is not None
    assert msgspec.json.decode(told[1])["weights_sha256"] == calm.weights_sha256


@pytest.mark.parametrize(
    ("zero", "mesh", "files"),
    [
        ("0", "dp=2", False),
        ("3", "dp=2", False),
        ("0", "dp=2,pp=2", False),
        ("2", "dp=2,pp=2", False),
        ("3", "dp=2", True),
        ("0", "dp=2,pp=2", True),
        ("3", "dp=2,fsdp=2", False),
        ("1", "dp=2,fsdp=2", True),
    ],
)
async def test_a_run_takes_a_node_in_that_joins_it(nodes: Nodes, zero: str, mesh: str, files: bool) -> None:
    """A sharded state is recut for it."""
    ranks, follower = await submitted(nodes, zero, mesh, files=files, groups=[1])
    await check_ended_as_alone(nodes, follower)
    members = [record.members for record in read_log(nodes.directory / "out" / LOG_NAME)[1]]
    assert [who for who, _ in itertools.groupby(members)] == [
        tuple(range(ranks)),
        tuple(range(2 * ranks)),
    ]
    assert len(members) == STEPS
    assert not files or not list((nodes.directory / "files").iterdir())


@pytest.mark.parametrize(
    ("zero", "mesh", "files"),
    [
        ("3", "dp=2", False),
        ("0", "dp=2,pp=2", False),
        ("2", "dp=2,pp=2", True),
        ("2", "dp=2,fsdp=2", False),
    ],
)
async def test_a_run_takes_a_node_in_and_goes_on_when_that_is_killed(
    nodes: Nodes, zero: str, mesh: str, files: bool
) -> None:
    """Its state is recut each time, and each sample is in the ledger once."""
    ranks, follower = await submitted(nodes, zero, mesh, files=files, groups=[1, 2])
    await follower.until(f"waits in a group of {2 * ranks}")
    await nodes.runs["n2"].kill()
    await check_ended_as_alone(nodes, follower)
    out = nodes.directory / "out"
    members = [record.members for record in read_log(out / LOG_NAME)[1]]
    every, fewer = tuple(range(2 * ranks)), tuple(range(ranks))
    assert [who for who, _ in itertools.groupby(members)] == [fewer, every, fewer]
    audited = audit_run(out)
    assert (audited.steps, audited.steps_lost) == (STEPS, 0)
    assert (audited.samples_skipped, audited.samples_repeated) == (0, 0)


@pytest.mark.parametrize(("zero", "mesh", "files"), [("0", "dp=2", False), ("2", "dp=2,pp=2", True)])
async def test_a_run_takes_a_node_in_for_one_that_was_killed(
    nodes: Nodes, zero: str, mesh: str, files: bool
) -> None:
    """While there is none in its place it trains with fewer."""
    ranks, follower = await submitted(nodes, zero, mesh, files=files, groups=[1, 2, 1], on_loss="replace")
    await follower.until(f"waits in a group of {2 * ranks}")
    told = len(follower.lines)
    await nodes.runs["n2"].kill()
    await follower.until(f"waits in a group of {ranks}", after=told)
    await nodes.up("n3", "--join", nodes.address("n1"))
    await check_ended_as_alone(nodes, follower)
    out = nodes.directory / "out"
    members = [record.members for record in read_log(out / LOG_NAME)[1]]
    every, fewer = tuple(range(2 * ranks)), tuple(range(ranks))
    assert [who for who, _ in itertools.groupby(members)] == [fewer, every, fewer, every]
    audited = audit_run(out)
    assert (audited.steps, audited.steps_lost) == (STEPS, 0)
    assert (audited.samples_skipped, audited.samples_repeated) == (0, 0)
