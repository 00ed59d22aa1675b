"""An actor system for tests of a model's actors, and captures of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from captures import Captures

from zbmd.actors.system import ActorSystem


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """One system, "here"."""
    made = ActorSystem("here")
    yield made
    await made.stop()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """Where the jobs of this test are captured."""
    return Captures(monkeypatch)
