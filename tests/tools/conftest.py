"""Fixtures of the tests of commands: real nodes, and `zbmd-node` as a user starts it."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from support.cluster.cluster_nodes import Nodes, node_template, nodes_in
from support.processes.launcher import Launcher


@pytest.fixture(scope="session")
def template() -> Generator[socket.socket]:
    """What `cluster_nodes.nodes_in` forks nodes from."""
    with node_template() as ours:
        yield ours


@pytest.fixture
async def nodes(tmp_path: Path, template: socket.socket) -> AsyncGenerator[Nodes]:
    """Real nodes, that are all gone afterwards."""
    async with nodes_in(tmp_path, template) as found:
        yield found


@pytest.fixture
def launcher(tmp_path: Path, template: socket.socket) -> Launcher:
    """Starts `zbmd-node` in this test's directory."""
    return Launcher(tmp_path, template)
