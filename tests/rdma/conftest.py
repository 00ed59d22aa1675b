"""Tests that need RDMA devices. `tests/tools/lab/test_rdma_vm.py` runs them all in a machine that has two.

On a host with devices of its own: `ZBMD_RDMA_DEVICES=mlx5_0@10.0.0.1,mlx5_1@10.0.1.1 pytest tests/rdma`.
"""

from __future__ import annotations

from support.processes.forked import fork
from support.rdma.rdma_world import given_devices

__all__ = ["fork"]

if not given_devices():
    collect_ignore_glob = ["*"]
elif not all(each.device.startswith("rxe") for each in given_devices()):
    collect_ignore = ["test_rdma_beats.py", "test_rdma_faults.py"]  # nobody's real cable is pulled
