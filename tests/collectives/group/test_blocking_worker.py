"""The blocking front door: a script joins, calls operations and actors, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.processes.forked import Fork, fork

import zbmd
from zbmd.transport.errors import LocalProtocolError

PROGRAMS = Path(__file__).parents[2] / "programs"

__all__ = ["fork"]


class Double(zbmd.Contract):
    value: int


class Doubler(zbmd.Actor):
    @zbmd.on(Double)
    async def double(self, message: Double) -> Double:
        return Double(2 * message.value)


def run_ranks(program: str, ranks: int) -> list[str]:
    """Run a program of `tests/programs` under the launcher; return what its ranks print."""
    command = [sys.executable, "-m", "zbmd.tools.node.cli", "run", "-n", str(ranks), str(PROGRAMS / program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line.partition("]: ")[2] for line in done.stdout.splitlines() if line.startswith("[rank"))


@pytest.fixture(autouse=True)
def _cookie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))


def test_a_script_by_itself_is_a_world_of_one() -> None:
    with zbmd.init(arena=1 << 20) as worker:
        assert (worker.rank, worker.local_rank, worker.world_size, worker.incarnation) == (0, 0, 1, 1)
        group = worker.group()
        assert (group.rank, group.size, group.members, group.epoch) == (0, 1, (0,), 1)
        assert worker.view().ranks == (0,)
        x = zbmd.empty(4, np.float32)
        x[:] = 3
        assert group.all_reduce(x) is x and x.tolist() == [3.0] * 4
        group.barrier()
        group.close()
        with pytest.raises(zbmd.OperationAborted):
            group.barrier()


def test_a_worker_is_a_session_of_actors() -> None:
    with zbmd.init(arena=1 << 20) as worker:
        doubler = worker.spawn(Doubler, name="doubler")
        assert worker.ask(doubler, Double(21), reply=Double).value == 42
        assert worker.ask("doubler", Double(4), reply=Double).value == 8


def test_after_the_end_calls_say_so() -> None:
    worker = zbmd.init(arena=1 << 20)
    worker.close()
    worker.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        worker.group()
    assert repr(worker) == "<BlockingWorker closed>"


def test_an_error_in_the_script_leaves_the_job() -> None:
    with pytest.raises(ZeroDivisionError), zbmd.init(arena=1 << 20) as worker:
        worker.group()
        raise ZeroDivisionError


async def test_it_works_where_a_loop_runs_already() -> None:
    assert asyncio.get_running_loop().is_running()
    with zbmd.init(arena=1 << 20) as worker:
        assert worker.group().all_reduce(np.ones(2)).tolist() == [1.0, 1.0]


def test_a_forked_child_is_refused(fork: Fork) -> None:
    with zbmd.init(arena=1 << 20) as worker:

        def child() -> None:
            with pytest.raises(LocalProtocolError, match="parent process"):
                worker.group()
            worker.close()  # of the child: does nothing

        _, status = os.waitpid(fork(child), 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert worker.group().size == 1


def test_sub_groups_block_too() -> None:
    with zbmd.init(arena=1 << 20) as worker:
        group = worker.group()
        part, none = group.split(0), group.split(None)
        assert isinstance(part, zbmd.BlockingGroup) and none is None
        assert isinstance(group.subgroup([0]), zbmd.BlockingGroup)
        assert part.all_reduce(np.ones(1)).tolist() == [1.0]


def test_ranks_go_on_with_the_replacement_of_one_that_died() -> None:
    assert run_ranks("blocking_kill.py", 3) == [
        f"rank {rank} incarnation {2 if rank == 1 else 1}: {[6.0] * 5} in epoch 2" for rank in range(3)
    ]


def test_an_elastic_group_repairs_the_operation() -> None:
    assert run_ranks("blocking_elastic.py", 3) == [
        f"rank {rank}: [3.0, 1.0] from (0, 1, 2)" for rank in range(3)
    ]
