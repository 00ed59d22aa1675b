"""Fixtures of the tests of commands: real nodes, and `zbmd-node` as a user starts it."""

from __future__ import annotations

import gc
import socket
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from support.cluster.cluster_nodes import Nodes, nodes_in
from support.processes.launch_fixtures import launcher, template

from zbmd.tools.runs.plot_draw import render_figure

__all__ = ["launcher", "nodes", "template"]


@pytest.fixture
async def nodes(tmp_path: Path, template: socket.socket) -> AsyncGenerator[Nodes]:
    """Real nodes, that are all gone afterwards."""
    async with nodes_in(tmp_path, template) as found:
        yield found


@pytest.fixture(scope="module")
def fonts() -> Generator[None]:
    """matplotlib keeps the font files that it has opened: open them once, and close them at the end."""
    from matplotlib import font_manager
    from matplotlib.figure import Figure

    def words() -> Figure:
        figure = Figure()
        figure.text(0, 0, "plain")
        figure.text(0, 0, "bold", weight="bold")
        return figure

    render_figure(words, ".png", title="words", description="in the fonts of all pictures")
    yield
    font_manager._get_font.cache_clear()  # type: ignore[attr-defined]
    gc.collect()
