"""An actor system for tests of a model's actors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from zbmd.actors.system import ActorSystem


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """One system, "here"."""
    made = ActorSystem("here")
    yield made
    await made.stop()
