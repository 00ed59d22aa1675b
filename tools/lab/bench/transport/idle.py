"""Measure idle links: many links in one process, and the memory they take from the machine.

    python -m zbmd.tools.lab.bench.transport.idle [--links N] [--json]

Shared pages are those of the whole machine (Shmem in /proc/meminfo), so run it on a quiet one.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
from pathlib import Path
from typing import Final

import msgspec
import uvloop

from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.transport.errors import UserError
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import Endpoint
from zbmd.transport.shm.connect import link_pair
from zbmd.transport.shm.link import ShmLink

LINKS_DEFAULT: Final = 1000
LINKS_MAX: Final = 100_000
DESCRIPTORS_A_PAIR: Final = 8
COOKIE: Final = bytes(32)


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a link, both of its ends counted; `frames` of them carried one frame each way afterwards."""

    links: int
    frames: int
    private_bytes: int
    shared_bytes: int

    @property
    def total_bytes(self) -> int:
        """Memory that a link takes from the machine."""
        return self.private_bytes + self.shared_bytes


def _raise_descriptors(links: int) -> None:
    needed = links * DESCRIPTORS_A_PAIR + 256
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{links} links need {needed} descriptors; the limit is {hard}: raise it (ulimit -Hn)."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _private_bytes() -> int:
    """Memory of this process alone."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return (
        sum(int(line.split()[1]) for line in lines if line.startswith("Private_") and "Huge" not in line)
        << 10
    )


def _shared_bytes() -> int:
    """All of the machine's shared memory."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) << 10


def _endpoint(name: str) -> Endpoint:
    identity = Identity(name=name, pid=os.getpid(), uid=os.getuid(), incarnation=1)
    return Endpoint(identity=identity, cookie=COOKIE)


async def measure(links: int) -> Idle:
    """Make `links` pairs over real rings and sockets, weigh them, and use each. Raises `UserError`."""
    _raise_descriptors(links)
    a, b = _endpoint("a"), _endpoint("b")
    private, shared = _private_bytes(), _shared_bytes()
    pairs = [link_pair(a, b) for _ in range(links)]
    try:
        await asyncio.sleep(0)
        weighed = (_private_bytes() - private) // links, (_shared_bytes() - shared) // links
        frames = await _use(pairs)
    finally:
        for pair in pairs:
            for link in pair:
                link.close()
    return Idle(links=links, frames=frames, private_bytes=weighed[0], shared_bytes=max(0, weighed[1]))


async def _use(pairs: list[tuple[ShmLink, ShmLink]]) -> int:
    """Send a frame each way over every pair; return how many arrived."""
    arrived, wanted = 0, 2 * len(pairs)
    all_here: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_frame(header: object, payload: memoryview) -> None:
        nonlocal arrived
        arrived += 1
        if arrived == wanted:
            all_here.set_result(None)

    for pair in pairs:
        for link in pair:
            link.on_frame = on_frame
    for pair in pairs:
        for link in pair:
            link.send(b"still there?")
    await all_here
    return arrived


@exit_code_of
def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = script_parser("lab.bench.transport.idle", __doc__)
    parser.add_argument("--links", type=int, default=LINKS_DEFAULT, help="(%(default)s)")
    add_json(parser)
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.links <= LINKS_MAX:
        raise UserError(f"--links {arguments.links} is out of range: give 1 to {LINKS_MAX:,}.")
    found = uvloop.run(measure(arguments.links))
    if arguments.json:
        print(json.dumps({**msgspec.to_builtins(found), "total_bytes": found.total_bytes}))
    else:
        print(
            f"{found.links} links in one process, both ends: {found.total_bytes / 1024:.0f} KiB a link "
            f"({found.shared_bytes / 1024:.0f} shared, {found.private_bytes / 1024:.0f} private); "
            f"{found.frames} frames went through"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
