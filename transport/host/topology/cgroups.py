"""The control groups of this process, v2 or v1, as folders that hold limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One control group: its folder, and whether its files are those of v2."""

    path: Path
    v2: bool


def groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """Every group whose `controller`, such as `memory`, may limit this process: its own and all above.

    `root` is where `proc` and `sys` are mounted. In a container only the mount may exist, whatever path the
    kernel names, so a folder that is yielded need not.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{controllers}"]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in dict.fromkeys(mounts):
            for depth in range(len(parts), -1, -1):
                yield Group(path=(root / mount).joinpath(*parts[:depth]), v2=controllers == "")
