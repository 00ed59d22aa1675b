"""Both type checkers must see zbmd's types through the links in src/zbmd: planted errors prove it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLANTED = ROOT / "tests" / "typing" / "planted_error.py"


def planted_lines() -> set[int]:
    lines = PLANTED.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if "# planted:" in line}


def test_mypy_reports_exactly_the_planted_errors() -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(PLANTED)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = re.findall(r"planted_error\.py:(\d+): error: .*\[(\S+)\]", run.stdout)
    assert run.returncode == 1, run.stdout + run.stderr
    assert {(int(line), rule) for line, rule in found} == {(n, "assignment") for n in planted_lines()}


def test_pyright_reports_exactly_the_planted_errors(tmp_path: Path) -> None:
    # The project's own settings, but for the exclusion that keeps the planted file out of ordinary runs.
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    settings |= {"venvPath": str(ROOT), "extraPaths": [str(ROOT / "src")], "exclude": []}
    config = tmp_path / "pyrightconfig.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--project", str(config)]
    command.append(str(PLANTED))
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(run.stdout)["generalDiagnostics"]
    found = {(entry["range"]["start"]["line"] + 1, entry.get("rule")) for entry in report}
    assert run.returncode == 1, run.stdout + run.stderr
    assert found == {(n, "reportAssignmentType") for n in planted_lines()}
