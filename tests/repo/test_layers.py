"""The layer contract sees through the links in src/zbmd: a planted upward import breaks it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.tools.dev import tidy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("planted", "broken"),
    [("import zbmd.transport.errors", 0), ("import zbmd.tools.dev.tidy", 1)],
    ids=["downwards", "upwards"],
)
def test_import_linter_reports_an_upward_import(tmp_path: Path, planted: str, broken: int) -> None:
    for path in tidy.repository_files(ROOT):
        if path.split("/", 1)[0] in {*tidy.LAYERS, "src", "pyproject.toml"}:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, tmp_path / path, follow_symlinks=False)
    (tmp_path / "transport" / "clock" / "planted.py").write_text(f"{planted}\n")
    run = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    contracts = (ROOT / "pyproject.toml").read_text().count("[[tool.importlinter.contracts]]")
    assert f"{contracts - broken} kept, {broken} broken" in run.stdout, run.stdout + run.stderr
    assert f"a layer imports only the layers below it {'BROKEN' if broken else 'KEPT'}" in run.stdout
    assert run.returncode == broken
