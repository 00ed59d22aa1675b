"""A job or loop over several hosts, one of which gets a slow cable."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from support.netns import netns
from zbmd.tools.lab.hosts.netns import Lab

KNOWN_STEPS: Final = 160
DELAY_MS: Final = 20.0
READ_S: Final = 300.0
PATIENT: Final = ("--recovery-budget", "1min")
"""No node counts as gone that gets no processor for a while: that would end the job."""


def check_slow_cable(folder: Path, program: Path, hosts: int) -> None:
    """Check that the report names no link at first, then host 1's for its cable, and clears it.

    program: takes a directory, a number of steps or passes, and what to do about stragglers. Of two hosts the
    report names both, since neither end can be told from the other. Skips without a laboratory.
    """
    netns.require_lab()
    named = "all links between hosts (of ranks 0, 1) are" if hosts == 2 else "rank 1 is"
    named = named.replace("(", r"\(").replace(")", r"\)")
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts, shaped=True))
        job = (*PATIENT, str(program), str(folder / "out"), "100000", "warn")
        nodes = [
            stack.enter_context(netns.run_node(lab, host, *job, nnodes=str(hosts), timeout_s=READ_S))
            for host in lab.hosts
        ]
        quiet = nodes[0].until(rf"cause link|step {KNOWN_STEPS} loss")
        assert quiet[0] != "cause link", nodes[0].text
        lab.hosts[1].shape(delay_ms=DELAY_MS)
        report = nodes[0].until(rf"({named} slow: .* cause link: .*)")
        assert "round trips take" in report[1], report[1]
        lab.hosts[1].shape()
        nodes[0].until(rf"{named} no longer slow \(cause link\)")
