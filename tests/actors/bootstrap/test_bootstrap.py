"""A node finds its cluster: by each launcher's environment, and by all of them together."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.bootstrap.environments import (
    HYDRA,
    OPEN_MPI,
    LauncherFacts,
    Pod,
    Stated,
    parse_join_address,
    parse_node_range,
    parse_tasks_per_node,
)
from zbmd.actors.bootstrap.merge import Bootstrap, Role, bootstrap_of
from zbmd.actors.rank.environment import port_of_job
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress

NOTHING = LauncherFacts(launcher="zbmd-node run")

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[08-11]",
    "SLURM_JOB_NODELIST": "gpu[08-11]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
MPI: dict[str, str] = dict(zip(OPEN_MPI, ("2", "4", "0", "2"), strict=True))
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "run7",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
    "RANK": "8",
    "WORLD_SIZE": "16",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
STATEFUL_SET = {"ZBMD_SERVICE": "zbmd", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
POD = Pod(host="trainer-2", namespace="research")


def flags(
    nodes: str | None = None,
    node: int | None = None,
    processes: int | None = None,
    join_address: str | None = None,
) -> LauncherFacts:
    """The user's own settings."""
    return LauncherFacts(
        launcher="zbmd-node run",
        nodes=None if nodes is None else Stated(value=parse_node_range(nodes, "--nnodes"), source="--nnodes"),
        node=None if node is None else Stated(value=node, source="--node-rank"),
        processes=None if processes is None else Stated(value=processes, source="--nproc-per-node"),
        join_addresses=None
        if join_address is None
        else Stated(
            value=(parse_join_address(join_address, "--rdzv-endpoint", port=29400),), source="--rdzv-endpoint"
        ),
    )


def join_addresses(found: Bootstrap) -> list[str]:
    return [str(join_address) for join_address in found.join_addresses]


def test_nothing_said_is_a_host_alone() -> None:
    found = bootstrap_of({}, NOTHING)
    assert (found.role, str(found.nodes), found.processes, found.join_addresses) == (
        Role.ALONE,
        "1",
        None,
        (),
    )
    assert found.explain() == [
        "started by: nobody",
        "nodes  1      nobody says that there are more",
        "role   alone  it needs no cluster",
    ]


# --- torchrun's flags and environment


def test_static_rendezvous_goes_by_the_node_number() -> None:
    first = bootstrap_of({}, flags("2", 0, 4, "node0:29500"))
    second = bootstrap_of({}, flags("2", 1, 4, "node0:29500"))
    assert (first.role, first.port, join_addresses(first)) == (Role.FOUND, 29500, ["node0:29500"])
    assert (second.role, second.port, join_addresses(second)) == (Role.JOIN, 0, ["node0:29500"])
    assert second.processes == 4


def test_without_a_number_the_holder_of_the_address_founds() -> None:
    found = bootstrap_of({}, flags("1:4", join_address="node0"))
    assert (found.role, found.node, str(found.nodes)) == (Role.HOLDER, None, "1:4")
    assert (join_addresses(found), found.port) == (["node0:29400"], 29400)


def test_the_environment_of_pytorch_is_read_where_nobody_says_better() -> None:
    environment = {"MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234", "NODE_RANK": "1", "RANK": "7"}
    found = bootstrap_of(environment, flags("2"))
    assert (found.role, found.node, join_addresses(found)) == (Role.JOIN, 1, ["[fe80::1]:1234"])
    assert join_addresses(bootstrap_of(environment, flags("2", join_address="other:1"))) == ["other:1"]
    assert bootstrap_of(environment, NOTHING).role is Role.ALONE


def test_a_worker_of_torchrun_is_the_node_of_its_host() -> None:
    found = bootstrap_of(TORCHRUN, NOTHING)
    assert (found.launcher, found.role, found.node, str(found.nodes)) == ("torchrun", Role.JOIN, 1, "2")
    assert found.processes == 8
    assert found.job == "torchrun-run7"
    assert join_addresses(found) == [f"node0:{port_of_job('torchrun-run7')}"], (
        "torchrun's store has its own port open"
    )
    other = bootstrap_of({**TORCHRUN, "LOCAL_RANK": "3"}, NOTHING)
    assert other.role is Role.EXTRA
    assert "process 3 of 8 on this host" in other.explain()[-1]


