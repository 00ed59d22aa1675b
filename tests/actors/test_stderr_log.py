"""zbmd's own log on standard error."""

from __future__ import annotations

import io
import sys

import pytest

from zbmd.actors.rank_log import StderrLogger


def test_it_prints_to_what_standard_error_is_then(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = StderrLogger()
    for _ in range(2):
        then = io.StringIO()
        monkeypatch.setattr(sys, "stderr", then)
        logger.warning("a word")
        assert then.getvalue() == "a word\n"


def test_nobody_dies_of_a_log_that_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = io.StringIO()
    gone.close()
    monkeypatch.setattr(sys, "stderr", gone)
    StderrLogger().error("nobody hears this")
