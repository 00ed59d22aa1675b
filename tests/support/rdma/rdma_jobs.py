"""Jobs that end with digests: over RDMA, and on one host, where they are to be the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from programs import PROGRAMS

from support.jobs.by_words import plain_by
from support.processes.one_killed import run_and_kill_the_last
from zbmd.actors.view import Outcome
from zbmd.tools.chaos.small_job import SHAPE, STEPS, run_small_job, write_text
from zbmd.transport.rdma.transfer import TransferCounts

EXPECTED_VARIABLE = "ZBMD_TEST_DIGESTS"
"""Digests of collectives on one host, for a machine that would take long to find them out; with commas."""
RDMA_MODULES = ("zbmd.transport.rdma.message_device", "zbmd.transport.rdma.plane")
"""Modules that import libibverbs and pyverbs."""
TRAINING_RANKS = 2
RANKS = 3


async def digests_of_collectives(
    directory: Path, monkeypatch: pytest.MonkeyPatch, links: str, *, by: str
) -> list[str]:
    """Of each rank, which all say that their links and memory are `by`. The last one is killed meanwhile."""
    more = RDMA_MODULES if links == "rdma" else ()
    ended = await run_and_kill_the_last(
        PROGRAMS / "collectives/digests.py",
        directory,
        monkeypatch,
        ranks=RANKS,
        links=links,
        more_modules=more,
    )
    assert ended.result.outcome is Outcome.SUCCEEDED, "\n".join(ended.lines)
    assert ended.said["lost"] == ended.said["done"] == {0, 1}, ended.lines
    lines = sorted(line for line in ended.lines if ": digest " in line)
    found = [line.partition(": digest ")[2].split(" ", 1) for line in lines]
    assert [how for _, how in found] == [by] * RANKS, ended.lines
    return [digest for digest, _ in found]


async def digests_on_one_host(directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The expected result of those over RDMA."""
    return await digests_of_collectives(directory, monkeypatch, "auto", by="PeerSegment ShmLink")


class Trained(NamedTuple):
    """The result of a job over RDMA. plain: the digest of a run on one processor."""

    digest: str
    plain: str
    transfers: TransferCounts
    """Of all processes that have ended by themselves, from the first transfer to the last."""


async def train_over_rdma(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A small job that loses a rank."""
    data, logs = write_text(directory / "text"), directory / "logs"
    words = [*SHAPE, "--steps", str(STEPS), "--data", str(data), "--out", str(directory / "plain")]
    plain = plain_by(words)
    monkeypatch.setenv("ZBMD_LOG_DIR", str(logs))
    found = await run_small_job(
        directory / "rdma", data, fault="rank1:job.begin:3", world_size=TRAINING_RANKS, links="rdma"
    )
    assert found.deaths == 1, found.failures
    return Trained(found.digest, plain.weights_sha256, transfers_logged(logs))


def transfers_logged(directory: Path) -> TransferCounts:
    """The counts that the ranks have logged at their end, together."""
    lines = [line for file in directory.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    told = [event for event in map(msgspec.json.decode, lines) if event["event"] == "rdma_transfers"]
    assert len(told) == TRAINING_RANKS, lines
    every = [TransferCounts(*(event[name] for name in TransferCounts._fields)) for event in told]
    return functools.reduce(TransferCounts.plus, every)
