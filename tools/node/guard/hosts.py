"""Have the guards of several hosts find each other in torchrun's store, with a cookie of their own."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final

from zbmd.actors.bootstrap.environments import LauncherFacts
from zbmd.tools.node.run_many import NodeRun
from zbmd.transport.errors import DeadlineExceeded, PeerLost
from zbmd.transport.tcp.address import parse_address

COOKIE_FILE: Final = "ZBMD_COOKIE_FILE"
_MEETS: Final = "from zbmd.collectives.torch.guards import main; main()"
_NEEDED: Final = ("MASTER_ADDR", "MASTER_PORT")


def has_store(variables: Mapping[str, str]) -> bool:
    """Return whether the launcher is torchrun, whose agent serves a store to its processes."""
    agents = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return agents and all(variables.get(name) for name in _NEEDED)


def make_cookie_file() -> int:
    """Have this process, and those that it forks, read the cookie from memory; return its descriptor.

    Nothing of it is left when this process ends.
    """
    fd = os.memfd_create("zbmd-cookie", os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    os.environ[COOKIE_FILE] = f"/proc/{os.getpid()}/fd/{fd}"
    return fd


@asynccontextmanager
async def met(
    plan: NodeRun, facts: LauncherFacts, variables: Mapping[str, str], cookie_fd: int
) -> AsyncGenerator[NodeRun]:
    """Meet the guards of the other hosts; yield the plan with the address that nodes join at.

    cookie_fd: from `make_cookie_file`, is filled. Raises `PeerLost`, `DeadlineExceeded`.
    """
    assert facts.node is not None and facts.nodes is not None
    number, count = facts.node.value, facts.nodes.value.most
    limit_s = plan.patience_ns / 1e9
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = (
        variables["MASTER_ADDR"],
        variables["MASTER_PORT"],
        attempt,
        str(number),
        str(count),
        f"{limit_s:g}",
    )
    # -P: the working directory must not shadow what it imports.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", _MEETS, str(os.getpid()), *place, stdin=PIPE, stdout=PIPE
    )
    try:
        async with asyncio.timeout(limit_s):
            os.write(cookie_fd, f"{await _line(process)}\n".encode())
            joins = "" if number == 0 else await _line(process)
    except TimeoutError:
        raise DeadlineExceeded(
            f"the guards of {count} hosts did not meet within {limit_s:g} s: see whether torchrun has "
            "started them on all hosts, or raise --join-timeout"
        ) from None
    else:
        addresses = tuple(parse_address(address) for address in joins.split(",") if address)
        bootstrap = dataclasses.replace(plan.bootstrap, join_addresses=addresses, port=0)
        tell = _teller(process) if number == 0 else None
        yield dataclasses.replace(plan, bootstrap=bootstrap, on_began=tell)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class _teller:
    """Write the address of the first host's node to the process beside this one, once."""

    def __init__(self, process: Process) -> None:
        self._process, self._told = process, False

    def __call__(self, address: str) -> None:
        if not self._told and self._process.stdin is not None:
            self._told = True
            self._process.stdin.write(f"{address}\n".encode())


async def _line(process: Process) -> str:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        raise PeerLost("the guards of the other hosts", "the meeting failed: see standard error")
    return line.decode().strip()
