"""The machine with RDMA devices; in it, by one boot, all of tests/rdma, the suites of links and regions."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.processes.children import children_of
from support.processes.polling import wait_until
from support.rdma.rdma_jobs import EXPECTED_VARIABLE, digests_on_one_host

from zbmd.actors.rank.environment import LINKS_VARIABLE
from zbmd.tools.lab.rdma_vm import machine as at_hand
from zbmd.tools.lab.rdma_vm import machine as bytecode
from zbmd.tools.lab.rdma_vm.image import (
    Archive,
    PackagesMissing,
    candidates,
    load_order,
    merged,
    module_name,
    require_programs,
)

ROOT = Path(__file__).resolve().parents[3]
TOOL = [sys.executable, "-m", "zbmd.tools.lab.rdma_vm"]
SESSIONS = "tests/support/rdma/rdma_sessions.py"
PYTEST_OPTIONS = ("-q", "--assert=plain", "-p", "no:cacheprovider", "-o", "timeout=0")
"""To rewrite assertions takes the machine longer than the tests; the tool bounds its time as a whole."""
PATIENCE_S = 1200
OFFSET = 40
"""Added to the exit code in the machine, so that one that was made up outside would show."""


@pytest.fixture
def machine_can_be_made() -> None:
    try:
        require_programs()
        candidates()
    except PackagesMissing as error:
        pytest.skip(str(error))


def test_a_module_is_loaded_behind_those_that_it_needs() -> None:
    modules = {
        "rdma_rxe": b"\0depends=ib-core,udp_tunnel\0",
        "ib_core": b"name=x\0depends=\0",
        "udp_tunnel": b"depends=ib_core\0",
        "unused": b"depends=rdma_rxe\0",
    }
    assert load_order(modules, ("built_in", "rdma-rxe")) == ["ib_core", "udp_tunnel", "rdma_rxe"]


def test_module_files_are_told_from_others() -> None:
    assert module_name("./lib/modules/6.1/kernel/net/9p/9pnet-virtio.ko.xz") == "9pnet_virtio"
    assert module_name("./lib/modules/6.1/kernel/sound/snd.ko") is None
    assert module_name("./lib/modules/6.1/kernel/net/9p/Makefile") is None


def test_files_of_packages_lie_where_a_merged_system_has_them() -> None:
    assert merged("./lib/x86_64/a.so").as_posix() == "usr/lib/x86_64/a.so"
    assert merged("./usr/bin/a").as_posix() == "usr/bin/a"
    assert merged("./etc/lib/a").as_posix() == "etc/lib/a"


def test_an_archive_is_what_cpio_reads() -> None:
    archive = Archive()
    archive.file("a/b/file", b"12345", executable=True)
    archive.link("a/link", "b/file")
    archive.folder("a")
    found: list[tuple[str, int, bytes]] = []
    data = io.BytesIO(archive.whole())
    while True:
        fields = [int(data.read(8), 16) for _ in range(13)] if data.read(6) == b"070701" else []
        assert len(fields) == 13
        name = data.read(fields[11])[:-1].decode()
        data.read(-data.tell() % 4)
        body = data.read(fields[6])
        data.read(-data.tell() % 4)
        if name == "TRAILER!!!":
            break
        found.append((name, fields[1], body))
    assert data.read() == b""
    assert found == [
        ("a", 0o040755, b""),
        ("a/b", 0o040755, b""),
        ("a/b/file", 0o100755, b"12345"),
        ("a/link", 0o120777, b"b/file"),
    ]


def test_files_at_hand_are_what_an_import_reads() -> None:
    found = dict(at_hand.files(ROOT, os.environ))
    core = Path(importlib.import_module("numpy._core._multiarray_umath").__file__ or "")
    compiled = importlib.util.cache_from_source(importlib.import_module("asyncio.runners").__file__ or "")
    for path in (core.resolve(), Path(compiled).resolve()):
        assert found[path] == path.read_bytes()
    assert not any(path.suffix == ".py" for path in found)


def test_bytecode_that_the_host_lacks_is_what_python_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", None)
    source = tmp_path / "tests" / "some_module.py"
    source.parent.mkdir()
    source.write_text("print('it ran')\n")
    (source.parent / "wrong.py").write_text("no python\n")

    def made() -> tuple[Path, bytes]:
        (found,) = (each for each in bytecode.made(tmp_path) if each[0].is_relative_to(tmp_path))
        return found

    placed, code = made()
    placed.parent.mkdir()
    placed.write_bytes(code)
    command = [sys.executable, "-v", "-c", "import some_module"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPYCACHEPREFIX"}
    done = subprocess.run(
        command, cwd=source.parent, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "it ran\n" and f"code object from '{placed}'" in done.stderr
    placed.write_bytes(code + b"behind it")
    assert made() == (placed, code + b"behind it"), "what the host has is taken as it is"
    source.write_text("print('it ran again')\n")
    assert made()[1].startswith(code[:8]) and b"again" in made()[1]


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(PackagesMissing, match=r"apt-get install .*iproute2 qemu-system-x86"):
        require_programs()


def machines_of(pid: int) -> list[int]:
    """The QEMUs among the children of a process. Those may come and go while we look."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in children_of(pid):
            if Path(f"/proc/{child}/comm").read_text().startswith("qemu"):
                found.append(child)
    return found


@pytest.mark.usefixtures("machine_can_be_made")
def test_a_killed_tool_leaves_no_machine() -> None:
    with subprocess.Popen([*TOOL, "true"], stdout=subprocess.DEVNULL) as tool:
        wait_until(lambda: tool.poll() is not None or bool(machines_of(tool.pid)))
        assert tool.poll() is None, "the tool ended before it had a machine"
        held = os.pidfd_open(machines_of(tool.pid)[0])
        tool.send_signal(signal.SIGKILL)
        tool.wait()
        try:
            assert select.select([held], [], [], PATIENCE_S)[0], "the machine outlives its tool"
        finally:
            os.close(held)


@pytest.mark.usefixtures("machine_can_be_made")
def test_a_machine_that_takes_too_long_is_ended_and_told() -> None:
    done = subprocess.run(
        [*TOOL, "--timeout", "50ms", "true"], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 125
    assert "has had its 0.05 s" in done.stderr


@pytest.mark.slow
@pytest.mark.machine
@pytest.mark.timeout(2.5 * PATIENCE_S)
@pytest.mark.usefixtures("machine_can_be_made")
def test_the_rdma_tests_pass_in_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("zbmd.transport.rdma.native._rdma") is None:
        pytest.skip(
            "transport/rdma/native/_rdma is not built: apt-get install libibverbs-dev, then make setup"
        )
    monkeypatch.setenv("ZBMD_STRICT_SKIPS", "1")
    expected = asyncio.run(digests_on_one_host(tmp_path, monkeypatch))
    monkeypatch.setenv(EXPECTED_VARIABLE, ",".join(expected))
    monkeypatch.delenv(LINKS_VARIABLE)
    sessions = shlex.join([sys.executable, SESSIONS, *PYTEST_OPTIONS])
    done = subprocess.run(
        [*TOOL, "--timeout", f"{PATIENCE_S}s", "bash", "-c", f"{sessions}; exit $(($? + {OFFSET}))"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=2 * PATIENCE_S,
    )
    print(done.stdout)
    assert done.returncode == OFFSET, "the tests failed in the machine; their words are above"
    assert sum(map(int, re.findall(r"^\w+: (\d+) passed", done.stdout, re.MULTILINE))) >= 110
    assert "skipped" not in done.stdout and "deselected" not in done.stdout
