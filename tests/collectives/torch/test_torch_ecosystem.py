"""Libraries over the backend: small real scripts come to the numbers that they come to over gloo."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

LINES = {"accelerate": 1, "lightning": 1, "transformers": 1, "parallelism": 3}
"""The number of lines of results of each `with_NAME.py` of `tests/programs/torch/libraries`."""


def run(
    name: str, backend: str, directory: Path, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a script on two ranks."""
    program = str(PROGRAMS / "torch" / "libraries" / f"with_{name}.py")
    node = (sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", "2", *options)
    command = [*node, program, backend, str(directory)]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=directory, env=environment
    )


def results(name: str, backend: str, directory: Path) -> list[str]:
    """Return the last lines of rank 0 of two, without the name of the backend."""
    done = run(name, backend, directory)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("[rank0]: ")][-LINES[name] :]
    assert len(told) == LINES[name], done.stdout
    if name != "parallelism":
        assert told[0].split()[1] == backend, told
    return [line.replace(backend, "") for line in told]


@pytest.mark.parametrize("name", LINES)
def test_a_library_has_the_numbers_of_gloo(name: str, tmp_path: Path) -> None:
    if name != "parallelism" and importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    found: list[list[str]] = []
    for backend in ("zbmd", "gloo"):
        directory = tmp_path / backend
        directory.mkdir()
        found.append(results(name, backend, directory))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["lightning", "transformers"])
def test_a_loop_that_a_library_owns_ends_with_the_name_of_the_lost_rank(name: str, tmp_path: Path) -> None:
    """It cannot repeat a step: its loop raises what any loop gets from the process group."""
    pytest.importorskip(name, reason=f"{name} is not installed")
    done = run(name, "zbmd", tmp_path, "--on-loss", "shrink", VICTIM="1")
    said = [line for line in (done.stdout + done.stderr).splitlines() if "[rank0]" in line]
    assert done.returncode, done.stdout
    assert any("DistBackendError: MembersLost: peer rank1 lost" in line for line in said), "\n".join(said)
