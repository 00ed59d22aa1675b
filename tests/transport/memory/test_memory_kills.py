"""Kills for want of memory are distinguished from others by the kernel's counters."""

from __future__ import annotations

from pathlib import Path

from zbmd.transport.memory.memory_kills import PREFERENCE, RECENT_NS, MemoryKills, offer_memory

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MACHINE = {"proc/meminfo": "MemTotal: 8388608 kB\n", "proc/vmstat": "nr_free 1\noom_kill 3\n"}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/01\n0::/\n",
    "sys/fs/cgroup/memory/docker/01/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
    "sys/fs/cgroup/memory/docker/01/memory.limit_in_bytes": f"{900 * MIB}\n",
    "sys/fs/cgroup/memory/docker/01/memory.max_usage_in_bytes": f"{900 * MIB}\n",
}
V2 = {
    "proc/self/cgroup": "0::/pod/run\n",
    "sys/fs/cgroup/pod/run/memory.events": "low 0\noom 0\noom_kill 0\n",
    "sys/fs/cgroup/pod/run/memory.max": "max\n",
    "sys/fs/cgroup/pod/memory.events": "low 0\noom 0\noom_kill 0\n",
    "sys/fs/cgroup/pod/memory.max": f"{300 * MIB}\n",
    "sys/fs/cgroup/pod/memory.peak": f"{299 * MIB}\n",
}


def test_a_group_of_v1_that_has_reached_its_limit(tmp_path: Path) -> None:
    write(tmp_path, {**MACHINE, **V1})
    kills = MemoryKills(tmp_path)
    assert kills.claim(1) == "", "what was counted before is not ours"
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/docker/01/memory.oom_control": "oom_kill 2\n",
            "proc/vmstat": "oom_kill 4\n",
        },
    )
    told = kills.claim(2)
    assert told.startswith("killed by the kernel for want of memory: the cgroup ")
    assert told.endswith("memory/docker/01 is limited to 900.0 MiB, and used 900.0 MiB")
    assert kills.claim(3) == "", "one kill explains one death"


def test_the_group_of_v2_above_that_has_the_limit(tmp_path: Path) -> None:
    write(tmp_path, {**MACHINE, **V2})
    kills = MemoryKills(tmp_path)
    counted = {f"sys/fs/cgroup/{name}/memory.events": "oom_kill 2\n" for name in ("pod", "pod/run")}
    write(tmp_path, {**counted, "proc/vmstat": "oom_kill 5\n"})
    for _ in range(2):
        assert kills.claim(1).endswith("cgroup/pod is limited to 300.0 MiB, and used 299.0 MiB")
    assert kills.claim(1) == ""


def test_kills_in_other_groups_of_the_host_explain_no_death(tmp_path: Path) -> None:
    """A sibling below the same parent, and a container that only the machine's counter has seen."""
    for name, own in ("v1", V1), ("v2", V2):
        root = tmp_path / name
        write(root, {**MACHINE, **own})
        kills = MemoryKills(root)
        write(
            root,
            {
                "sys/fs/cgroup/pod/memory.events": "oom_kill 1\n",
                "sys/fs/cgroup/memory/docker/memory.oom_control": "oom_kill 1\n",
                "sys/fs/cgroup/memory/memory.oom_control": "oom_kill 1\n",
                "proc/vmstat": "oom_kill 4\n",
            },
        )
        assert kills.claim(1) == ""


def test_a_group_without_the_controller_is_counted_in_the_next_above(tmp_path: Path) -> None:
    write(tmp_path, {**MACHINE, **V2, "proc/self/cgroup": "0::/pod/run/app\n"})
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/pod/memory.events": "oom_kill 1\n"})
    assert kills.claim(1) == "", "of a sibling of its"
    write(tmp_path, {"sys/fs/cgroup/pod/run/memory.events": "oom_kill 1\n"})
    assert "cgroup/pod is limited to 300.0 MiB" in kills.claim(2)


def test_kills_in_groups_below_ones_own_explain_no_death(tmp_path: Path) -> None:
    """As in a container that was started in the same place; `memory.events` of v2 counts those, too."""
    local = "sys/fs/cgroup/pod/run/memory.events.local"
    write(tmp_path, {**MACHINE, **V2, local: "oom_kill 0\n"})
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/pod/run/memory.events": "oom_kill 1\n"})
    assert kills.claim(1) == ""
    write(tmp_path, {local: "oom_kill 1\n"})
    assert "cgroup/pod is limited to 300.0 MiB" in kills.claim(2)


def test_a_machine_that_ran_out_is_counted_in_the_group_too(tmp_path: Path) -> None:
    roomy = {"sys/fs/cgroup/memory/docker/01/memory.max_usage_in_bytes": f"{100 * MIB}\n"}
    write(tmp_path, {**MACHINE, **V1, **roomy})
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"sys/fs/cgroup/memory/docker/01/memory.oom_control": "oom_kill 2\n"})
    assert kills.claim(1).endswith("the machine's memory of 8.0 GiB was used up")


def test_groups_that_are_not_visible_leave_the_cause_open(tmp_path: Path) -> None:
    """In a container without `/sys/fs/cgroup` the machine's counter is of all its containers."""
    enabled = "#subsys_name\thierarchy\tnum_cgroups\tenabled\nmemory\t0\t9\t1\n"
    write(tmp_path, {**MACHINE, "proc/self/cgroup": "0::/\n", "proc/cgroups": enabled})
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"proc/vmstat": "oom_kill 4\n"})
    assert kills.claim(1) == ""
    write(tmp_path, {"proc/cgroups": enabled.replace("\t1\n", "\t0\n")})
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"proc/vmstat": "oom_kill 5\n"})
    assert "the machine's memory" in kills.claim(2), "no container has a limit there"


def test_the_machine_itself(tmp_path: Path) -> None:
    write(tmp_path, MACHINE)
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"proc/vmstat": "oom_kill 4\n"})
    kills.look(5)
    told = "killed by the kernel for want of memory: the machine's memory of 8.0 GiB was used up"
    assert kills.claim(6) == told


def test_an_old_kill_explains_no_death(tmp_path: Path) -> None:
    write(tmp_path, MACHINE)
    kills = MemoryKills(tmp_path)
    write(tmp_path, {"proc/vmstat": "oom_kill 4\n"})
    kills.look(5)
    assert kills.claim(6 + RECENT_NS) == ""


def test_files_that_are_missing_or_hold_anything(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/vmstat": "oom_kill many\n\x00"})
    assert MemoryKills(tmp_path).claim(1) == ""


def test_a_rank_is_taken_before_its_launcher(tmp_path: Path) -> None:
    score = tmp_path / "proc/self/oom_score_adj"
    offer_memory(tmp_path)
    assert not score.exists(), "a machine without it"
    for before, after in ((0, PREFERENCE), (-500, PREFERENCE - 500), (1000, 1000)):
        write(tmp_path, {"proc/self/oom_score_adj": f"{before}\n"})
        offer_memory(tmp_path)
        assert int(score.read_text()) == after
