"""Memory of a GPU that an RDMA device touches itself (GPUDirect), as a dma-buf; staged where it may not.

The GPU's driver exports whole pages as a dma-buf, and `ibv_reg_dmabuf_mr(3)` gives them to the card. It works
where both drivers know dma-bufs: mlx5, irdma, efa and bnxt_re do, devices in software do not.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from zbmd.transport.cuda.api import CudaApi
    from zbmd.transport.rdma.native._rdma_device import Device, Registration

_HELP: Final = {
    errno.EOPNOTSUPP: "its driver takes no dma-bufs",
    errno.ENOSYS: "this libibverbs has no ibv_reg_dmabuf_mr: rdma-core 34 has",
    errno.EBADF: "that is no dma-buf",
    errno.EINVAL: "that is no dma-buf, or not so long, or the two addresses differ within their page",
    errno.ENOMEM: "too little memory may be locked: ulimit -l",
}


class DmaBufRefused(UserError):
    """An RDMA device does not take a dma-buf. number: the errno."""

    def __init__(self, device: str, number: int) -> None:
        why = _HELP.get(number, os.strerror(number))
        super().__init__(f"the RDMA device {device} registers no memory of another device: {why}.")
        self.device = device
        self.number = number


@dataclass(frozen=True, slots=True, kw_only=True)
class Direct:
    """The card reads and writes the GPU's memory. The holder of this keeps that memory alive."""

    registration: Registration


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """It does not: go by `cuda.staging.DevicePipe`. reason: why, in one line."""

    reason: str


def register_device_memory(
    device: Device, api: CudaApi, address: int, nbytes: int, *, remote_read: bool, remote_write: bool
) -> Direct | Staged:
    """Let the RDMA device touch `nbytes` (1 or more) of the GPU's memory from `address` on, if it can.

    The registration has the GPU's addresses; peers may read or write these bytes as said. Raises `CudaFault`
    if the GPU knows dma-bufs, and yet exports none: the memory is of more than one allocation.
    """
    facts = api.facts()
    if not facts.dma_buf:
        return Staged(reason=f"{facts.name} exports no dma-bufs")
    page_bytes = os.sysconf("SC_PAGESIZE")
    ahead = address % page_bytes
    whole_pages = -(-(ahead + nbytes) // page_bytes) * page_bytes  # all that can be exported
    descriptor = api.dmabuf(address - ahead, whole_pages)
    try:
        made = device.register_dmabuf(
            descriptor, ahead, nbytes, address, remote_read=remote_read, remote_write=remote_write
        )
    except DmaBufRefused as refused:
        return Staged(reason=str(refused))
    finally:
        os.close(descriptor)  # a registration holds the dma-buf itself
    return Direct(registration=made)
