"""Fixtures of tests that start `zbmd-node` as a user does; a `conftest.py` imports what its tests use."""

from __future__ import annotations

import socket
from collections.abc import Generator
from pathlib import Path

import pytest

from support.cluster.cluster_nodes import node_template
from support.processes.launcher import Launcher


@pytest.fixture(scope="session")
def template() -> Generator[socket.socket]:
    """What `cluster_nodes.nodes_in` forks nodes from."""
    with node_template() as ours:
        yield ours


@pytest.fixture
def launcher(tmp_path: Path, template: socket.socket) -> Launcher:
    """Starts `zbmd-node` in this test's directory."""
    return Launcher(tmp_path, template)
