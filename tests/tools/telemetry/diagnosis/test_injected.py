"""Faults that are injected into real launches, and their diagnoses: a small part of the corpus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zbmd.tools.lab.faults.corpus import read_results, table
from zbmd.tools.lab.faults.kinds import GROUP, KINDS, marked_lines

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

CHEAP = ("exception", "crashed", "busy", "lock", "stopped", "skipped", "shape", "bits", "slow-data", "none")
LIMIT_S = 400.0


def test_one_of_each_cheap_kind_has_the_right_root(tmp_path: Path) -> None:
    out = tmp_path / "faults"
    command = [
        sys.executable,
        "-m",
        "zbmd.tools.lab.faults",
        "--out",
        str(out),
        "--seeds",
        "1",
        "--jobs",
        "2",
    ]
    ended = subprocess.run(
        [*command, "--only", ",".join(CHEAP)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    results = read_results(out / "results.jsonl")
    assert sorted(one.kind for one in results) == sorted(CHEAP), ended.stderr
    wrong = [one for one in results if not one.right]
    assert not wrong and ended.returncode == 0, f"{'; '.join(map(str, wrong))}\n{ended.stderr}"
    # A rank that others' report ends may be gone before it raises: nothing says then where it was.
    elsewhere = [one for one in results if one.line_right is False]
    assert len(elsewhere) <= 1, "; ".join(map(str, elsewhere))
    assert len(table(results)) == len(CHEAP) + 3


def test_a_directory_of_logs_and_what_was_printed_say_the_same(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from zbmd.tools.entry import zbmd as cli

    logs = tmp_path / "logs"
    fault = ("exception", "5", "1", "16", "word")
    ended = launcher.run("run", "-n", "2", "--on-loss", "stop", "--log-dir", str(logs), str(GROUP), *fault)
    assert ended.code == 1, ended
    printed = tmp_path / "printed.log"
    printed.write_text("\n".join([*ended.out, *ended.errors]))
    for target in (str(logs), str(printed)):
        capsys.readouterr()
        assert cli.main(["diagnose", target, "--json"]) == 1
        root = json.loads(capsys.readouterr().out)["root"]
        assert (root["cause"], root["ranks"]) == ("exception", [1]), root
        assert "word: sample 5" in root["summary"]


def test_what_is_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zbmd.tools.entry import zbmd as cli

    (tmp_path / "notes.txt").write_text("nothing of zbmd\n")
    for target in (tmp_path, tmp_path / "notes.txt", tmp_path / "absent"):
        assert cli.main(["diagnose", str(target)]) == 2
        assert "give" in capsys.readouterr().err


def test_each_kind_that_has_a_line_marks_it() -> None:
    assert len(KINDS) >= 20
    assert all(marked_lines(kind.program, kind.line) for kind in KINDS.values() if kind.line)


def test_the_guide_has_the_table_of_the_latest_corpus() -> None:
    docs = Path(__file__).parents[4] / "docs"
    latest = max((docs / "results" / "faults").glob("*.jsonl"))
    results = read_results(latest)
    guide = (docs / "GUIDE_DIAGNOSE.md").read_text()
    shown = guide.partition("<!-- faults -->\n")[2].partition("\n<!-- end of faults -->")[0]
    assert shown.splitlines() == table(results) and latest.name in guide
    assert len(results) >= 200 and sum(one.right for one in results) >= 0.95 * len(results)
    assert len({one.kind for one in results}) >= 20
