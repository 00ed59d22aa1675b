"""Installs as a user does: sdist → wheel → an empty environment, far from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from programs import PROGRAMS

import zbmd
from zbmd.tools.dev import tidy
from zbmd.tools.entry import zbmd as commands
from zbmd.tools.node import cli as node_commands

ROOT = Path(__file__).resolve().parents[2]
BUILT = {
    "transport/clock/_hlc",
    "transport/link/_link",
    "transport/native/_native",
    "transport/bulk/_fast_path",
    "transport/capture/native/_recording",
    "transport/memory/_region",
    "transport/shm/_shm_link",
    "transport/link/_spin",
    "actors/core/native/_asking",
    "actors/cluster/heartbeats/_heartbeat",
    "actors/core/native/_mailbox",
    "actors/core/native/_serving",
    "actors/replay/_turns",
    "collectives/flight/_flight",
    "collectives/native/_fast_path",
    "collectives/native/_messages",
    "collectives/native/_program",
    "collectives/native/_remote_stepper",
    "collectives/native/_stepper",
    "collectives/scale/_timeline",
    "training/native/_kernels",
    "training/autograd/_spans",
}
WITH_VERBS = {
    "transport/rdma/native/_rdma",
    "transport/rdma/native/_rdma_beat",
    "transport/rdma/native/_rdma_device",
}
"""Built where libibverbs is, and only there."""
SHIPPED = {".py", ".pyi", ".pyx", ".pxd", ".h", ".c", ".html", ".css", ".js", ".cu", ".cuh"}
IN_THE_REPOSITORY_ONLY = ("tools/chaos/", "tools/dev/", "tools/fuzzing/", "tools/lab/")
NODE_COMMANDS = (
    *("run", "status", "dump", "top", "tree", "doctor"),
    *("up", "submit", "token", "members", "jobs", "stop", "down"),
)
COMMANDS = (
    *("demo", "train", "generate", "ledger", "plot", "replay", "flights", "profile", "goodput", "snapshots"),
    *("diagnose", "inject"),
    *("trace", "query", "export", "dashboard", "checkpoint", "checkpoint convert", "plan"),
    *("plan pipeline", "plan graph", "sim", "sim hunt", "sim run", "sim list", "sim collectives"),
    *("bench", "bench p2p", "bench put", "bench collectives", "bench detect", "bench actors"),
)

NO_BYTECODE = {"PIP_COMPILE": "no"}
"""Of what pip installs, numpy and Cython above all, a small part is imported: only that is compiled then."""
PROBE = PROGRAMS / "launched" / "wheel_probe.py"
HELPS = PROGRAMS / "launched" / "wheel_helps.py"
"""Both run in the empty environment."""

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command that does not see this environment or checkout; return its output, fail with it.

    variables: more of its environment.
    """
    hidden = {"PYTHONPATH", "MYPYPATH", "VIRTUAL_ENV"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name not in hidden} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout}"
    return done.stdout


def layer_sources() -> set[str]:
    """Return the layers' source files as the checkout holds them: `transport/machine.py`, …"""
    paths = [PurePosixPath(path) for path in tidy.repository_files(ROOT)]
    return {str(path) for path in paths if path.parts[0] in tidy.LAYERS and path.suffix in SHIPPED}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist made from a copy of what git would hand out, links as links."""
    checkout = tmp_path_factory.mktemp("checkout")
    for path in tidy.repository_files(ROOT):
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, checkout / path, follow_symlinks=False)
    command = (sys.executable, "-m", "build", "--sdist", "--no-isolation")
    run(*command, cwd=checkout, ZBMD_COMPILE="later")  # nothing that is compiled belongs into it
    (archive,) = (checkout / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path) -> Path:
    """A wheel built from the sdist alone, with the build requirements that it declares."""
    folder = sdist.parent / "wheel"
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist)
    # What is in it is looked at, not how fast it is, nor what the compiler says of Cython's code.
    run(*command, cwd=sdist.parent, CFLAGS="-O0 -g0 -w", **NO_BYTECODE)
    (archive,) = folder.iterdir()
    return archive


def test_the_sdist_holds_every_source_as_a_regular_file(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = {member.name.split("/", 1)[-1]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert {f"src/zbmd/{path}" for path in layer_sources()} <= members.keys()
    assert {"LICENSE", "README.md", "CHANGELOG.md", "setup.py", "src/zbmd/py.typed"} <= members.keys()
    assert not [name for name in members if name.endswith(".so")]
    compiled_here = {name for name in members if name.endswith(".c")}
    assert compiled_here == {f"src/zbmd/{path}" for path in layer_sources() if path.endswith(".c")}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    compiled = {name for name in names if name.endswith(".so")}
    built = BUILT | WITH_VERBS if Path("/usr/include/infiniband/verbs.h").exists() else BUILT
    assert {name.split(".")[0] for name in compiled} == {f"zbmd/{path}" for path in built}
    ours = {name for name in names if not name.split("/")[0].endswith(".dist-info")} - compiled
    shipped = {path for path in layer_sources() if not path.startswith(IN_THE_REPOSITORY_ONLY)}
    assert ours == {f"zbmd/{path}" for path in shipped} | {
        "zbmd/__init__.py",
        "zbmd/__main__.py",
        "zbmd/lazy_imports.py",
        "zbmd/py.typed",
        "zbmd/torch/__init__.py",
        "zbmd/torch/lightning.py",
        "zbmd/torch/run.py",
        "zbmd/torch/transformers.py",
        "zbmd_autoload.py",
    }
    assert [name for name in names if name.endswith("licenses/LICENSE")]


def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "environment", cwd=tmp_path)
    binaries = tmp_path / "environment" / "bin"
    pip = (sys.executable, "-m", "pip", "--python", binaries / "python")
    run(*pip, "install", "--quiet", wheel, cwd=tmp_path, **NO_BYTECODE)
    assert run(binaries / "python", PROBE, cwd=tmp_path).endswith("probe passed\n")
    for command in ("zbmd", "zbmd-node"):
        assert run(binaries / command, "--version", cwd=tmp_path) == f"zbmd {zbmd.__version__}\n"
    assert run(binaries / "python", "-m", "zbmd", "--version", cwd=tmp_path) == f"zbmd {zbmd.__version__}\n"
    helped = [f"zbmd {words}".strip() for words in ("", *COMMANDS)]
    helped += [f"zbmd-node {words}".strip() for words in ("", *NODE_COMMANDS)]
    shown = json.loads(run(binaries / "python", HELPS, *helped, cwd=tmp_path))
    assert list(shown) == helped
    for command, text in shown.items():
        assert text.startswith("usage: ") and "zbmd.tools" not in text, (command, text)


def test_every_command_is_asked_for_help() -> None:
    assert {words.split()[0] for words in COMMANDS} == set(commands.COMMANDS)
    assert set(NODE_COMMANDS) == set(node_commands.ADDS)
