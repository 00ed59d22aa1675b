"""Memory of a GPU and a card that takes no dma-bufs, as devices in software do: reported, and staged."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest
from support.devices.cuda_model import ModelHost, ModelProcess
from support.rdma.rdma_world import given_devices

from zbmd.transport.cuda.api import DeviceFacts
from zbmd.transport.rdma.dmabuf import DmaBufRefused, Staged, register_device_memory
from zbmd.transport.rdma.native._rdma_device import Device

NBYTES = 1 << 16


class ExportingProcess(ModelProcess):
    """Of a GPU that has dma-bufs. A memfd stands for one: the card does not come to look at it."""

    exported: tuple[int, int, int] | None = None

    def facts(self) -> DeviceFacts:
        return replace(super().facts(), dma_buf=True)

    def dmabuf(self, address: int, nbytes: int) -> int:
        descriptor = os.memfd_create("dma-buf")
        self.exported = (address, nbytes, descriptor)
        return descriptor


def staged(process: ModelProcess, address: int, nbytes: int) -> str:
    device = Device(given_devices()[0].device)
    found = register_device_memory(device, process, address, nbytes, remote_read=True, remote_write=True)
    assert isinstance(found, Staged)
    return found.reason


def test_a_card_without_dma_bufs_says_so() -> None:
    device = Device(given_devices()[0].device)
    descriptor = os.memfd_create("dma-buf")
    try:
        with pytest.raises(DmaBufRefused, match="its driver takes no dma-bufs") as refused:
            device.register_dmabuf(descriptor, 0, NBYTES, 0)
    finally:
        os.close(descriptor)
    assert (refused.value.device, refused.value.number) == (device.name, errno.EOPNOTSUPP)


def test_memory_that_the_card_does_not_take_is_staged_and_its_whole_pages_are_let_go() -> None:
    process = ExportingProcess(ModelHost(devices=1), 0)
    page_bytes = os.sysconf("SC_PAGESIZE")
    assert "its driver takes no dma-bufs" in staged(process, 7 * page_bytes + 100, page_bytes)
    assert process.exported is not None
    *range_exported, descriptor = process.exported
    assert range_exported == [7 * page_bytes, 2 * page_bytes]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_of_a_gpu_without_dma_bufs_is_staged() -> None:
    assert "exports no dma-bufs" in staged(ModelProcess(ModelHost(devices=1), 0), 0, NBYTES)
