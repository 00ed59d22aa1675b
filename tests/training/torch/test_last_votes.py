"""A rank is killed in the last vote of a loop, and one survivor has not seen it. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.resilient_loops import PRELOAD
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import OnLoss, Outcome

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional


@pytest.mark.parametrize(
    ("on_loss", "way", "votes"),
    [(OnLoss.SHRINK, "pass", 3), (OnLoss.REPLACE, "steps", 2)],
)
async def test_a_survivor_ends_as_those_that_have_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_loss: OnLoss, way: str, votes: int
) -> None:
    """It has voted: the commit counts. A replacement finds nobody that has the state, and says so."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    config = HostConfig(
        target=str(PROGRAMS / "training/last_vote.py"),
        arguments=(str(tmp_path), way),
        world_size=3,
        on_loss=on_loss,
        arena_bytes=32 << 20,
        environment={"ZBMD_FAULT": f"rank1:loop.voted:{votes}"},
        preload=PRELOAD,
    )
    result = await Host(config, output=output).run()
    told = [line.partition("ends with ")[2] for line in output.lines if "ends with " in line]
    assert len(told) == 2 and len(set(told)) == 1 and told[0].startswith("2 "), output.lines
    if on_loss is OnLoss.SHRINK:
        assert result.outcome is Outcome.SUCCEEDED, output.lines
    else:
        assert result.outcome is Outcome.FAILED, output.lines
        assert "ScriptsEnded: rank 2 finished its script" in "\n".join(output.lines), output.lines
