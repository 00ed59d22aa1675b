"""Tests that need RDMA devices. `tests/tools/test_rdma_vm.py` runs them all in a machine that has two.

On a host with devices of its own: `ZBMD_RDMA_DEVICES=mlx5_0@10.0.0.1,mlx5_1@10.0.1.1 pytest tests/rdma`.
"""

from __future__ import annotations

import os

if not os.environ.get("ZBMD_RDMA_DEVICES"):
    collect_ignore_glob = ["*"]
