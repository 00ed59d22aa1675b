"""perftest (`ib_write_lat`, `ib_write_bw`, `ib_send_lat`) between two RDMA devices of this host."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Final, NamedTuple

from zbmd.transport.errors import UserError

DEVICES_VARIABLE: Final = "ZBMD_RDMA_DEVICES"
LATENCY: Final = "ib_write_lat"
BANDWIDTH: Final = "ib_write_bw"
MESSAGES: Final = "ib_send_lat"
TYPICAL_US, MIB_S = 2, 1
"""Columns of their results behind size and count. What perftest calls MB is a MiB."""
TIMEOUT_S: Final = 120.0
LISTENS_S: Final = 60.0
LISTENS_LOOK_S: Final = 0.1


class At(NamedTuple):
    """A device, and the IP address of its interface."""

    device: str
    address: str


def given_pair() -> tuple[At, At]:
    """The first two devices that `ZBMD_RDMA_DEVICES` names. Raises `UserError` if there are none."""
    named = os.environ.get(DEVICES_VARIABLE, "").split(",")
    devices = [At(*each.split("@")) for each in named if each.count("@") == 1]
    if len(devices) < 2:
        raise UserError(
            f"{DEVICES_VARIABLE} names no two RDMA devices: give DEVICE@ADDRESS,DEVICE@ADDRESS, or run this "
            "in the RDMA machine (python -m zbmd.tools.lab.rdma_vm COMMAND)."
        )
    return devices[0], devices[1]


def processor(slot: int) -> int:
    """The one that a pinned side stays on."""
    return slot % (os.cpu_count() or 1)


def perftest(program: str, nbytes: int, count: int, *, pinned: bool, depth: int | None = None) -> list[float]:
    """The numbers of its result line; both sides poll. pinned: each on a processor of its own.

    depth: how many writes are under way at once (`ib_write_bw`); None: as many as it likes, 128.

    Raises `UserError` if it fails.
    """
    devices = given_pair()
    shared = ["-F", "-n", str(count), "-s", str(nbytes)]
    shared += [] if depth is None else ["-t", str(depth)]
    client, server = (
        [*(("taskset", "-c", str(processor(slot))) if pinned else ()), program, *_at(at), *shared]
        for slot, at in enumerate(devices)
    )
    listening = subprocess.Popen(server, stdout=subprocess.PIPE, text=True)
    try:
        printed = _dial(listening, [*client, devices[1].address])
    finally:
        listening.kill()
        listening.communicate()
    line = re.search(rf"^\s*{nbytes}\s+{count}\s+(.+)$", printed, re.MULTILINE)
    if line is None:
        raise UserError(f"{program} printed no result: {printed}")
    return [float(word) for word in line[1].split()[:4]]


def _at(at: At) -> list[str]:
    # Here, not above: who benchmarks something else needs no libibverbs.
    from zbmd.transport.rdma.native._rdma_device import Device
    from zbmd.transport.rdma.plane import choose_port

    return ["-d", at.device, "-x", str(choose_port(Device(at.device), at.address).gid_index)]


def _dial(listening: subprocess.Popen[str], client: list[str]) -> str:
    """Return the output of the client. Its server prints nothing when it listens."""
    limit_s = time.monotonic() + LISTENS_S
    while True:
        done = subprocess.run(client, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
        if done.returncode == 0:
            return done.stdout
        if listening.poll() is not None or time.monotonic() > limit_s:
            raise UserError(f"{client[0]} failed: {done.stderr or done.stdout}")
        time.sleep(LISTENS_LOOK_S)
