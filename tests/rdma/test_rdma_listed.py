"""The devices are there, and pyverbs opens them."""

from __future__ import annotations

from support.rdma.rdma_world import given_devices

from zbmd.transport.host.topology.devices import rdma_devices, read_rdma_devices, verbs_missing


def test_pyverbs_lists_the_devices_that_sysfs_has() -> None:
    assert verbs_missing() is None
    known = read_rdma_devices()
    active = {device.name for device in known if device.active}
    assert {each.device for each in given_devices()} <= active
    assert {device.name for device in known} == set(rdma_devices())
