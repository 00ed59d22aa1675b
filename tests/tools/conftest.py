"""Fixtures of the tests of commands: real nodes, and `zbmd-node` as a user starts it."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from support.cluster.cluster_nodes import Nodes, nodes_in
from support.processes.launch_fixtures import launcher, template

__all__ = ["launcher", "nodes", "template"]


@pytest.fixture
async def nodes(tmp_path: Path, template: socket.socket) -> AsyncGenerator[Nodes]:
    """Real nodes, that are all gone afterwards."""
    async with nodes_in(tmp_path, template) as found:
        yield found
