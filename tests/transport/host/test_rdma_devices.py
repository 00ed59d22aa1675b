"""The list of RDMA devices, with and without pyverbs."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from zbmd.transport.errors import UserError
from zbmd.transport.host.topology.devices import rdma_devices


def test_without_pyverbs_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    with pytest.raises(UserError, match="python3-pyverbs"):
        rdma_devices()


@pytest.mark.optional
def test_with_pyverbs_devices_have_names() -> None:
    if importlib.util.find_spec("pyverbs") is None:
        pytest.skip("pyverbs is not installed")
    assert all(rdma_devices())