def test_a_rank_of_a_run_starts_another_one_alone() -> None:
    found = bootstrap_of({**TORCHRUN, "LOCAL_RANK": "3", "ZBMD_NODE": "zbmd-0-1"}, NOTHING)
    assert (found.role, found.launcher) == (Role.ALONE, "started by a rank of another run")


def test_standalone_is_alone_whatever_the_environment_says() -> None:
    broken = {**SLURM, "SLURM_STEP_NODELIST": "]"}
    assert bootstrap_of(broken, flags("1", processes=3), standalone=True).processes == 3
    with pytest.raises(UserError, match="SLURM_STEP_NODELIST"):
        bootstrap_of(broken, NOTHING)


# --- Slurm


def test_a_slurm_step() -> None:
    found = bootstrap_of(SLURM, NOTHING)
    port = port_of_job("4711.0")
    assert 20_000 <= port < 30_000
    assert (found.role, found.node, str(found.nodes), found.port) == (Role.JOIN, 1, "4", port)
    assert join_addresses(found) == [f"gpu{n}:{port}" for n in ("08", "09", "10", "11")]
    assert found.job == "slurm-4711.0"
    first = bootstrap_of({**SLURM, "SLURM_NODEID": "0"}, flags(processes=8))
    assert (first.role, first.port, first.processes) == (Role.FOUND, port, 8)
    lines = [" ".join(line.split()) for line in first.explain()]
    assert f"join addresses gpu[08-11] port {port} SLURM_STEP_NODELIST and the step's id" in lines


def test_several_tasks_a_node_are_its_ranks() -> None:
    environment = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert bootstrap_of(environment, NOTHING).processes == 2
    assert bootstrap_of({**environment, "SLURM_LOCALID": "1"}, NOTHING).role is Role.EXTRA
    last = bootstrap_of({**environment, "SLURM_NODEID": "3"}, NOTHING)
    assert last.processes is None, "one task a node does not say how many ranks"
    assert "nodes have unlike numbers of tasks" in last.notes[0]
    with pytest.raises(UserError, match="is 1, but SLURM_STEP_TASKS_PER_NODE says 1 tasks here"):
        bootstrap_of({**environment, "SLURM_NODEID": "3", "SLURM_LOCALID": "1"}, NOTHING)


def test_reserved_ports_and_gpus_of_slurm_are_used() -> None:
    environment = {**SLURM, "SLURM_STEP_RESV_PORTS": "12017-12020", "SLURM_GPUS_ON_NODE": "4"}
    found = bootstrap_of(environment, NOTHING)
    assert (found.port, found.processes) == (12017, 4)
    assert bootstrap_of(environment, flags(processes=2)).processes == 2
    listed = {**SLURM, "SLURM_JOB_GPUS": "0,3"}
    assert bootstrap_of(listed, NOTHING).processes == 2


def test_an_allocation_without_srun_is_told_of() -> None:
    environment = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}
    found = bootstrap_of(environment, NOTHING)
    assert found.role is Role.ALONE
    assert "an allocation of 4 nodes" in found.notes[0].replace("a Slurm", "an") and "srun" in found.notes[0]


def test_sources_that_disagree_are_named() -> None:
    with pytest.raises(UserError, match="number of nodes: --nnodes says 2, but SLURM_STEP_NUM_NODES says 4"):
        bootstrap_of(SLURM, flags("2"))
    with pytest.raises(UserError, match="the node number: --node-rank says 3, but SLURM_NODEID says 1"):
        bootstrap_of(SLURM, flags(node=3))
    with pytest.raises(UserError, match="--nproc-per-node says 3, but LOCAL_WORLD_SIZE says 8"):
        bootstrap_of(TORCHRUN, flags(processes=3))
    with pytest.raises(UserError, match=r"SLURM_STEP_NUM_NODES says 4 nodes, but .* lists 2: gpu\[08-09\]"):
        bootstrap_of({**SLURM, "SLURM_STEP_NODELIST": "gpu[08-09]"}, NOTHING)
    assert str(bootstrap_of(SLURM, flags("2:4")).nodes) == "2:4"
    with pytest.raises(UserError, match="--nnodes says 2:3"):
        bootstrap_of(SLURM, flags("2:3"))


@pytest.mark.parametrize(
    ("text", "counts"), [("2(x3),1", (2, 2, 2, 1)), ("8", (8,)), ("1,2(x2),1", (1, 2, 2, 1))]
)
def test_tasks_per_node(text: str, counts: tuple[int, ...]) -> None:
    assert parse_tasks_per_node(text, "X") == counts


