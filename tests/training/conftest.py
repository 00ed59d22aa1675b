"""An actor system for tests of a model's actors, small jobs, and captures of jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from support.jobs.small_jobs import SmallJobs
from support.processes.captures import Captures

from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos.job_worker import Worker


@pytest.fixture
async def system() -> AsyncIterator[ActorSystem]:
    """One system, "here"."""
    made = ActorSystem("here")
    yield made
    await made.stop()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    """The directory in which the jobs of this test are captured."""
    return Captures(monkeypatch)


@pytest.fixture(scope="session")
def small_jobs() -> Iterator[SmallJobs]:
    """Runs small jobs, for as many tests as like."""
    worker = Worker()
    yield SmallJobs(worker)
    worker.close()
