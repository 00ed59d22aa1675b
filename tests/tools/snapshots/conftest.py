"""A run whose state is held."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from zbmd.actors.snapshots.client import drop
from zbmd.training.job.overwrite import holders_of

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


@pytest.fixture
def run(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """The directory of a run, with a text beside it; nothing is held of the run afterwards."""
    text = "".join(f"line {i} of some text that is to be learnt\n" for i in range(2000))
    (launcher.directory / "text").write_text(text)
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(launcher.directory / "cookie"))
    directory = launcher.directory / "run"
    yield directory
    for holder in holders_of(directory):
        drop(holder.name)
