"""The threads that the ranks of `zbmd-node run` compute with, and the line that states them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS
from support.cluster.etcd_server import free_ports

from zbmd.transport.host.threads import VARIABLES
from zbmd.transport.host.topology.cpus import usable_cpus

if TYPE_CHECKING:
    from support.processes.launcher import Ended, Launcher

SHOW = str(PROGRAMS / "launched" / "show_threads.py")


def show(launcher: Launcher, *options: str, before: tuple[str, ...] = (), **variables: str) -> Ended:
    """Run a script that shows what a rank has, as a user would who has set `variables` alone."""
    unset = [word for name in VARIABLES for word in ("-u", name)]
    given = [f"{name}={text}" for name, text in variables.items()]
    ended = launcher.run("run", *options, SHOW, *VARIABLES, before=("env", *unset, *given, *before))
    assert ended.code == 0, ended
    return ended


def test_a_single_rank_has_all_cores(launcher: Launcher) -> None:
    ended = show(launcher, "-n", "1")
    cores = usable_cpus()
    assert ended.out == [f"[rank0]: {' '.join([str(cores)] * len(VARIABLES))}", f"[rank0]: tasks {cores}"]
    assert ended.errors[0].startswith(f"zbmd-node: 1 rank with {cores} thread")
    assert ended.errors[0].endswith("OMP_NUM_THREADS sets another number")


def test_ranks_share_the_cores_that_affinity_leaves(launcher: Launcher) -> None:
    ended = show(launcher, "-n", "2", before=("taskset", "-c", "0"))
    assert sorted(set(ended.out)) == [
        *(f"[rank{rank}]: {text}" for rank in (0, 1) for text in (" ".join("1" * len(VARIABLES)), "tasks 1"))
    ]
    assert ended.errors == [
        "zbmd-node: 2 ranks with 1 thread each: they share 1 core; OMP_NUM_THREADS sets another number"
    ]


@pytest.mark.parametrize("several", [False, True], ids=["one host", "as several"])
def test_what_the_user_sets_for_one_library_is_had_by_all(launcher: Launcher, several: bool) -> None:
    options = ("--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}") if several else ()
    ended = show(launcher, *options, "-n", "2", MKL_NUM_THREADS="3")
    three = " ".join("3" * len(VARIABLES))
    assert sorted(ended.out) == [f"[rank{rank}]: {text}" for rank in (0, 1) for text in (three, "tasks 3")]
    assert "zbmd-node: 2 ranks with 3 threads each: MKL_NUM_THREADS is 3" in ended.errors
