"""The sweep of kills: which cases it has, what its ledger keeps, and a short run of it in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.tools.chaos.sweep import (
    CaseVerdict,
    Ledger,
    Setting,
    every_setting,
    in_order,
    main,
    name_of,
    sampled_pairs,
    second_kills,
    single_kills,
    spread,
    table,
)
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError


def finding(fault: str, verdict: str = "same bits") -> CaseVerdict:
    return CaseVerdict(setting="pp=2 n=2", fault=fault, verdict=verdict, reached=True, took_s=1.0)  # type: ignore[arg-type]


def test_every_pass_inside_collectives_is_a_case_and_any_part_of_them_is_spread() -> None:
    settings = [str(one) for one in every_setting()]
    assert settings[:2] == ["replicas n=1", "replicas n=3"] and "zero=3 dp=2,fsdp=2 n=4" in settings
    assert sorted(spread(100)) == list(range(1, 101))
    tried = sorted(spread(100)[:16])
    assert max(b - a for a, b in zip([0, *tried], [*tried, 100], strict=True)) <= 16
    first, later, inside = single_kills([{"job.begin": 5, "collective.point": 3}, {"job.begin": 1}])
    assert first == ["rank0:job.begin:1", "rank1:job.begin:1"]
    assert later == ["rank0:job.begin:2", "rank0:job.begin:5"]
    assert set(inside) == {f"rank0:collective.point:{number}" for number in (1, 2, 3)}


def test_cases_of_all_settings_take_turns_and_can_be_parsed() -> None:
    settings = every_setting()
    cases = list(in_order([(one, second_kills(one)) for one in settings]))
    assert {setting for setting, _ in cases[: len(settings)]} == set(settings)
    assert len(set(cases)) == len(cases)
    for setting, fault in cases:
        killed = {int(one.process.removeprefix("rank")) for one in faults.parse(fault)}
        assert (
            killed < set(range(setting.ranks))
            or setting.ranks == 1
            or name_of(fault).startswith(("job.saved", "job.parted"))
        )


def test_pairs_of_kills_are_drawn_from_what_ranks_pass() -> None:
    passes = [{"job.begin": 5, "collective.point": 30}, {"job.begin": 5, "mirror.copy": 4}]
    drawn = sampled_pairs(passes, 60, "a seed")
    assert drawn == sampled_pairs(passes, 60, "a seed") != sampled_pairs(passes, 60, "another")
    assert len(set(drawn)) == 60
    for fault in drawn:
        first, second = faults.parse(fault)
        assert (second.incarnation == 2) == (first.process == second.process)
        for one in (first, second):
            assert one.count <= passes[int(one.process[-1])][one.point]
    names = {name_of(fault).partition(" ")[2] for fault in drawn}
    assert names == {"in a recovery", "after another kill"}


def test_a_ledger_goes_on_from_where_a_killed_sweep_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.begin("pp=2 n=2", "a" * 64)
    ledger.add(finding("rank0:job.begin:1", "other bits"))
    ledger.add(finding("rank1:job.begin:1"))
    with path.open("ab") as file:
        file.write(b'{"type":"fou')  # the kill cut it off
    again = Ledger(path)
    assert not again.is_done("pp=2 n=2", "rank0:job.begin:1") and again.wrong
    assert again.is_done("pp=2 n=2", "rank1:job.begin:1")
    again.add(finding("rank0:job.begin:1"))
    last = Ledger(path)
    assert not last.wrong and len(last.found) == 2
    assert "| pp=2 n=2 | `job.begin` | 2 | 2 | 3 | 0 |" in table(
        last.found.values(), [("pp=2 n=2", f"rank{rank}:job.begin:1") for rank in range(3)]
    )
    with pytest.raises(UserError, match="another version"):
        last.begin("pp=2 n=2", "b" * 64)
    path.write_bytes(b"what\n")
    with pytest.raises(UserError, match="damaged"):
        Ledger(path)


def test_a_setting_that_is_no_job_is_refused() -> None:
    with pytest.raises(UserError, match="say the size"):
        Setting.of(mesh="pp=-1")


def test_a_sweep_runs_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    wanted = ["--mesh", "pp=2", "--only", "rank0:job.saved:1", "--ledger", str(tmp_path / "ledger")]
    assert main(wanted) == 0
    assert "rank0:job.saved:1: same bits, " in capfd.readouterr().out
    found = Ledger(tmp_path / "ledger").found
    assert [one.reached for one in found.values()] == [True]
    assert main([*wanted, "--table"]) == 0
    assert "| pp=2 n=2 | `job.saved` | 1 | 1 | 0 | 0 |" in capfd.readouterr().out
