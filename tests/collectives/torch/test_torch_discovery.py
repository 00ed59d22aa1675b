"""`import torch` finds the backend `zbmd` by itself, pays for nothing of it, and cannot be broken by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS

from zbmd.transport.tcp.sockets import free_port

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.optional, pytest.mark.slow]

LOADING = PROGRAMS / "torch" / "backend" / "loading"
FOUND, UNBROKEN = (str(LOADING / f"{name}.py") for name in ("found", "unbroken"))


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )


def test_it_is_found_without_an_import() -> None:
    ended = run(FOUND, f"tcp://127.0.0.1:{free_port()}")
    assert ended.returncode == 0 and ended.stdout == "found\n", ended.stderr


def test_a_broken_installation_never_breaks_pytorch(tmp_path: Path) -> None:
    (tmp_path / "zbmd.py").write_text("raise ImportError('half of an installation')\n")
    ended = run(UNBROKEN, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 True\n", ended.stderr
    (tmp_path / "sitecustomize.py").write_text(
        "import zbmd_autoload\n"
        "def broken(dist):\n"
        "    raise AttributeError('another PyTorch')\n"
        "zbmd_autoload.register = broken\n"
    )
    ended = run(UNBROKEN, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 False\n", ended.stderr
    assert "AttributeError('another PyTorch')" in ended.stderr


def test_it_can_be_switched_off() -> None:
    ended = run(UNBROKEN, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 False\n", ended.stderr
    ended = run(UNBROKEN, "zbmd.torch", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 True\n", ended.stderr
