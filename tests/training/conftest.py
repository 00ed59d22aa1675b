"""An actor system for tests of a model's actors, small jobs, and captures of jobs."""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterator

import pytest
from support.jobs.small_jobs import SmallJobs
from support.jobs.writer_work import work
from support.processes.captures import Captures

from zbmd.actors.system import ActorSystem
from zbmd.tools.chaos.job_worker import Worker

__all__ = ["work"]


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
def object_store_runtime(request: pytest.FixtureRequest) -> None:
    """Start the runtime of obstore: threads and descriptors that last as long as the process."""
    watch = request.config.pluginmanager.get_plugin("zbmd-watch")
    assert watch is not None
    with watch.lasting():
        memory = pytest.importorskip("obstore.store", reason="obstore is not installed").MemoryStore()
        importlib.import_module("obstore").put(memory, "started", b"")


@pytest.fixture(scope="session")
def small_jobs() -> Iterator[SmallJobs]:
    """Runs small jobs, for as many tests as like."""
    worker = Worker()
    yield SmallJobs(worker)
    worker.close()
