"""Processes that a rank makes: they end at once, by their own exit code, and harm no link of the rank."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import PROGRAMS
from support.processes.kept_lines import Lines

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.process.exit import at_script_end, script_ended
from zbmd.actors.view import OnLoss, Outcome


async def test_forked_children_have_no_part_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output = Lines()
    script = str(PROGRAMS / "actors/makes_children.py")
    config = HostConfig(target=script, world_size=2, on_loss=OnLoss.STOP, max_restarts=0)
    result = await Host(config, output=output).run()
    said = [line.removeprefix("0: ") for line in output.lines if line.startswith("0: ")]
    assert result.outcome is Outcome.SUCCEEDED, (result, output.lines)
    for line in (
        "exits 3",
        "raises 1",
        "returns 0",
        "calls 1",
        "is ended -15",
        "joins 1 True",
        "rank 0 has 2 and was asked []",
        "at the end 4",
    ):
        assert line in said, (line, said)
    assert "rank 1 has 2 and was asked []" in [line.removeprefix("1: ") for line in output.lines]
    assert any(line.startswith("refused: ") and "from which this one was forked" in line for line in said)
    assert "ValueError: of a child" in said


def test_a_forked_child_calls_no_callback_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    at_script_end(called.append)
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: -1)
        script_ended(failed=True)
    assert not called
    script_ended(failed=False)
    assert not called, "what a child leaves out is not called later"
