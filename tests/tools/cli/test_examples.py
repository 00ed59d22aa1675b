"""The examples run under `zbmd-node run`, as their first lines say, and are as short as promised."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LINES_MAX = 40
ARENA = "64MiB"
LONGER_MAX = {
    "upgrade.py": 70,
    "own_model.py": 60,
    "torch_resilient.py": 60,
    "torch_fsdp2_resilient.py": 60,
    "torch_trainer.py": 60,
    "torch_lightning.py": 60,
}
"""One has two versions of an actor, the others a model with its data and optimizer."""

SAYS = {
    "join.py": ["rank 0 of 3", "rank 2 of 3", "with [0, 1, 2]"],
    "actors.py": ["the counter said 6"],
    "operators.py": ["180, by 5 incarnations of one operator, after 4 failures"],
    "upgrade.py": ["Upgraded(actors=1", "rank0/counter Add: ValueError: this version is wrong", "version 2"],
    "blocking.py": ["ranks sum to 3, ranks + 1 to 6"],
    "all_reduce.py": ["ranks sum to 3, ranks + 1 to 6"],
    "own_model.py": ['"steps":600,"ranks":3'],
    "peer_death.py": ["rank 1 (incarnation 2) finished 5 rounds", "rank 0 (incarnation 1) finished 5 rounds"],
}
OF_TORCH = {
    "torch_ddp.py": ["rank 0 of 3: loss", "rank 1 of 3: loss", "rank 2 of 3: loss"],
    "torch_fsdp2_resilient.py": ["the run has ended after 110 steps: loss "],
    "torch_resilient.py": ["step 800: loss", "the run has ended: loss "],
    "torch_trainer.py": ["the run has ended after 30 steps"],
    "torch_lightning.py": ["the run has ended after 24 steps"],
}
NEEDS = {"torch_trainer.py": ("transformers", "accelerate"), "torch_lightning.py": ("lightning",)}
"""Libraries beside PyTorch."""


def test_every_example_is_covered_and_short() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAYS, *OF_TORCH}
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= LONGER_MAX.get(path.name, LINES_MAX), path


@pytest.mark.optional
@pytest.mark.parametrize("name", sorted(OF_TORCH))
def test_an_example_of_torch_runs(name: str) -> None:
    for library in ("torch", *NEEDS.get(name, ())):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    command = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", "3", str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in OF_TORCH[name]:
        assert words in done.stdout, done.stdout


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs(launcher: Launcher, name: str) -> None:
    ended = launcher.run("run", "-n", "3", str(EXAMPLES / name), "run", ZBMD_ARENA=ARENA)
    assert ended.code == 0, ended
    out = "\n".join(ended.out)
    for words in SAYS[name]:
        assert words in out, out
    if name == "upgrade.py":
        counted, _, asked = out.rpartition(" counted ")[2].strip().partition(" of ")
        assert counted == asked and int(asked) > 0, "no message is lost, none is handled twice"
