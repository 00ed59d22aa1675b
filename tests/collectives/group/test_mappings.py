"""The memory of a dead rank is unmapped when its group is closed, without the garbage collector."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from support.processes.kept_lines import Lines
from support.processes.mapped_segments import mapped_segments
from support.processes.one_killed import MODULES

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.cluster.jobs.reports import HostEvent, RankReport
from zbmd.actors.view import Outcome

PROGRAM = Path(__file__).parents[2] / "programs/collectives/mapped_after_loss.py"
ONCE = {"0": 1, "1": 1, "2": 1, "1023": 1}
EPOCH_LAST = 3
"""After two losses."""


@pytest.mark.parametrize("surface", ["plain", "early", "elastic"])
async def test_survivors_unmap_the_dead(
    surface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    output, reports = Lines(), list[dict[str, Any]]()
    in_host: list[dict[str, int]] = []

    async def observe(event: HostEvent) -> None:
        if isinstance(event, RankReport):
            reports.append(event.payload)
            in_host.append(mapped_segments())

    config = HostConfig(
        target=str(PROGRAM), arguments=(surface,), world_size=3, max_restarts=2, preload=MODULES
    )
    gc.collect()
    before = mapped_segments()  # by what other tests have left in this process
    gc.disable()
    try:
        result = await Host(config, output=output, observer=observe).run()
    finally:
        gc.enable()
    assert result.outcome is Outcome.SUCCEEDED, output.lines
    after = {(each["when"], each["rank"]): each["maps"] for each in reports}
    assert {each["descriptors"] for each in reports} == {1}, "a descriptor beside that of the own segment"
    if surface == "plain":
        held = ONCE | {"2": 2}  # by the view that the rank has kept
        for rank in (0, 1):
            assert after.pop(("epoch 2", rank)) == held
            assert after.pop((f"epoch {EPOCH_LAST}", rank)) == held
            assert after.pop(("view gone", rank)) == ONCE
        assert not after
    else:
        when = "end" if surface == "early" else f"epoch {EPOCH_LAST}"
        assert after == {(when, rank): ONCE for rank in (0, 1, 2)}
    found = {slot: count - before.get(slot, 0) for slot, count in in_host[-1].items()}
    assert found == ONCE, "the host keeps the memory of a dead rank"