@pytest.mark.parametrize("text", ["", "2(x", "a", "1(x999999999)", "1,,2", "-1", "2(x3)1", "4097"])
def test_what_is_no_count_of_tasks(text: str) -> None:
    with pytest.raises(UserError, match="not of the form"):
        parse_tasks_per_node(text, "X")


# --- MPI


def test_the_first_process_of_a_host_is_the_node_of_open_mpi() -> None:
    found = bootstrap_of({**MPI, "MASTER_ADDR": "node0"}, NOTHING)
    assert (found.role, found.node, str(found.nodes), found.processes) == (Role.JOIN, None, "2", 2)
    first = bootstrap_of({**MPI, OPEN_MPI[0]: "0", "MASTER_ADDR": "node0"}, NOTHING)
    assert (first.role, first.node, first.port) == (Role.FOUND, 0, 29500)
    assert bootstrap_of({**MPI, OPEN_MPI[2]: "1"}, NOTHING).role is Role.EXTRA


def test_one_process_a_host_leaves_the_number_of_ranks_to_a_flag() -> None:
    environment = {**dict(zip(HYDRA, ("3", "4", "0", "1"), strict=True)), "MASTER_ADDR": "node0"}
    found = bootstrap_of(environment, flags(processes=8))
    assert (found.launcher, found.role, found.node, found.processes) == ("MPI", Role.JOIN, 3, 8)


def test_mpi_on_one_host_needs_no_door() -> None:
    found = bootstrap_of(dict(zip(OPEN_MPI, ("0", "2", "0", "2"), strict=True)), NOTHING)
    assert (found.role, found.processes) == (Role.ALONE, 2)


def test_mpi_does_not_say_where_its_first_host_is() -> None:
    with pytest.raises(UserError, match=r"nothing says how they find each other.*MASTER_ADDR"):
        bootstrap_of(MPI, NOTHING)
    inside = {**MPI, **SLURM, "SLURM_STEP_NODELIST": "gpu09", "PMIX_NAMESPACE": "77"}
    found = bootstrap_of(inside, NOTHING)
    assert (found.launcher, str(found.nodes)) == ("Open MPI", "2"), "mpirun's own step of Slurm is not ours"
    assert join_addresses(found) == [f"gpu08:{port_of_job('mpi-77')}"]


def test_hosts_with_unlike_numbers_of_ranks_are_told() -> None:
    for rank, size, local, hosts in (("0", "3", "2", "2"), ("2", "3", "1", "2")):
        environment = dict(zip(OPEN_MPI, (rank, size, "0", local), strict=True))
        with pytest.raises(UserError, match=r"mpirun --map-by ppr:1:node"):
            bootstrap_of({**environment, "OMPI_MCA_orte_num_nodes": hosts}, NOTHING)
    with pytest.raises(UserError, match="do not fit together"):
        bootstrap_of(dict(zip(OPEN_MPI, ("4", "4", "0", "2"), strict=True)), NOTHING)


# --- Kubernetes


def test_a_pod_of_a_stateful_set() -> None:
    service = Stated(value="zbmd", source="ZBMD_SERVICE")
    found = bootstrap_of(STATEFUL_SET, flags("3"), pod=POD, service=service)
    assert (found.launcher, found.role, found.node, found.port) == ("Kubernetes", Role.JOIN, 2, 29400)
    assert join_addresses(found) == ["trainer-0.zbmd.research.svc:29400", "zbmd.research.svc:29400"]
    assert found.job == "kubernetes-research-trainer"
    founder = bootstrap_of(STATEFUL_SET, flags("3"), pod=Pod(host="trainer-0"), service=service)
    assert (founder.role, join_addresses(founder)[1]) == (Role.FOUND, "zbmd:29400")
    with pytest.raises(UserError, match="ZBMD_SERVICE names a service, but nobody says how many pods"):
        bootstrap_of(STATEFUL_SET, NOTHING, pod=POD, service=service)
    with pytest.raises(UserError, match="no name of a Kubernetes service"):
        bootstrap_of({}, flags("3"), pod=POD, service=Stated(value="a_b", source="--service"))


