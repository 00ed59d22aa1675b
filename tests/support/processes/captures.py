"""Captured runs that are played again."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE
from zbmd.tools.replay.players import secrets_for
from zbmd.tools.replay.run import open_logs, replay_capture
from zbmd.transport.capture import Filter, Identical


class Captures:
    """Jobs that are started behind `into` are captured there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def into(self, directory: Path) -> Path:
        self._patch.setenv(CAPTURE_VARIABLE, str(directory))
        return directory

    def played(self, directory: Path) -> tuple[int, set[str]]:
        """What `zbmd replay` ends with, and the kinds of which all machines answered as they did."""
        logs, _ = open_logs(directory, [])
        replay = replay_capture(directory, logs, Filter(), secrets=secrets_for(None))
        verdicts = [one for process in replay.processes for one in process.verdicts]
        others = {one.kind for one in verdicts if not isinstance(one.verdict, Identical)}
        return replay.exit_code, {one.kind for one in verdicts} - others
