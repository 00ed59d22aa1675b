"""A host whose cable becomes slow while a job runs is named for its link, and one link for itself."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.netns import netns

from zbmd.tools.lab.hosts.netns import Lab
from zbmd.tools.telemetry.diagnosis.findings import Finding
from zbmd.tools.telemetry.diagnosis.readers import evidence_of
from zbmd.tools.telemetry.diagnosis.rules import diagnose

HOSTS = 3
WORK = str(PROGRAMS / "training/even_work.py")
KNOWN_STEPS = 160
DELAY_MS = 20.0
READ_S = 300.0
LINK = r"the link between 10\.77\.0\.2 \(rank 1\) and 10\.77\.0\.3 \(rank 2\)"
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
        lab.hosts[1].shape_link(lab.hosts[2], delay_ms=DELAY_MS)
        nodes[0].until(
            rf"step \d+ {LINK} is slow: .* cause link: [\d.]+ ms for a round trip, where others take"
        )
        assert diagnosed(out).ranks == (1, 2)
        lab.hosts[1].shape_link(lab.hosts[2], delay_ms=0.0)
        nodes[0].until(rf"{LINK} is no longer slow \(cause link\)")


def diagnosed(out: str) -> Finding:
    """Return the finding of `zbmd diagnose` on the slow link, while the run goes on."""
    found = diagnose(evidence_of(out))
    return next(one for one in (found.root, *found.others) if one is not None and re.match(LINK, one.summary))
