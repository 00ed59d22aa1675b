"""The commands that the README promises, as far as they can be held without running them whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # A make above this one would hand down its own flags and variables.
    hidden = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "PYTEST_ARGS", "VERIFY", "KILL_SEED"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        ["make", *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def fresh_clone(tmp_path: Path) -> Path:
    """The parts of a checkout that set-up reads before it installs anything, with no `.venv`."""
    (tmp_path / "tools" / "dev").mkdir(parents=True)
    for path in ("Makefile", "pyproject.toml", "setup.py", "tools/dev/preflight.py"):
        (tmp_path / path).write_bytes((ROOT / path).read_bytes())
    return tmp_path


def test_ci_runs_the_test_command_of_the_readme() -> None:
    blocks = re.findall(
        r"^```(?:sh|console)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    promised = {line.split("#")[0].strip() for block in blocks for line in block.splitlines()}
    assert {"make demo", "make test"} <= promised
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("variables", "flags"),
    [
        ((), ""),
        (("VERIFY=1",), "--verify"),
        (("VERIFY=0",), ""),
        (("KILL_SEED=0",), "--kill-seed 0"),
        (("VERIFY=1", "KILL_SEED=7", "DEMO_ARGS=--quick"), "--verify --kill-seed 7 --quick"),
    ],
)
def test_demo_hands_its_variables_on(variables: tuple[str, ...], flags: str) -> None:
    plan = make("--dry-run", "demo", *variables).stdout.splitlines()
    assert plan[-1].split() == [".venv/bin/zbmd", "demo", *flags.split()]


def test_set_up_leaves_standard_output_to_the_command() -> None:
    plan = make("--dry-run", "--always-make", "demo").stdout.splitlines()
    assert len(plan) > 5
    assert not [line for line in plan[:-1] if not (line.endswith(">&2") or line.startswith("touch "))]


def test_a_python_that_is_too_old_is_named(fresh_clone: Path) -> None:
    old = fresh_clone / "python3.10"
    lie = "import runpy, sys; sys.version_info = (3, 10, 9); runpy.run_path(sys.argv[1], run_name='__main__')"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{lie}" "$@"\n')
    old.chmod(0o755)
    run = make("test", f"PYTHON={old}", cwd=fresh_clone)
    assert run.returncode != 0
    assert "needs Python 3.11 or newer" in run.stderr
    assert "3.10.9" in run.stderr
    assert not run.stdout
    assert not (fresh_clone / ".venv").exists()


def test_a_missing_compiler_is_named(fresh_clone: Path) -> None:
    run = make("demo", f"PYTHON={sys.executable}", "CC=no-such-compiler", cwd=fresh_clone)
    assert run.returncode != 0
    assert "no C compiler (no-such-compiler)" in run.stderr
    assert "apt-get install build-essential" in run.stderr
    assert not (fresh_clone / ".venv").exists()
