"""Console scripts: `zbmd-node` and `zbmd`."""

from __future__ import annotations

import importlib

from zbmd.tools.cli.process import ended_by_ctrl_c, run
from zbmd.transport.host.threads import default_to_one_thread


def node() -> int:
    """Run `zbmd-node`."""
    return _run("zbmd.tools.node.cli")


def zbmd() -> int:
    """Run `zbmd`."""
    return _run("zbmd.tools.entry.zbmd")


def _run(module: str) -> int:
    default_to_one_thread()
    with ended_by_ctrl_c():
        main = importlib.import_module(module).main
    return run(main)
