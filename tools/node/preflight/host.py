"""Measurements of this host by itself for `--preflight`, at its start and between restarts. Blocking."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from zbmd.tools.doctor.checks import limit_findings
from zbmd.tools.doctor.command import lines_of
from zbmd.tools.doctor.probes import TIMEOUT_S, judge, measure_host
from zbmd.tools.doctor.report import Finding, FindingState, Section
from zbmd.tools.node.preflight.gate import Depth, depth_of, slower_than_before
from zbmd.tools.node.preflight.survey import HostSpeed
from zbmd.transport.errors import UserError
from zbmd.transport.host.topology import read_topology

AGAIN_S: Final = 10.0
"""For a measurement between restarts; the gate waits a little longer."""
AGAIN_TRIES: Final = 3
"""Of a host that seems to have become slow; the best one counts, as other work on it may pass."""


@dataclass(slots=True)
class MeasuredHost:
    """This host, which was fit when the node began. first: its speed then; speed: its last one.

    problem: why it is not fit any more; empty: it is. whole_ns, last_ns: when all of it, and any of it, was
    measured last.
    """

    first: HostSpeed
    speed: HostSpeed
    whole_ns: int
    last_ns: int
    folder: Path = field(default_factory=Path.cwd)
    problem: str = ""

    def measure(self, *, ran_since: bool) -> Depth:
        """Measure as much as is needed, in `AGAIN_S`; return how much that was."""
        now_ns = time.monotonic_ns()
        depth = depth_of(whole_ns=self.whole_ns, last_ns=self.last_ns, ran_since=ran_since, now_ns=now_ns)
        if depth is Depth.KEPT:
            return depth
        until_s = time.monotonic() + AGAIN_S
        for _ in range(AGAIN_TRIES):
            speed, findings = measured(self.folder, quick=depth is Depth.QUICK, until_s=until_s)
            bad = [f"{one.name}: {one.detail}" for one in findings if one.state is FindingState.NOT_OK]
            self.problem = "; ".join(bad)
            if speed is not None:
                self.speed = speed
                self.problem = self.problem or slower_than_before(self.first, speed)
            if not self.problem or time.monotonic() >= until_s:
                break
        self.last_ns = now_ns
        if depth is Depth.WHOLE:
            self.whole_ns = now_ns
        return depth


def measured(folder: Path, *, quick: bool, until_s: float) -> tuple[HostSpeed | None, list[Finding]]:
    """Measure this host until then, at the longest; return its speed, None without one, and the findings."""
    speed: HostSpeed | None = None
    try:
        found = measure_host(folder, quick=quick, timeout_s=max(0.1, until_s - time.monotonic()))
        flops_per_s = statistics.median(one.flops_per_s for one in found.cpus)
        speed = HostSpeed(flops_per_s=flops_per_s, memory_per_s=found.memory_per_s)
        return speed, [*judge(found), *limit_findings(read_topology())]
    except UserError as error:
        return speed, [Section.SPEED.not_ok("preflight", str(error), "do not use this host")]


def measured_host() -> MeasuredHost | None:
    """Measure this host as a whole, and print the findings; return it, None if it is not fit."""
    folder = Path.cwd()
    speed, findings = measured(folder, quick=False, until_s=time.monotonic() + TIMEOUT_S)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"zbmd-node: preflight {lines_of(finding, width, None)}", file=sys.stderr)
    bad = [finding.name for finding in findings if finding.state is FindingState.NOT_OK]
    if bad or speed is None:
        print(f"zbmd-node: this host does not take part: {', '.join(bad)}", file=sys.stderr)
        return None
    now_ns = time.monotonic_ns()
    return MeasuredHost(first=speed, speed=speed, whole_ns=now_ns, last_ns=now_ns, folder=folder)
