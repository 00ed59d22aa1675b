"""`import torch` finds the backend `zbmd` by itself, pays for nothing of it, and cannot be broken by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.tools.cli.launch import free_port

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = [pytest.mark.optional, pytest.mark.slow]

FOUND = """
import sys
import torch
import torch.distributed as dist

assert "zbmd" in dist.Backend.backend_list, dist.Backend.backend_list
ours = sorted(name for name in sys.modules if name.startswith("zbmd"))
assert ours == ["zbmd_autoload"], ours
assert dist.get_default_backend_for_device("cpu") == "gloo"
address = sys.argv[1]
dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
assert "zbmd" not in sys.modules  # a program of gloo imports nothing of it
dist.destroy_process_group()
dist.init_process_group("zbmd", store=dist.HashStore(), rank=0, world_size=1)
x = torch.arange(3.0)
dist.all_reduce(x)
assert x.tolist() == [0, 1, 2] and dist.get_backend() == "zbmd"
dist.destroy_process_group()
print("found")
"""

BROKEN = """
import sys
import torch
import torch.distributed as dist

print("torch is there", torch.ones(1).item(), "zbmd" in dist.Backend.backend_list)
"""


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )


def test_it_is_found_without_an_import() -> None:
    ended = run(FOUND, f"tcp://127.0.0.1:{free_port()}")
    assert ended.returncode == 0 and ended.stdout == "found\n", ended.stderr


def test_a_broken_installation_never_breaks_pytorch(tmp_path: Path) -> None:
    (tmp_path / "zbmd.py").write_text("raise ImportError('half of an installation')\n")
    ended = run(BROKEN, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 True\n", ended.stderr
    (tmp_path / "sitecustomize.py").write_text(
        "import zbmd_autoload\n"
        "def broken(dist):\n"
        "    raise AttributeError('another PyTorch')\n"
        "zbmd_autoload.register = broken\n"
    )
    ended = run(BROKEN, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 False\n", ended.stderr
    assert "AttributeError('another PyTorch')" in ended.stderr


def test_it_can_be_switched_off() -> None:
    ended = run(BROKEN, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 False\n", ended.stderr
    ended = run(f"import zbmd.torch\n{BROKEN}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert ended.returncode == 0 and ended.stdout == "torch is there 1.0 True\n", ended.stderr
