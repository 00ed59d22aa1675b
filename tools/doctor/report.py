"""What `zbmd-node doctor` has found, as data: the findings that are printed, and the facts behind them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import msgspec

from zbmd.transport.clock.deadlines import Derived
from zbmd.transport.host.link_choice import LinkChoice
from zbmd.transport.host.topology import Affinity, Topology

SCHEMA: Final = 1
"""Of the JSON: it grows when a field is renamed, removed or changes its meaning, not when one is added."""


class FindingState(Enum):
    """Severity of a finding. Only `NOT_OK` keeps jobs from running as they should."""

    OK = "ok"
    NOT_OK = "not ok"
    NOTE = "note"


class Section(Enum):
    """The parts of the report, in order."""

    MACHINE = "machine"
    ACCELERATORS = "accelerators"
    NETWORK = "network"
    RDMA = "rdma"
    LINKS = "links"
    DEADLINES = "deadlines"
    LIMITS = "limits"
    SPEED = "speed"
    EXTRAS = "extras"

    def finding(self, name: str, state: FindingState, detail: str, advice: str = "") -> Finding:
        """Return a finding of this part."""
        return Finding(section=self, name=name, state=state, detail=detail, advice=advice)

    def ok(self, name: str, detail: str, advice: str = "") -> Finding:
        """Return one that is as it should be."""
        return self.finding(name, FindingState.OK, detail, advice)

    def not_ok(self, name: str, detail: str, advice: str = "") -> Finding:
        """Return one that keeps jobs from running."""
        return self.finding(name, FindingState.NOT_OK, detail, advice)

    def note(self, name: str, detail: str, advice: str = "") -> Finding:
        """Return one that is worth knowing."""
        return self.finding(name, FindingState.NOTE, detail, advice)

    def check(self, name: str, ok: bool, detail: str, advice: str) -> Finding:
        """Return one that is `ok`, or advises what to do."""
        return self.ok(name, detail) if ok else self.not_ok(name, detail, advice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line. `advice` says what to do when it is not `OK`."""

    section: Section
    name: str
    state: FindingState
    detail: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLink:
    """The link between two processes; `choice` is None if there is none, and `error` says why."""

    between: tuple[str, str]
    choice: LinkChoice | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedDeadline:
    """A deadline that does not follow from the budget, and why not."""

    name: str
    value_ns: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineReport:
    """The budget, where it was set, and every deadline."""

    recovery_budget_ns: int
    source: str
    same_host_path_ns: int
    across_hosts_path_ns: int
    derived: tuple[Derived, ...]
    fixed: tuple[FixedDeadline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Extra:
    """Something optional: its version if it is there, and how to get it.

    needed: whether this machine has use for it.
    """

    name: str
    purpose: str
    install: str
    version: str | None
    needed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of it, as `--json` prints it."""

    schema: int
    version: str
    host: str
    ok: bool
    findings: tuple[Finding, ...]
    usable_cpus: int
    topology: Topology
    affinities: tuple[Affinity, ...]
    links: tuple[PairLink, ...]
    deadlines: DeadlineReport
    extras: tuple[Extra, ...]


def as_json(report: Report) -> str:
    """The report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()
