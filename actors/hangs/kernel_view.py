"""How a process looks from outside, for when nothing is heard of it: what the kernel says of its threads."""

from __future__ import annotations

from pathlib import Path

from zbmd.transport.host.topology.kernel_files import entries, read_fields, read_text

PROC = Path("/proc")
THREADS_LOOKED_AT_MAX = 256


def look_outside(pid: int, proc: Path = PROC) -> str | None:
    """What keeps a process from saying anything, as the end of a sentence about it; None if it is gone."""
    folder = proc / str(pid)
    state = _state(folder)
    if state in ("", "Z", "X"):
        return None
    who = f"(pid {pid})"
    if state == "T":
        return f"{who} is stopped (SIGSTOP): kill -CONT {pid} lets it go on"
    if state == "t":
        return f"{who} is stopped by a debugger"
    threads = entries(folder / "task")[:THREADS_LOOKED_AT_MAX]
    for thread in threads:
        if "freeze" in _waits_in(thread):
            return f"{who} is frozen by its control group"
    for thread in threads:
        if _state(thread) == "D":
            where = _waits_in(thread)
            inside = f" in {where}" if where else ""
            return f"{who} is in uninterruptible sleep{inside}: a device or file system does not answer"
    where = _waits_in(folder)
    does = "runs" if state == "R" else f"sleeps{f' in {where}' if where else ''}"
    return f"{who} lives, but runs no Python: native code keeps the GIL (its main thread {does})"


def _state(folder: Path) -> str:
    """Return the kernel's state letter of a process or thread; empty if it has ended."""
    return read_fields(folder / "status", ":").get("State", "")[:1]


def _waits_in(folder: Path) -> str:
    """The kernel function that it sleeps in; nothing if it does not sleep, or the kernel does not say."""
    name = read_text(folder / "wchan") or ""
    return "" if name == "0" else name
