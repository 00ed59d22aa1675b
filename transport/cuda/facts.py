"""What a device and its driver can do, and which way bytes go between two of them (pure).

CUDA's IPC works between processes of one host under Linux proper: not under WSL, and not between instances
of a divided GPU (MIG). See NVIDIA's CUDA C++ Programming Guide, "Interprocess Communication", and its MIG
User Guide, "CUDA IPC".
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

UUID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Of one GPU, as the process sees it that computes on it."""

    index: int
    uuid: bytes
    name: str
    memory_bytes: int
    pci: str
    """Its PCI address, such as 0000:3b:00.0."""
    unified_addressing: bool
    ipc_events: bool
    """Whether events of it can be opened by other processes."""
    dma_buf: bool
    """Whether its memory can be handed to a network card as a dma-buf."""
    wsl: bool = False

    @property
    def divided(self) -> bool:
        """Whether it is an instance of a divided GPU."""
        return " MIG " in f"{self.name} "


class Way(Enum):
    """How bytes come from one device to another."""

    SAME_DEVICE = "same device"
    PEER = "peer access"
    """Over NVLink or PCIe, from device to device."""
    THROUGH_HOST = "opened, copied through the host"
    """By CUDA itself, of memory that is opened: the devices do not reach each other."""
    STAGED = "staged"
    """Through page-locked memory and the host's own regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WayChoice:
    """The decision and its reason."""

    way: Way
    reason: str


def why_no_ipc(device: DeviceFacts) -> str:
    """Why no other process can open the device's memory; empty if it can."""
    if device.wsl:
        return "under WSL memory of a GPU cannot be opened by another process"
    if device.divided:
        return f"{device.name} is an instance of a divided GPU (MIG)"
    if not device.unified_addressing:
        return f"{device.name} has no unified addressing"
    if not device.ipc_events:
        return f"{device.name} has no events between processes"
    return ""


def choose_way(
    ours: DeviceFacts, theirs: DeviceFacts, *, same_host: bool, visible: bool, can_access_peer: bool
) -> WayChoice:
    """From our device to a peer's. visible: theirs is, to this process; the last: as CUDA says of the two."""
    if not same_host:
        return WayChoice(way=Way.STAGED, reason="the peer is on another host")
    why = why_no_ipc(ours) or why_no_ipc(theirs)
    if why:
        return WayChoice(way=Way.STAGED, reason=why)
    if ours.uuid == theirs.uuid:
        return WayChoice(way=Way.SAME_DEVICE, reason=f"both compute on {ours.name} at {ours.pci}")
    if not visible:
        return WayChoice(
            way=Way.STAGED,
            reason=f"the peer's {theirs.name} at {theirs.pci} is hidden by CUDA_VISIBLE_DEVICES",
        )
    if can_access_peer:
        return WayChoice(way=Way.PEER, reason=f"{ours.pci} reaches {theirs.pci} by itself")
    return WayChoice(way=Way.THROUGH_HOST, reason=f"{ours.pci} does not reach {theirs.pci} by itself")
