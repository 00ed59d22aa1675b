"""The RDMA devices that tests are given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class RdmaAt(NamedTuple):
    """A device, and the IP address of its interface."""

    device: str
    address: str


def given_devices() -> list[RdmaAt]:
    """What `ZBMD_RDMA_DEVICES` names."""
    return [
        RdmaAt(device, address)
        for device, _, address in (
            each.partition("@") for each in os.environ.get("ZBMD_RDMA_DEVICES", "").split(",") if each
        )
    ]


def interface_of(device: str) -> str:
    """The network interface below a RoCE device."""
    return Path(f"/sys/class/infiniband/{device}/ports/1/gid_attrs/ndevs/0").read_text().strip()
