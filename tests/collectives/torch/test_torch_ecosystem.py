"""Libraries over the backend: small real scripts come to the numbers that they come to over gloo."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

LINES = {"accelerate": 1, "lightning": 1, "transformers": 1, "parallelism": 3}
"""The number of lines of results of each `with_NAME.py` of `tests/programs/torch`."""


def results(name: str, backend: str, directory: Path) -> list[str]:
    """Return the last lines of rank 0 of two, without the name of the backend."""
    program = str(PROGRAMS / "torch" / f"with_{name}.py")
    command = [
        sys.executable,
        "-m",
        "zbmd.tools.node.cli",
        "run",
        "-n",
        "2",
        program,
        backend,
        str(directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
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
