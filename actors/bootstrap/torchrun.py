"""Sans-I/O: what torchrun tells its workers: `torchrun --no-python zbmd-node run`, and MASTER_ADDR.

torchrun starts one process a rank; the first of each host is the node. Its flags, and the PET_* variables
that stand for them, are settings of `zbmd-node run` itself. Of the variables that PyTorch's `env://` reads,
MASTER_ADDR, MASTER_PORT, NODE_RANK and GROUP_RANK are read where nobody says better; RANK and WORLD_SIZE
alone are not, as launchers do not agree on whether they count hosts or processes. Source:
torch/distributed/run.py and elastic/agent/server/local_elastic_agent.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from zbmd.actors.bootstrap.readings import (
    NODES_MAX,
    PROCESSES_MAX,
    STATIC_PORT,
    LauncherFacts,
    NodeRange,
    ProcessPlacement,
    Stated,
    number,
    parse_join_address,
    stated_number,
    stated_text,
)
from zbmd.actors.rank.environment import port_of_job
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import PORT_MAX, TcpAddress

RANKS_MAX = NODES_MAX * PROCESSES_MAX
WORKER = ("TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
"""All of them together mean that torchrun has started this process."""


def read_torchrun(environment: Mapping[str, str]) -> LauncherFacts | None:
    """What the agent of torchrun says to its worker; None if we are none. Raises `UserError`."""
    if not all(environment.get(name) for name in WORKER):
        return None
    run_id = stated_text(environment, "TORCHELASTIC_RUN_ID")
    node = stated_number(environment, "GROUP_RANK", most=NODES_MAX - 1)
    index = number(environment, "LOCAL_RANK", most=PROCESSES_MAX - 1)
    count = number(environment, "LOCAL_WORLD_SIZE", least=1, most=PROCESSES_MAX)
    size = number(environment, "WORLD_SIZE", least=1, most=RANKS_MAX)
    assert run_id is not None and node is not None and index is not None and count is not None
    assert size is not None
    hosts, rest = divmod(size, count)
    if rest or index >= count or node.value >= hosts:
        raise UserError(
            f"torchrun says rank {index} of {count} (LOCAL_RANK, LOCAL_WORLD_SIZE) on host {node.value} "
            f"(GROUP_RANK), and {size} ranks in all (WORLD_SIZE), which do not fit together. Give each host "
            "the same --nproc-per-node."
        )
    job = f"torchrun-{run_id.value}"
    return LauncherFacts(
        launcher="torchrun",
        nodes=Stated(value=NodeRange(least=hosts, most=hosts), source="WORLD_SIZE / LOCAL_WORLD_SIZE"),
        node=node,
        processes=None if count == 1 else Stated(value=count, source="LOCAL_WORLD_SIZE"),
        place=Stated(value=ProcessPlacement(index=index, count=count), source="LOCAL_RANK"),
        # The port is torchrun's own store's, which has it open.
        join_addresses=master(environment, port=port_of_job(job)),
        job=Stated(value=job, source="TORCHELASTIC_RUN_ID"),
    )


def read_env(environment: Mapping[str, str]) -> LauncherFacts | None:
    """MASTER_ADDR and its like, set by hand or by a platform; None if none is set. Raises `UserError`."""
    join_addresses = master(environment, port=None)
    node = None
    for name in ("NODE_RANK", "GROUP_RANK"):
        node = node or stated_number(environment, name, most=NODES_MAX - 1)
    if join_addresses is None and node is None:
        return None
    return LauncherFacts(launcher="the environment of PyTorch", node=node, join_addresses=join_addresses)


def master(environment: Mapping[str, str], *, port: int | None) -> Stated[tuple[TcpAddress, ...]] | None:
    """The first host, by MASTER_ADDR, at MASTER_PORT or at `port`. Raises `UserError`."""
    host = stated_text(environment, "MASTER_ADDR")
    if host is None:
        return None
    source = "MASTER_ADDR" if port is not None else "MASTER_ADDR and MASTER_PORT"
    if port is None:
        port = number(environment, "MASTER_PORT", least=1, most=PORT_MAX) or STATIC_PORT
    return Stated(value=(parse_join_address(host.value, "MASTER_ADDR", port=port),), source=source)