def test_a_pod_of_an_indexed_job() -> None:
    environment = {"JOB_COMPLETION_INDEX": "0", "POD_NAME": "train-0-x7k2p", "POD_NAMESPACE": "ml"}
    assert bootstrap_of(environment, NOTHING).role is Role.ALONE, "its pods may each be alone"
    with pytest.raises(UserError, match="nothing says how they find each other"):
        bootstrap_of(environment, flags("2"))
    service = Stated(value="train.ml.svc", source="--service")
    found = bootstrap_of(environment, flags("2"), service=service)
    assert (found.role, join_addresses(found)) == (Role.FOUND, ["train.ml.svc:29400"])
    named = bootstrap_of(environment, flags("2"), service=service, pod=Pod(host="train-0"))
    assert join_addresses(named) == ["train-0.train.ml.svc:29400", "train.ml.svc:29400"]
    digits = bootstrap_of(environment, flags("2"), service=service, pod=Pod(host="train-0-24567"))
    assert join_addresses(digits) == ["train.ml.svc:29400"], "what is random about a name is no number"
    with pytest.raises(UserError, match="JOB_COMPLETION_INDEX is 5, but there are at most 2 nodes"):
        bootstrap_of({**environment, "JOB_COMPLETION_INDEX": "5"}, flags("2"), service=service)


# --- a store, ports, anything


def test_a_store_says_who_founds() -> None:
    stated = LauncherFacts(
        launcher="zbmd-node run",
        nodes=flags("2").nodes,
        store=Stated(value="etcd://localhost:2379/job", source="--store"),
    )
    assert bootstrap_of({}, stated).role is Role.STORE
    assert bootstrap_of(SLURM, LauncherFacts(launcher="x", store=stated.store)).role is Role.STORE


def test_a_port_of_the_users_moves_every_door() -> None:
    found = bootstrap_of(SLURM, LauncherFacts(launcher="x", port=Stated(value=7000, source="--port")))
    assert found.port == 7000
    assert {join_address.port for join_address in found.join_addresses} == {7000}


def test_a_door_needs_a_port_only_where_there_are_several_nodes() -> None:
    local = flags("1", join_address="localhost:0")
    assert bootstrap_of({}, local).role is Role.ALONE
    with pytest.raises(UserError, match="needs a port"):
        bootstrap_of({}, flags("2", join_address="localhost:0"))


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("a", "a", 9), ("a:1", "a", 1), ("::1", "::1", 9), ("[::1]", "::1", 9), ("[::1]:2", "::1", 2)],
)
def test_doors(text: str, host: str, port: int) -> None:
    assert parse_join_address(text, "X", port=9) == TcpAddress(host=host, port=port)


@pytest.mark.parametrize("text", ["", ":1", "a b:1", "http://a:1", "a:b", "[a]:1", "a:99999"])
def test_what_is_no_door(text: str) -> None:
    with pytest.raises(UserError, match="X"):
        parse_join_address(text, "X", port=9)


@pytest.mark.parametrize("text", ["", "0", "3:2", "a", "1:2:3", "-1", "99999", "1:"])
def test_what_is_no_number_of_nodes(text: str) -> None:
    with pytest.raises(UserError, match="--nnodes"):
        parse_node_range(text, "--nnodes")


KNOWN = [SLURM, MPI, TORCHRUN, STATEFUL_SET, dict.fromkeys(HYDRA, "1"), {"JOB_COMPLETION_INDEX": "1"}]
ODD = ["", "0", "1", "2(x2)", "a[1-2]", "node0", "-1", "9" * 30, "é", "\0"]
VALUES = st.one_of(st.sampled_from(ODD), st.text(max_size=8))
NAMES = sorted({name for known in KNOWN for name in known} | {"SLURM_LOCALID"})


@given(
    st.sets(st.sampled_from(range(len(KNOWN)))),
    st.dictionaries(st.sampled_from(NAMES), VALUES),
    st.sampled_from([None, "1", "2", "1:3"]),
    st.text(max_size=8),
)
def test_any_environment_is_understood_or_a_typed_error(
    kept: set[int], changed: dict[str, str], nodes: str | None, host: str
) -> None:
    environment: dict[str, str] = {}
    for index in kept:
        environment |= KNOWN[index]
    with contextlib.suppress(UserError):
        found = bootstrap_of(environment | changed, flags(nodes), pod=Pod(host=host, namespace=host))
        assert found.nodes.least <= found.nodes.most
        assert found.explain()
        if found.role in (Role.FOUND, Role.JOIN, Role.HOLDER):
            assert found.join_addresses and all(
                0 < join_address.port < 1 << 16 for join_address in found.join_addresses
            )
            assert found.node is None or found.node < found.nodes.most
