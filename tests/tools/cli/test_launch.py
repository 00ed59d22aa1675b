"""`zbmd-node run` under other launchers, and torchrun's command line, as users have them."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
from support.cluster.etcd_server import free_ports
from support.processes.launcher import after_threads

from zbmd.actors.bootstrap.merge import Role
from zbmd.tools.cli import launch
from zbmd.tools.cli.launch_settings import IGNORED, stated
from zbmd.tools.cli.settings import gpus, merge, parse_ranks
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

NAMES = (
    "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK ROLE_RANK ROLE_NAME "
    "TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT MASTER_PORT"
)
SCRIPT = f"""
import os
print(*(os.environ[name] for name in "{NAMES}".split()))
"""
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
}
NODES = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def test_a_command_line_of_torchruns_runs_as_it_is(launcher: Launcher) -> None:
    (launcher.directory / "train.py").write_text(SCRIPT)
    ended = launcher.run(
        *(
            "run",
            "--standalone",
            "--nnodes=1:1",
            "--nproc_per_node",
            "2",
            "--rdzv-backend=c10d",
            "--rdzv-id=seven",
        ),
        *(
            "--rdzv_endpoint=localhost:0",
            "--max-restarts",
            "0",
            "--monitor_interval",
            "5",
            "-r",
            "3",
            "--role",
            "trainer",
        ),
        *("--run-path", "train.py", "--nnodes", "9"),
    )
    assert ended.code == 0, ended
    ports = {line.split()[-1] for line in ended.out}
    assert len(ports) == 1 and 0 < int(*ports) < 1 << 16
    wanted = [f"[rank{r}]: {r} {r} 2 0 {r} trainer seven 0 {port}" for port in ports for r in range(2)]
    assert sorted(ended.out) == wanted
    assert after_threads(ended.errors) == [
        "zbmd-node: --monitor-interval has no effect: the kernel reports a rank's end at once",
        "zbmd-node: --redirects has no effect: see --log-dir",
    ]


def test_every_option_of_torchrun_is_taken(launcher: Launcher) -> None:
    given = [argument for name in IGNORED for argument in (f"--{name.replace('_', '-')}", "1")]
    ended = launcher.run("run", "-n", "1", *given, "-t", "3", "--explain", "x.py")
    assert ended.code == 0, ended
    assert sum("has no effect" in line for line in ended.out) == len(IGNORED)


def test_another_program_than_python_is_refused(launcher: Launcher) -> None:
    ended = launcher.run("run", "--no-python", "/bin/true")
    assert ended.code == 2, ended
    assert "Give a Python script that starts it" in ended.errors[0]


def test_what_slurm_says_is_explained(launcher: Launcher) -> None:
    ended = launcher.run("run", "--explain", "--nproc-per-node", "2", "train.py", **STEP, **NODES)
    assert ended.code == 0, ended
    assert ended.out[0] == "started by: Slurm"
    told = {line.split()[0]: line.split()[1:] for line in ended.out[1:]}
    assert told["nodes"] == ["2", "SLURM_NNODES"]
    assert told["processes"] == ["2", "--nproc-per-node"]
    assert told["role"] == ["found", "node", "0", "founds", "the", "cluster"]


def test_sources_that_disagree_end_in_one_paragraph(launcher: Launcher) -> None:
    ended = launcher.run("run", "--nnodes", "3", "train.py", **STEP, **NODES)
    assert (ended.code, len(ended.errors)) == (2, 1), ended
    assert "--nnodes says 3, but SLURM_NNODES says 2" in ended.errors[0]


@pytest.mark.optional
@pytest.mark.parametrize(
    ("mpirun", "options"),
    [
        ("mpirun.openmpi", ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")),
        ("mpirun.mpich", ()),
    ],
)
def test_mpirun_starts_one_job_and_the_first_process_hosts_it(
    launcher: Launcher, mpirun: str, options: tuple[str, ...]
) -> None:
    if shutil.which(mpirun) is None:
        pytest.skip(f"{mpirun} (apt: openmpi-bin, mpich) is not installed")
    (launcher.directory / "train.py").write_text(
        "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
    )
    ended = launcher.run("run", "train.py", before=(mpirun, *options, "-n", "2"))
    assert ended.code == 0, ended
    assert sorted(ended.out) == ["[rank0]: 0 2", "[rank1]: 1 2"]
    assert [line for line in ended.errors if "nothing to do here: it is process 1 of 2" in line], ended


@pytest.mark.optional
@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="openmpi-bin (apt) is not installed")
def test_a_failed_job_fails_mpirun(launcher: Launcher) -> None:
    (launcher.directory / "train.py").write_text("raise SystemExit(1)")
    before = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
    ended = launcher.run("run", "--max-restarts", "0", "train.py", before=before)
    assert ended.code == 1, ended


@pytest.mark.optional
@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="openmpi-bin (apt) is not installed")
def test_mpirun_on_two_hosts_runs_one_job(launcher: Launcher) -> None:
    (launcher.directory / "train.py").write_text(SCRIPT)
    apart = ("OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_MCA_orte_num_nodes=2")
    mpirun = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2")
    ended = launcher.run(
        *("run", "--nproc-per-node", "1", "train.py"),
        before=(*mpirun, "env", *apart),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_ports(1)[0]),
    )
    assert ended.code == 0, ended
    told = sorted(line.split()[:5] for line in ended.out)
    assert told == [[f"[rank{r}]:", str(r), "0", "2", str(r)] for r in range(2)], ended


def test_flags_are_settings_and_torchruns_variables_are_read() -> None:
    settings = merge(
        {"node_rank": "1"}, {"PET_NNODES": "2", "PET_NODE_RANK": "9", "ZBMD_MASTER_ADDR": "a"}, None
    )
    said = stated(settings)
    assert said.nodes is not None and (str(said.nodes.value), said.nodes.source) == ("2", "PET_NNODES")
    assert said.node is not None and (said.node.value, said.node.source) == (1, "--node-rank")
    assert said.join_addresses is not None and str(said.join_addresses.value[0]) == "a:29500"
    assert said.processes is None, "the default is nobody's word"
    assert merge({}, {"PET_NPROC_PER_NODE": "2", "ZBMD_NPROC_PER_NODE": "3"}, None)["nproc_per_node"] == 3


def test_backends_of_torchrun() -> None:
    line = {"rdzv_backend": "c10d", "rdzv_endpoint": "a", "node_rank": "0"}
    said = stated(merge(line, {}, None))
    assert (said.holder_founds, said.node) == (True, None)
    assert "--node-rank is not used with --rdzv-backend c10d" in said.notes[0]
    etcd = stated(merge({"rdzv_backend": "etcd-v2", "rdzv_endpoint": "a:2379", "rdzv_id": "j"}, {}, None))
    assert etcd.store is not None and etcd.store.value == "etcd://a:2379/j"
    assert etcd.join_addresses is None
    with pytest.raises(UserError, match="--rdzv-backend etcd needs"):
        stated(merge({"rdzv_backend": "etcd"}, {}, None))
    with pytest.raises(
        UserError, match=r"--rdzv-backend: expected one of static, c10d, etcd, etcd-v2, got 'mpi'"
    ):
        merge({"rdzv_backend": "mpi"}, {}, None)


def test_processes_by_what_the_machine_has() -> None:
    assert parse_ranks("cpu") == parse_ranks("auto") or gpus({}) > 0
    assert gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    if gpus({}) == 0:
        with pytest.raises(UserError, match="no GPU"):
            parse_ranks("gpu")


def test_a_launchers_number_of_ranks_is_taken_where_the_user_gives_none() -> None:
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "3"}
    environment |= {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    settings = merge({}, {}, None)
    found = launch.bootstrap_of(environment, stated(settings))
    assert found.role is Role.ALONE
    settings = launch.with_processes(settings, found)
    assert settings["nproc_per_node"] == 3
    assert settings.source("nproc_per_node") == "OMPI_COMM_WORLD_LOCAL_SIZE"
    many = {name: value.replace("3", "2000") for name, value in environment.items()}
    with pytest.raises(
        UserError,
        match="OMPI_COMM_WORLD_LOCAL_SIZE: expected 1 to 1022 processes, auto, gpu or cpu, got '2000'",
    ):
        launch.with_processes(merge({}, {}, None), launch.bootstrap_of(many, stated(merge({}, {}, None))))
