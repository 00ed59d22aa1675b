"""A training run takes in a node that joins its cluster, and loses it; its bits stay those of one rank."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import Nodes

from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.runs.commands import audit_run
from zbmd.tools.train.command import recipe_of
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.sharded.run import train

SHAPE = ("--width", "16", "--heads", "2", "--layers", "2", "--context", "8", "--shards", "4", "--steps", "8")
PROGRAM = str(PROGRAMS / "training/waits_for_a_view.py")
ELASTIC = ("--nnodes", "1:2", "--on-loss", "shrink")


@pytest.mark.parametrize(
    ("zero", "mesh", "files"),
    [
        ("0", "dp=2", False),
        ("3", "dp=2", False),
        ("0", "dp=2,pp=2", False),
        ("2", "dp=2,pp=2", False),
        ("3", "dp=2", True),
        ("0", "dp=2,pp=2", True),
    ],
)
async def test_a_run_takes_a_node_in_that_joins_it(nodes: Nodes, zero: str, mesh: str, files: bool) -> None:
    """A sharded state is recut for it."""
    data, out = str(write_text(nodes.directory / "text")), nodes.directory / "out"
    alone = recipe_of((*SHAPE, "--data", data, "--out", str(nodes.directory / "alone")))
    calm = await train(alone)
    await nodes.form("n1")
    ranks = 2 if "pp" in mesh else 1
    more = ("--offload", str(nodes.directory / "files")) if files else ()
    job = (
        f"{ranks}",
        "train",
        *SHAPE,
        "--zero",
        zero,
        "--mesh",
        mesh,
        "--data",
        data,
        "--out",
        str(out),
        *more,
    )
    follower = await nodes.start("n1", "submit", "--follow", *ELASTIC, "-n", str(ranks), PROGRAM, *job)
    await follower.until(f"waits in a group of {ranks}")
    await nodes.up("n2", "--join", nodes.address("n1"))
    told = await follower.until(r"(\{.*weights_sha256.*\})")
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)
    assert calm is not None
    assert msgspec.json.decode(told[1])["weights_sha256"] == calm.weights_sha256
    members = [record.members for record in read_log(out / LOG_NAME)[1]]
    assert [who for who, _ in itertools.groupby(members)] == [
        tuple(range(ranks)),
        tuple(range(2 * ranks)),
    ]
    assert len(members) == 8
    assert not files or not list((nodes.directory / "files").iterdir())


@pytest.mark.parametrize(
    ("zero", "mesh", "files"), [("3", "dp=2", False), ("0", "dp=2,pp=2", False), ("2", "dp=2,pp=2", True)]
)
async def test_a_run_takes_a_node_in_and_goes_on_when_that_is_killed(
    nodes: Nodes, zero: str, mesh: str, files: bool
) -> None:
    """Its state is recut each time, and each sample is in the ledger once."""
    data, out = str(write_text(nodes.directory / "text")), nodes.directory / "out"
    calm = await train(recipe_of((*SHAPE, "--data", data, "--out", str(nodes.directory / "alone"))))
    await nodes.form("n1")
    ranks = 2 if "pp" in mesh else 1
    more = ("--offload", str(nodes.directory / "files")) if files else ()
    job = (
        f"{ranks},{2 * ranks}",
        "train",
        *SHAPE,
        "--zero",
        zero,
        "--mesh",
        mesh,
        "--data",
        data,
        "--out",
        str(out),
        *more,
    )
    follower = await nodes.start("n1", "submit", "--follow", *ELASTIC, "-n", str(ranks), PROGRAM, *job)
    await follower.until(f"waits in a group of {ranks}")
    await nodes.up("n2", "--join", nodes.address("n1"))
    await follower.until(f"waits in a group of {2 * ranks}")
    await nodes.runs["n2"].kill()
    told = await follower.until(r"(\{.*weights_sha256.*\})")
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)
    assert calm is not None
    assert msgspec.json.decode(told[1])["weights_sha256"] == calm.weights_sha256
    members = [record.members for record in read_log(out / LOG_NAME)[1]]
    every, fewer = tuple(range(2 * ranks)), tuple(range(ranks))
    assert [who for who, _ in itertools.groupby(members)] == [fewer, every, fewer]
    audited = audit_run(out)
    assert (audited.steps, audited.steps_lost) == (8, 0)
    assert (audited.samples_skipped, audited.samples_repeated) == (0, 0)
