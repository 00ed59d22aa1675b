"""zbmd's own log on standard error."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from programs import PROGRAMS

from zbmd.actors.process.log import StderrLogger


@pytest.mark.parametrize("run", ["zbmd", "asyncio"])
def test_a_script_of_its_own_is_warned_and_told_no_more(run: str) -> None:
    command = [sys.executable, str(PROGRAMS / "actors/logs_twice.py"), run]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "worth a look" in done.stderr, done.stderr


def test_it_prints_to_what_standard_error_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = StderrLogger()
    for _ in range(2):
        then = io.StringIO()
        monkeypatch.setattr(sys, "stderr", then)
        logger.warning("a word")
        assert then.getvalue() == "a word\n"


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of other processes on the same terminal come before it or after it."""
    written = list[str]()
    then = io.StringIO()
    monkeypatch.setattr(then, "write", written.append)
    monkeypatch.setattr(sys, "stderr", then)
    StderrLogger().warning("a word")
    assert written == ["a word\n"]


@pytest.mark.parametrize("is_there", [True, False])
def test_nobody_dies_of_a_log_that_is_closed(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone if is_there else None)
    StderrLogger().error("nobody hears this")
