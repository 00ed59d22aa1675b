"""Memory limits are read before memory is taken."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS

from zbmd.transport.errors import LocalProtocolError, OutOfMemory, RemoteProtocolError
from zbmd.transport.memory import memfd as memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 9000000 kB\nMemAvailable:    1048576 kB\n"}


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    found = memory.available_memory(write(tmp_path, MEMINFO))
    assert found.nbytes == 1024 * MIB
    assert "MemAvailable" in found.limited_by


def test_the_tightest_group_on_the_way_up_is_the_limit_v2(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/job.slice/run\n",
            "sys/fs/cgroup/job.slice/run/memory.max": "max\n",
            "sys/fs/cgroup/job.slice/run/memory.current": "1\n",
            "sys/fs/cgroup/job.slice/memory.max": f"{300 * MIB}\n",
            "sys/fs/cgroup/job.slice/memory.current": f"{250 * MIB}\n",
            "sys/fs/cgroup/job.slice/memory.stat": f"anon 7\ninactive_file {20 * MIB}\n",
        },
    )
    found = memory.available_memory(root)
    assert found.nbytes == 70 * MIB, "the file cache can be reclaimed"
    assert found.limited_by.endswith("job.slice")


def test_v1_limits_and_a_container_that_sees_only_the_mount(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/docker/0123\n3:cpu:/docker/0123\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{64 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{60 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
        },
    )
    assert memory.available_memory(root).nbytes == 4 * MIB


def test_a_v1_limit_that_means_none_is_none(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
        },
    )
    assert memory.available_memory(root).nbytes == 1024 * MIB


def test_a_memfd_has_its_pages_and_a_sealed_size() -> None:
    fd = memory.create_memfd("test", 3 * MIB)
    try:
        status = os.fstat(fd)
        assert status.st_size == 3 * MIB
        assert status.st_blocks * 512 >= 3 * MIB
        assert memory.sealed_size(fd) == 3 * MIB
        assert not os.get_inheritable(fd)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, MIB)
    finally:
        os.close(fd)


def test_asking_for_more_than_there_is_takes_nothing_and_says_what_to_do() -> None:
    asked = memory.available_memory().nbytes + (1 << 40)
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfMemory, match="--arena") as caught:
        memory.create_memfd("too-much", asked)
    assert caught.value.asked_bytes == asked
    assert 0 < caught.value.available_bytes < asked
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_size_that_is_not_positive_is_refused(nbytes: int) -> None:
    with pytest.raises(LocalProtocolError, match="positive"):
        memory.create_memfd("empty", nbytes)


def test_memory_from_a_peer_must_be_sealed_and_must_be_memory(tmp_path: Path) -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    file = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    read_end, write_end = os.pipe()
    try:
        for fd in (unsealed, file, read_end):
            with pytest.raises(RemoteProtocolError):
                memory.sealed_size(fd)
    finally:
        for fd in (unsealed, file, read_end, write_end):
            os.close(fd)


def test_a_process_with_too_many_mappings_is_told_so() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "transport/too_many_mappings.py"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert "vm.max_map_count" in done.stdout, done.stderr
