"""The work of the thread that writes checkpoints, for tests whose steps are not to overtake it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from zbmd.training.checkpoint import saving
from zbmd.training.checkpoint.writer import Begun, CheckpointWriter

LIMIT_S = 180.0
Ended = saving.Wrote | saving.Published | saving.Failed


class WriterWork:
    """Counts the ends of the work on checkpoints in this process, once the machine has taken them.

    The thread that writes yields to all others: any number of short steps may pass before it has a turn.
    """

    def __init__(self) -> None:
        self._ends = Counter[type[Ended]]()
        self._news = threading.Condition()

    def note(self, kind: type[Ended]) -> None:
        """Take one more end."""
        with self._news:
            self._ends[kind] += 1
            self._news.notify_all()

    def until(self, kind: type[Ended], count: int = 1) -> None:
        """Return once so much work has had this end. Not on a thread that the end needs: a vote does."""
        with self._news:
            ended = self._news.wait_for(lambda: self._ends[kind] >= count, LIMIT_S)
            assert ended, f"expected {count} x {kind.__name__}, found {self._ends}"


def counted(replace: Callable[[object, str, object], None] = setattr) -> WriterWork:
    """Return the work of all writers of this process from now on. replace: sets an attribute."""
    work, ended = WriterWork(), CheckpointWriter._ended

    def noted(writer: CheckpointWriter, begun: Begun, event: Ended) -> None:
        ended(writer, begun, event)
        work.note(type(event))

    replace(CheckpointWriter, "_ended", noted)
    return work


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> WriterWork:
    """Return the work of this test's writers."""
    return counted(monkeypatch.setattr)
