"""`zbmd-node doctor`: can this machine run jobs, and which limits hold."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

import rich.console
import rich.markup
import rich.table

from zbmd.actors.runtime_env import recovery_budget_ns
from zbmd.actors.view import RANKS_MAX
from zbmd.tools.settings import cores
from zbmd.transport.budget import derive
from zbmd.transport.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.durations import format_duration
from zbmd.transport.errors import UserError, ZbmdError
from zbmd.transport.memory import available_memory, create_memfd, in_words
from zbmd.transport.rdma_devices import rdma_devices

FILES_A_RANK = 8  # descriptors of the host for each rank: pipes, pidfd, link
PROBE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. `advice` says what to do when it is not `ok`."""

    name: str
    ok: bool
    detail: str
    advice: str = ""


def _python() -> Finding:
    ok = sys.version_info >= (3, 11)
    return Finding(
        name="Python", ok=ok, detail=platform.python_version(), advice="install Python 3.11 or later"
    )


def _kernel() -> Finding:
    ok = sys.platform == "linux" and hasattr(os, "pidfd_open")
    return Finding(name="kernel", ok=ok, detail=platform.release(), advice="run on Linux 5.3 or later")


def _cores() -> Finding:
    return Finding(name="cores", ok=True, detail=f"{cores()} (the default for -n)")


def _memory() -> Finding:
    available = available_memory()
    return Finding(
        name="memory",
        ok=available.nbytes > PROBE_BYTES,
        detail=f"{in_words(available.nbytes)} available, limited by {available.limited_by}",
        advice="free memory or raise the limit",
    )


def _shared_memory() -> Finding:
    try:
        os.close(create_memfd("zbmd-doctor", PROBE_BYTES))
    except (ZbmdError, OSError) as error:
        return Finding(name="shared memory", ok=False, detail=str(error), advice="allow memfd_create")
    return Finding(name="shared memory", ok=True, detail="memfd works; nothing is named in /dev/shm")


def _cookie() -> Finding:
    try:
        load_or_create_cookie()
    except ZbmdError as error:
        return Finding(name="cookie", ok=False, detail=str(error), advice="see above")
    return Finding(name="cookie", ok=True, detail=str(cookie_path()))


def _files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 64 + FILES_A_RANK * RANKS_MAX
    return Finding(
        name="open files",
        ok=soft >= needed,
        detail=f"{soft} allowed; {RANKS_MAX} ranks need {needed}",
        advice=f"ulimit -n {needed}",
    )


def _rdma() -> Finding:
    """Not needed: a host without it is well."""
    try:
        devices = rdma_devices()
    except UserError as error:
        return Finding(name="RDMA", ok=True, detail=f"not used: {error}")
    return Finding(name="RDMA", ok=True, detail=", ".join(devices) or "no device")


def _limits() -> Finding:
    try:
        deadlines = derive(recovery_budget_ns(os.environ))
    except UserError as error:
        return Finding(name="deadlines", ok=False, detail=str(error), advice="correct that variable")
    shown = ", ".join(f"{each.name} {format_duration(each.value_ns)}" for each in deadlines.explain())
    detail = f"recovery_budget {format_duration(deadlines.recovery_budget_ns)}; derived from it: {shown}"
    return Finding(name="deadlines", ok=True, detail=detail)


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _kernel,
    _cores,
    _memory,
    _shared_memory,
    _cookie,
    _files,
    _rdma,
    _limits,
)


def main() -> int:
    """Print what each check found; 0 if all is well."""
    table = rich.table.Table("check", "", "found", show_lines=False)
    findings = [check() for check in CHECKS]
    for finding in findings:
        text = finding.detail if finding.ok else f"{finding.detail}: {finding.advice}"
        table.add_row(finding.name, "ok" if finding.ok else "NOT OK", rich.markup.escape(text))
    rich.console.Console().print(table)
    return 0 if all(finding.ok for finding in findings) else 1
