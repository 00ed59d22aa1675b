"""The machines of an elastic group are recorded and replayed: a simulated group's golden log of repairs, and
a real job with kills, whose tagged messages are, too.

The golden log was written once, and must be readable and replayable for ever:

    python tests/collectives/repair/test_repair_replay.py > tests/collectives/repair/golden_repair_1.txt
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from pathlib import Path

import pytest
from support.jobs.elastic_job import ElasticJob
from support.machines.state_followers import follow_all

from zbmd.actors.view import Outcome
from zbmd.collectives.repair import events as rm
from zbmd.collectives.repair.machine import REPAIR, RepairMachine, RepairState, repair_config
from zbmd.collectives.scenarios import repair as repair_scenario
from zbmd.collectives.scenarios.hosted_job import JobOptions, draw_kills
from zbmd.tools.entry import zbmd as cli
from zbmd.transport import capture
from zbmd.transport.clock.hlc import HybridClock

GOLDEN = Path(__file__).parent / "golden_repair_1.txt"
GOLDEN_SEED, OTHER_SEED = 17, 51
OPTIONS = JobOptions(world_size=3, steps=4, kills=3)


def record(directory: Path, seed: int, patch: pytest.MonkeyPatch) -> int:
    """Record the machines of all lives of a simulated group with kills; how many there were."""
    kills = draw_kills(
        random.Random(seed),
        [f"rank{rank}" for rank in range(OPTIONS.world_size)],
        OPTIONS.kills,
        lambda: repair_scenario.build(seed, OPTIONS)[0],
    )
    origin = capture.Origin(process="rank0", incarnation=1)
    log = capture.LogRecorder(directory, origin, capture.Clocks(hybrid=HybridClock()))
    lives: list[int] = []

    class Recorded(RepairMachine):
        def __init__(self, *, rank: int) -> None:
            super().__init__(rank=rank)
            lives.append(rank)
            twin = RepairMachine(rank=rank)
            self._twin = capture.Tap(log, REPAIR, f"life {len(lives)}", twin, repair_config(twin))

        def handle(self, event: rm.RepairEvent, *, now_ns: int) -> list[rm.RepairAction]:
            actions = super().handle(event, now_ns=now_ns)
            assert self._twin.handle(event, now_ns=now_ns) == actions
            return actions

    patch.setattr(repair_scenario, "RepairMachine", Recorded)
    simulation, world = repair_scenario.build(seed, OPTIONS)
    for fault in kills:
        simulation.apply(fault)
    simulation.run()
    log.close()
    assert world.ways, "nothing was repaired"
    return len(lives)


def _count_no_operation(self: RepairMachine) -> None:
    self.state, self.phase, self.call = RepairState.IDLE, rm.Phase.IDLE, None


def test_the_golden_log_replays_identical_from_any_state_and_a_mutant_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    capture.text_to_capture(GOLDEN.read_text(), tmp_path)
    found = list(capture.replay_log(tmp_path, secrets={}))
    assert len(found) >= 4
    assert all(isinstance(v, capture.Identical) and not v.code_changed for v in found), found
    (log,) = capture.open_log(tmp_path).processes
    assert follow_all(log, random.Random(seed)) == {"repair"}
    monkeypatch.setattr(RepairMachine, "_over", _count_no_operation)
    assert any(isinstance(v, capture.Divergence) for v in capture.replay_log(tmp_path, secrets={}))


def test_another_simulated_group_replays_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lives = record(tmp_path, OTHER_SEED, monkeypatch)
    found = list(capture.replay_log(tmp_path, secrets={}))
    assert len(found) == lives
    assert all(isinstance(verdict, capture.Identical) for verdict in found), found


async def test_a_real_group_with_kills_is_replayed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    monkeypatch.setenv("ZBMD_CAPTURE", str(tmp_path / "run.zlog"))
    job = ElasticJob(tmp_path, "sum_and_tags.py", [None, (1, 1, 4), (2, 2, 2), None], {"inputs": "preserve"})
    result = await job.run()
    assert result.outcome is Outcome.SUCCEEDED, (result, job.lines)
    assert job.died_in(2) and job.died_in(3)
    assert all(found.get("value", [False])[0] for by in job.told.values() for found in by.values()), job.told
    assert {job.told[2][rank]["value"][1][0] for rank in (0, 2)} == {1}
    capsys.readouterr()
    assert cli.main(["replay", str(tmp_path / "run.zlog"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for kind in ("repair", "elastic-tags"):
        verdicts = [v for process in found["processes"] for v in process["verdicts"] if v["kind"] == kind]
        assert {v["verdict"] for v in verdicts} == {"identical"}, verdicts
        # Of who was killed the log may lack its last moments.
        assert {v["process"] for v in verdicts} >= {"rank0#1", "rank1#2", "rank2#2"}, verdicts
    of_group = ["--show", "--rank", "0", "--group", "elastic0"]
    assert cli.main(["replay", str(tmp_path / "run.zlog"), *of_group]) == 0
    shown = capsys.readouterr().out
    assert "elastic0" in shown and "Rerun(" in shown and "Exchanged(" in shown, shown
    assert "elastic0.tags" in shown and "MemberLost(" in shown and "FailReceive(" in shown, shown
    assert "elastic-views" not in shown


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patching:
        record(Path(made), GOLDEN_SEED, patching)
        sys.stdout.write(capture.capture_to_text(Path(made)))
