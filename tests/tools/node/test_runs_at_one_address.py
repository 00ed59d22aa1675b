"""Two runs of one host that are given the same port for rank 0: the second is refused before it starts."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from programs import PROGRAMS

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

TELL = str(PROGRAMS / "node" / "tell_variables.py")


@pytest.mark.parametrize("source", ["--master-port", "MASTER_PORT"])
def test_a_port_that_another_run_has_is_refused(launcher: Launcher, source: str) -> None:
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        if source == "MASTER_PORT":
            ended = launcher.run("run", TELL, MASTER_PORT=port)
        else:
            ended = launcher.run("run", source, port, TELL)
    assert ended.code == 2 and not ended.out, ended
    assert f"{source} {port}: the port is in use on this host, perhaps by another run" in str(ended)
