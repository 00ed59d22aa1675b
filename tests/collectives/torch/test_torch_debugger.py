"""PyTorch's own breakpoint in a rank, on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.processes.terminal import on_terminal

pytest.importorskip("torch")

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


def test_torchs_breakpoint_stops_one_rank_and_the_others_wait(launcher: Launcher) -> None:
    program = str(PROGRAMS / "torch" / "backend" / "loading" / "stops.py")
    with on_terminal(launcher, "run", "-n", "2", program) as terminal:
        terminal.until("(Pdb) ")
        terminal.type("p 40 + 2\n")
        terminal.until("42\r\n")
        assert "went on" not in terminal.text
        terminal.type("c\n")
        assert terminal.end() == 0, terminal.text
    assert all(f"rank {rank} went on\r\n" in terminal.text for rank in (0, 1))
