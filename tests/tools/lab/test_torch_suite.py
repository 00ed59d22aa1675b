"""`tools.lab.torch_suite`: its verdicts, its file of results, and two of torch's tests on real ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from zbmd.tools.lab.torch_suite.__main__ import Known, passing_on_gloo_alone, read_results, summary
from zbmd.tools.lab.torch_suite.cases import AsGloo
from zbmd.tools.lab.torch_suite.jobs import Plan, RankResult, Result, verdict_of
from zbmd.transport.errors import UserError

PLAN = Plan(backend="zbmd", tests=("test_a",), ranks=2, folder="")
PASSED, SKIPPED = RankResult(verdict="passed"), RankResult(verdict="skipped", detail="no GPU")
FAILED = RankResult(verdict="failed", detail="assert")


@pytest.mark.parametrize(
    ("found", "verdict", "detail"),
    [
        ([PASSED, PASSED], "passed", ""),
        ([SKIPPED, PASSED], "skipped", "no GPU"),
        ([PASSED, FAILED], "failed", "assert"),
        ([FAILED], "failed", "assert"),
        ([PASSED], "failed", "a rank ended"),
        ([], "failed", "a rank ended"),
    ],
)
def test_a_test_passes_if_it_does_on_all_ranks(found: list[RankResult], verdict: str, detail: str) -> None:
    result = verdict_of(PLAN, "test_a", found, "a rank ended")
    assert (result.verdict, result.detail) == (verdict, detail)


def test_a_name_as_gloo_equals_its_own_and_gloos() -> None:
    name = AsGloo("zbmd")
    assert name == "gloo" and name == "zbmd" and name in {"gloo"} and name != "nccl"
    assert str.lower(name) == "zbmd"


def known(**verdicts: str) -> Known:
    """Results of a test of each name: of gloo, then of zbmd."""
    rows = [
        Result(backend=backend, test=test, verdict=verdict)  # type: ignore[arg-type]
        for test, both in verdicts.items()
        for backend, verdict in zip(("gloo", "zbmd"), both.split(), strict=True)
    ]
    return {(row.backend, row.test): row for row in rows}


def test_what_passes_on_gloo_alone_is_found() -> None:
    found = known(
        a="passed passed", b="passed failed", c="failed passed", d="passed skipped", e="skipped skipped"
    )
    assert passing_on_gloo_alone(found, ["a", "b", "c", "d", "e", "not run"]) == ["b", "d"]
    assert "gloo: 3 passed, 1 failed, 1 skipped" in summary(found, [*"abcde"])


def test_results_are_read_again_and_other_files_refused(tmp_path: Path) -> None:
    path, rows = tmp_path / "results.jsonl", known(a="passed failed")
    assert read_results(path) == {}
    path.write_bytes(b"\n".join(msgspec.json.encode(row) for row in rows.values()) + b"\n")
    assert read_results(path) == rows
    path.write_text("else\n")
    with pytest.raises(UserError, match="--results"):
        read_results(path)


@pytest.mark.optional
def test_torchs_tests_run_on_ranks_of_both_backends(tmp_path: Path) -> None:
    for name in ("torch", "expecttest"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    results, test = tmp_path / "results.jsonl", "test_all_gather_object_default_pg"
    command = [sys.executable, "-m", "zbmd.tools.lab.torch_suite", "--only", test, "--results", str(results)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"gloo 1/1  {test}: passed" in output and f"zbmd 1/1  {test}: passed" in output
    found = {key: row.verdict for key, row in read_results(results).items()}
    assert found == {("gloo", test): "passed", ("zbmd", test): "passed"}
