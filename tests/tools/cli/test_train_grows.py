"""A training run of a cluster takes in a node that joins it, and its bits stay those of one rank."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import Nodes

from zbmd.tools.chaos.small_job import write_text
from zbmd.tools.train.command import recipe_of
from zbmd.training.run.ledger import LOG_NAME, read_log
from zbmd.training.sharded.run import train

SHAPE = ("--width", "16", "--heads", "2", "--layers", "2", "--context", "8", "--shards", "4", "--steps", "8")


@pytest.mark.parametrize(
    ("zero", "mesh"), [("0", "dp=2"), ("3", "dp=2"), ("0", "dp=2,pp=2"), ("2", "dp=2,pp=2")]
)
async def test_a_run_takes_a_node_in_that_joins_it(nodes: Nodes, zero: str, mesh: str) -> None:
    """A sharded state is recut for it."""
    data, out = str(write_text(nodes.directory / "text")), nodes.directory / "out"
    alone = recipe_of((*SHAPE, "--data", data, "--out", str(nodes.directory / "alone")))
    calm = await train(alone)
    await nodes.form("n1")
    job = (str(PROGRAMS / "training/waits_for_a_view.py"), "train", *SHAPE, "--zero", zero, "--mesh", mesh)
    job = (*job, "--data", data, "--out", str(out))
    ranks = 2 if "pp" in mesh else 1
    options = ("--nnodes", "1:2", "-n", str(ranks), "--on-loss", "shrink")
    follower = await nodes.start("n1", "submit", "--follow", *options, *job)
    await follower.until("rank 0 waits for another")
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
