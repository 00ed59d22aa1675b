"""A host whose cable becomes slow while a job runs is named for its link, and cleared."""

from __future__ import annotations

import contextlib
import secrets
import sys
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.netns import netns
from support.netns.netns import Process

from zbmd.tools.lab.hosts.netns import Lab, LabHost

HOSTS = 3
PORT = 29400
WORK = str(PROGRAMS / "training/even_work.py")
COOKIE = secrets.token_hex(32)
KNOWN_STEPS = 160
DELAY_MS = 20.0
READ_S = 300.0


@pytest.mark.slow
def test_a_host_behind_a_slow_cable_is_named_for_its_link_and_cleared(tmp_path: Path) -> None:
    netns.require_lab()
    out = str(tmp_path / "out")
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(HOSTS, shaped=True))
        nodes = [stack.enter_context(_node(lab, host, [WORK, out, "100000", "warn"])) for host in lab.hosts]
        nodes[0].until(rf"step {KNOWN_STEPS} loss")
        lab.hosts[1].shape(delay_ms=DELAY_MS)
        nodes[0].until(r"rank 1 is slow: .* cause link: its connections' round trips take \d+ us")
        lab.hosts[1].shape()
        nodes[0].until(r"rank 1 is no longer slow \(cause link\)")


def _node(lab: Lab, host: LabHost, job: list[str]) -> contextlib.AbstractContextManager[Process]:
    """`zbmd-node run` with a rank on a host."""
    host.home.joinpath("cookie").touch(mode=0o600)
    host.home.joinpath("cookie").write_text(COOKIE)
    options = ("--nnodes", str(HOSTS), "--nproc-per-node", "1", "--node-rank", str(host.number))
    door = ("--rdzv-endpoint", f"{lab.hosts[0].address}:{PORT}")
    command = str(Path(sys.executable).with_name("zbmd-node"))
    return netns.process(host, command, "run", *options, *door, *job, timeout_s=READ_S)
