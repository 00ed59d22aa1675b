"""A rank of a resilient loop that `zbmd inject` slows is named with its cause, or replaced."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import PRELOAD
from support.jobs.slowed import injected
from support.netns import netns
from support.processes.kept_lines import Lines
from support.processes.polling import until
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.lab.hosts.netns import Lab
from zbmd.tools.telemetry.ingest import RunDatabase
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS
from zbmd.training.profiler.lines import read_profiles
from zbmd.transport.errors import RemoteProtocolError, UserError

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional
votes: Any = importlib.import_module("zbmd.training.torch.votes")
slow: Any = importlib.import_module("zbmd.training.torch.durable.slow_ranks")

PROGRAM = str(PROGRAMS / "tools/even_loop.py")
KNOWN_STEPS = 40
ENDED = r"step \d+ rank 1 is slow: .*; it is ended, as if it had died"
HOSTS, DELAY_MS, READ_S = 3, 20.0, 300.0


class Loop:
    """A loop of two ranks that goes on until the test is over."""

    def __init__(self, out: Path, on_straggler: str) -> None:
        self.output = Lines()
        config = HostConfig(
            target=PROGRAM,
            arguments=(str(out), "100000", on_straggler),
            world_size=2,
            on_loss=OnLoss.REPLACE,
            arena_bytes=32 << 20,
            preload=PRELOAD,
        )
        self.host = Host(config, output=self.output, template=template_of(config))
        self.run = asyncio.ensure_future(self.host.run())

    async def until(self, pattern: str, first: int = 0) -> None:
        """Return once a line from `first` on has it. Fails if the loop ends before."""
        await until(lambda: self.run.done() or self.has(pattern, first))
        assert self.has(pattern, first), "\n".join(self.output.lines)

    def has(self, pattern: str, first: int = 0) -> bool:
        """Return whether a line from `first` on has the pattern."""
        return any(re.search(pattern, line) for line in self.output.lines[first:])


@asynccontextmanager
async def loop_in(
    out: Path, monkeypatch: pytest.MonkeyPatch, on_straggler: str = "warn"
) -> AsyncGenerator[Loop]:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(out.parent / "cookie"))
    loop = Loop(out, on_straggler)
    try:
        await loop.until(rf"step {KNOWN_STEPS} loss")
        yield loop
    finally:
        loop.host.stop("the test is over", kill=True)
        await loop.run


async def test_a_slow_rank_of_a_loop_is_named_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First for its computation, then another one for its batches."""
    out = tmp_path / "out"
    async with loop_in(out, monkeypatch) as loop:
        with injected(out, "--rank", "1", "--slow", "1000%"):
            await loop.until(r"step \d+ rank 1 is slow: .* cause compute: .*; nothing is done about it")
        with injected(out, "--rank", "0", "--data-delay", "500ms"):
            await loop.until(r"step \d+ rank 0 is slow: .* cause data: it waits for its batches")
    lines = {(line.slow, line.cause) for life in read_profiles(out) for line in life.stragglers}
    assert lines >= {(1, "compute"), (0, "data")}
    with RunDatabase(out) as database:
        database.update()
        rows = database.connection.execute("select rank from events where kind = 'straggler'").fetchall()
    assert {(0,), (1,)} <= {*rows}


async def test_a_slow_rank_of_a_loop_is_replaced_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    async with loop_in(out, monkeypatch, "replace") as loop:
        with injected(out, "--rank", "1", "--slow", "1000%"):
            await loop.until(ENDED)
            first = len(loop.output.lines)
        await loop.until(r"step \d+ loss", first)
        # Whatever else ends it on a loaded machine makes it more than two incarnations, not more reports.
        await until(lambda: loop.run.done() or max_incarnation(out) >= 2)
        assert not loop.run.done(), "\n".join(loop.output.lines)
        reports = {found[0] for line in loop.output.lines if (found := re.search(ENDED, line))}
        assert len(reports) == 1, reports


@pytest.mark.slow
def test_a_host_of_a_loop_behind_a_slow_cable_is_named_for_its_link(tmp_path: Path) -> None:
    """Its peers' acknowledgements of each other wait for it, too, and do not hide it. So is a slow link."""
    netns.require_lab()
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(HOSTS, shaped=True))
        job = ("--recovery-budget", "1min", PROGRAM, str(tmp_path / "out"), "100000", "warn")
        nodes = [
            stack.enter_context(netns.run_node(lab, host, *job, nnodes=str(HOSTS), timeout_s=READ_S))
            for host in lab.hosts
        ]
        nodes[0].until(rf"step {KNOWN_STEPS} loss")
        lab.hosts[1].shape(delay_ms=DELAY_MS)
        nodes[0].until(r"rank 1 is slow: .* cause link: its connections' round trips take \d+ us")
        lab.hosts[1].shape()
        nodes[0].until(r"rank 1 is no longer slow \(cause link\)")
        lab.hosts[1].shape_link(lab.hosts[2], delay_ms=DELAY_MS)
        nodes[0].until(
            r"the link between 10\.77\.0\.2 \(rank 1\) and 10\.77\.0\.3 \(rank 2\) is slow: "
            r".* cause link: [\d.]+ ms for a round trip"
        )


def max_incarnation(out: Path) -> int:
    return max(life.run.incarnation for life in read_profiles(out) if life.run.rank == 1)


def test_policies_that_a_loop_has_not_are_refused() -> None:
    assert slow.require_choice("replace").value == "replace"
    with pytest.raises(UserError, match="expected warn or replace, got 'rebalance': a rank's share"):
        slow.require_choice("rebalance")


def test_samples_travel_with_votes() -> None:
    """Those of an earlier version, which has none, are read too, and any other bytes are refused."""
    ballot, drawn = votes.Ballot(version=7), (votes.Drawn(),)
    sample = tuple(float(number) for number in range(SAMPLE_NUMBERS))
    noted = votes.Noted(7, ("loss",), drawn, sample)
    row = votes.pack(ballot, [{"loss": 1.0}], {}, noted)
    assert votes.noted_of(row, 1) == noted
    bare = votes.pack(ballot, [{"loss": 1.0}], {}, votes.Noted(7, ("loss",), drawn))
    none = votes.pack(ballot, [{"loss": 1.0}], {})
    found = votes.samples_of([row, bare, none])
    nothing = [0.0] * SAMPLE_NUMBERS
    assert found.tolist() == [[*sample], nothing, nothing]
    earlier = msgspec.msgpack.encode([7, ["loss"], drawn])
    assert msgspec.msgpack.decode(earlier, type=votes.Noted) == votes.Noted(7, ("loss",), drawn)
    wrong = votes.pack(ballot, [{"loss": 1.0}], {}, votes.Noted(7, ("loss",), drawn, (1.0,)))
    with pytest.raises(RemoteProtocolError, match=f"expected {SAMPLE_NUMBERS} numbers"):
        votes.samples_of([wrong])
