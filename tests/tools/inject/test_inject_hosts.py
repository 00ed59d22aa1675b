"""A host whose cable becomes slow while a job runs is named for its link, and cleared."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.netns import netns

from zbmd.tools.lab.hosts.netns import Lab

HOSTS = 3
WORK = str(PROGRAMS / "training/even_work.py")
KNOWN_STEPS = 160
DELAY_MS = 20.0
READ_S = 300.0
PATIENT = ("--recovery-budget", "1min")
"""No node counts as gone that gets no processor for a while: that would end the job."""


@pytest.mark.slow
def test_a_host_behind_a_slow_cable_is_named_for_its_link_and_cleared(tmp_path: Path) -> None:
    netns.require_lab()
    out = str(tmp_path / "out")
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(HOSTS, shaped=True))
        job = (*PATIENT, WORK, out, "100000", "warn")
        nodes = [
            stack.enter_context(netns.run_node(lab, host, *job, nnodes=str(HOSTS), timeout_s=READ_S))
            for host in lab.hosts
        ]
        nodes[0].until(rf"step {KNOWN_STEPS} loss")
        lab.hosts[1].shape(delay_ms=DELAY_MS)
        nodes[0].until(r"rank 1 is slow: .* cause link: its connections' round trips take \d+ us")
        lab.hosts[1].shape()
        nodes[0].until(r"rank 1 is no longer slow \(cause link\)")
