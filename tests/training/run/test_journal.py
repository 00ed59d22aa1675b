"""The writer's record is made beside the next step, and before anything that comes later is handled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from zbmd.collectives.commit.events import Commit
from zbmd.training.autograd.parameter_layout import ParameterLayout
from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.optim.elementwise import ARRAYS
from zbmd.training.run.journal import Journal, Report
from zbmd.training.run.ledger import LOG_FORMAT, LogHeader, VotePart, read_log
from zbmd.training.step.two_slot_store import Store, own_memory
from zbmd.transport.errors import UserError

HEADER = LogHeader(format=LOG_FORMAT, run_id="run", base_version=0, plan="{}", seed=1)
PARTS = (msgspec.msgpack.encode(VotePart({0: (1, 2)}, {0: 2.5}, 1.0)),)
FIRST = Commit(epoch=1, version=1, digest=bytes(16), slot=0, parts=PARTS)
SECOND = replace(FIRST, version=2, slot=1)
MEMBERS = (0, 1)
MODEL = GPT(GPTConfig())
SLOT = Store(ParameterLayout.of({"w": (2, 2)}), own_memory).current


class Run:
    """The journals of a run's ranks, and what they have told."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.told: list[Report] = []

    def journal(self, rank: int, header: LogHeader = HEADER) -> Journal:
        return Journal(
            self.directory,
            header,
            MODEL,
            ARRAYS,
            rank=rank,
            report=self.told.append,
            checkpoint_every=0,
        )

    def versions(self) -> list[int]:
        return [record.version for record in read_log(self.directory / "commits.zlog")[1]]


@pytest.fixture
def a_run(tmp_path: Path) -> Run:
    return Run(tmp_path)


async def test_a_record_is_there_before_what_comes_later_is_handled(a_run: Run) -> None:
    journal = a_run.journal(0)
    await journal.epoch_installed(1, MEMBERS, whole=False)
    await journal.committed(FIRST, MEMBERS, SLOT)
    later: asyncio.Queue[list[int]] = asyncio.Queue()
    asyncio.get_running_loop().call_soon(lambda: later.put_nowait(a_run.versions()))
    assert await later.get() == [1]
    assert [told["version"] for told in a_run.told] == [1]
    await journal.committed(SECOND, MEMBERS, SLOT)
    await journal.settle()
    assert a_run.versions() == [1, 2]


async def test_a_new_epoch_and_the_end_wait_for_it(a_run: Run) -> None:
    journal = a_run.journal(0)
    await journal.epoch_installed(1, MEMBERS, whole=False)
    await journal.committed(FIRST, MEMBERS, SLOT)
    await journal.epoch_installed(2, (0,), whole=False)
    assert a_run.versions() == [1]
    await journal.settle()


async def test_who_outlives_the_writer_writes_its_record(a_run: Run) -> None:
    journal = a_run.journal(1)
    await journal.epoch_installed(1, MEMBERS, whole=False)
    await journal.committed(FIRST, MEMBERS, SLOT)
    assert not (a_run.directory / "commits.zlog").exists() and not a_run.told
    await journal.epoch_installed(2, (1,), whole=False)
    assert a_run.versions() == [1]
    await journal.settle()


async def test_what_the_log_refuses_ends_the_run_at_the_next_commit(a_run: Run) -> None:
    first = a_run.journal(0)
    await first.epoch_installed(1, MEMBERS, whole=False)
    await first.committed(FIRST, MEMBERS, SLOT)
    await first.settle()
    other = a_run.journal(0, msgspec.structs.replace(HEADER, run_id="another"))
    await other.epoch_installed(1, MEMBERS, whole=False)
    await other.committed(FIRST, MEMBERS, SLOT)
    with pytest.raises(UserError, match="belongs to another run"):
        await other.committed(SECOND, MEMBERS, SLOT)
    await other.settle()
    assert a_run.versions() == [1]
