"""`zbmd-node doctor`: can this machine run jobs, over which links, and by which deadlines."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TextIO

import rich.console
import rich.text

import zbmd
from zbmd.actors.cluster.jobs.host_links import ACTORS_ASK_S
from zbmd.actors.core.system import STOP_S
from zbmd.actors.process.template_client import READY_S_MAX
from zbmd.collectives.communicator.operations import TIMEOUT_S_DEFAULT
from zbmd.tools.cli.settings import merge
from zbmd.tools.doctor.checks import (
    accelerator_findings,
    extra_findings,
    find_extras,
    limit_findings,
    link_findings,
    local_link,
    machine_findings,
    network_findings,
    probe_finding,
    read_interface_filter,
)
from zbmd.tools.doctor.peers import PEERS_MAX, Peer, examine, parse_peer
from zbmd.tools.doctor.probes import judge, measure_host
from zbmd.tools.doctor.rdma import rdma_findings, read_wanted
from zbmd.tools.doctor.report import (
    SCHEMA,
    DeadlineReport,
    Finding,
    FindingState,
    FixedDeadline,
    PairLink,
    Report,
    Section,
    as_json,
)
from zbmd.transport.clock.deadlines import Deadlines, derive, format_duration
from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import Capabilities
from zbmd.transport.host.topology import affinities, read_host_facts, read_topology

EXAMPLES = """\
examples:
  zbmd-node doctor                          this machine, its links and deadlines
  zbmd-node doctor --peer node2             is node2 there, and over which interface
  zbmd-node doctor --peer node2:29400 --peer '[2001:db8::7]:29400'
  zbmd-node doctor --recovery-budget 5s     the deadlines of another budget
  zbmd-node doctor --json | jq '.findings[] | select(.state == "not ok")'

The exit code is 0 if all is well, 1 if a line says NOT OK, 2 if the command line is wrong.
"""

FIXED: Final = (
    FixedDeadline(
        name="template",
        value_ns=round(READY_S_MAX * 1e9),
        reason="the first start of a job: it bounds imports, and there is no rank yet that could recover",
    ),
    FixedDeadline(
        name="group operation",
        value_ns=round(TIMEOUT_S_DEFAULT * 1e9),
        reason="for a member that lives and does not come: more than it may compute between two calls",
    ),
    FixedDeadline(
        name="actor stop",
        value_ns=round(STOP_S * 1e9),
        reason="an actor's own clean-up; how long the end of a run may take is stop_grace and stop_kill",
    ),
    FixedDeadline(
        name="status question",
        value_ns=round(ACTORS_ASK_S * 1e9),
        reason="zbmd-node status asks a rank; no recovery waits for the answer",
    ),
)

WIDTH_MIN: Final = 30
WIDTH_MAX: Final = 120
_MARKS: Final = {FindingState.OK: "ok", FindingState.NOT_OK: "NOT OK", FindingState.NOTE: "-"}
_STYLES: Final = {FindingState.OK: "green", FindingState.NOT_OK: "bold red", FindingState.NOTE: ""}
_TITLES: Final = {Section.RDMA: "RDMA", Section.EXTRAS: "OPTIONAL PARTS"}


def main(arguments: Namespace, environment: Mapping[str, str] = os.environ) -> int:
    """Print the report; 0 if all is well. Raises `UserError` on options that make no sense."""
    texts: list[str] = arguments.peer or []
    if len(texts) > PEERS_MAX:
        raise UserError(f"{len(texts)} peers are too many. Give at most {PEERS_MAX} at a time.")
    peers = [parse_peer(text) for text in texts]
    deadlines, source, settings = _settings(arguments, environment)
    speeds = tuple(judge(measure_host(Path.cwd()))) if arguments.measure else ()
    report = asyncio.run(examine_host(peers, deadlines, source, settings, environment, speeds))
    if arguments.json:
        print(as_json(report))
    else:
        show(report, sys.stdout)
    return 0 if report.ok else 1


def _settings(arguments: Namespace, environment: Mapping[str, str]) -> tuple[Deadlines, str, Finding]:
    """The deadlines, where their budget was set, and whether all settings make sense."""
    on_line = {"recovery_budget": arguments.recovery_budget}
    try:
        merged = merge(on_line, environment, arguments.config)
    except UserError as error:
        if arguments.recovery_budget is not None or arguments.config is not None:
            raise  # what was typed is corrected at once
        finding = Section.MACHINE.not_ok("settings", str(error), "correct or unset it")
        return derive(), "default", finding
    chosen = merged.chosen["recovery_budget"]
    others = [
        f"{name} from {each.source}" for name, each in merged.chosen.items() if each.source != "default"
    ]
    detail = ", ".join(others) or "all defaults"
    finding = Section.MACHINE.ok("settings", detail)
    return derive(round(chosen.value * 1e9)), chosen.source, finding


async def examine_host(
    peers: list[Peer],
    deadlines: Deadlines,
    source: str,
    settings: Finding,
    environment: Mapping[str, str],
    speeds: tuple[Finding, ...] = (),
) -> Report:
    """Look at everything. Takes as long as the peers take to answer, each by the deadline of a dial.

    speeds: what was measured of this host before.
    """
    topology = read_topology()
    facts = read_host_facts()
    near = affinities(topology)
    wanted, wrong = read_interface_filter(environment)
    can = Capabilities(interfaces=wanted, rdma_devices=read_wanted(environment))
    links: list[PairLink] = [local_link(facts, can)]
    probed = [await probe_finding(deadlines)]
    timeout_s = deadlines.dial_ns / 1e9
    for link, findings in await asyncio.gather(*(examine(peer, facts, can, timeout_s) for peer in peers)):
        links.append(link)
        probed += findings
    extras = find_extras(topology)
    report = deadline_report(deadlines, source)
    found = (
        *machine_findings(topology),
        settings,
        *accelerator_findings(topology, near),
        *network_findings(topology, wanted),
        *([wrong] if wrong is not None else []),
        *rdma_findings(topology, facts, environment),
        *link_findings(tuple(links)),
        *probed,
        *deadline_findings(report),
        *limit_findings(topology),
        *speeds,
        *extra_findings(extras, topology),
    )
    return Report(
        schema=SCHEMA,
        version=zbmd.__version__,
        host=facts.name,
        ok=all(finding.state is not FindingState.NOT_OK for finding in found),
        findings=found,
        usable_cpus=topology.cpus.usable,
        topology=topology,
        affinities=near,
        links=tuple(links),
        deadlines=report,
        extras=extras,
    )


def deadline_report(deadlines: Deadlines, source: str) -> DeadlineReport:
    """Every deadline of a budget."""
    return DeadlineReport(
        recovery_budget_ns=deadlines.recovery_budget_ns,
        source=source,
        same_host_path_ns=deadlines.same_host_path_ns,
        across_hosts_path_ns=deadlines.across_hosts_path_ns,
        derived=deadlines.explain(),
        fixed=FIXED,
    )


def deadline_findings(report: DeadlineReport) -> Iterator[Finding]:
    """The budget and what it holds, then each deadline with its rule and reason."""
    budget, one, across = map(
        format_duration, (report.recovery_budget_ns, report.same_host_path_ns, report.across_hosts_path_ns)
    )
    fits = max(report.same_host_path_ns, report.across_hosts_path_ns) <= report.recovery_budget_ns
    detail = f"{budget} ({report.source}); a recovery takes {one} of it on one host, {across} across hosts"
    yield Section.DEADLINES.check("recovery_budget", fits, detail, "")
    for each in report.derived:
        detail = f"{format_duration(each.value_ns)} = {each.rule} ({each.kind.value}): {each.reason}"
        yield Section.DEADLINES.note(each.name, detail)
    for fixed in report.fixed:
        detail = f"{format_duration(fixed.value_ns)}, fixed: {fixed.reason}"
        yield Section.DEADLINES.note(fixed.name, detail)


# --- text -----------------------------------------------------------------------------------------------


def show(report: Report, file: TextIO) -> None:
    """Print the report in lines of the terminal's width, or one line a finding where there is none."""
    console = rich.console.Console(file=file, highlight=False, soft_wrap=True)
    width = min(shutil.get_terminal_size().columns, WIDTH_MAX) if console.is_terminal else None

    def say(text: str, style: str = "") -> None:
        wrapped = text if width is None else _fill(text, width, "", "")
        console.print(rich.text.Text(wrapped, style=style))

    def show_finding(finding: Finding, name_width: int) -> None:
        text = rich.text.Text(lines_of(finding, name_width, width))
        whole = finding.state is FindingState.NOT_OK
        text.stylize(_STYLES[finding.state], 0, len(text) if whole else len(_MARKS[finding.state]))
        console.print(text)

    say(f"zbmd {report.version} on {report.host}, {platform.system()} {platform.machine()}")
    for section in Section:
        found = [finding for finding in report.findings if finding.section is section]
        say(f"\n{_TITLES.get(section, section.value.upper())}", "bold")
        for finding in found:
            show_finding(finding, max(len(each.name) for each in found))
    wrong = [finding for finding in report.findings if finding.state is FindingState.NOT_OK]
    say("")
    if not wrong:
        say("All is well: this machine can run jobs.", "bold green")
        return
    say(f"NOT OK: {len(wrong)} of {len(report.findings)} lines. Jobs may not run as they should:", "bold red")
    for finding in wrong:
        show_finding(finding, len(finding.name))


def lines_of(finding: Finding, name_width: int, width: int | None) -> str:
    """A finding in lines of `width` characters; None for one line of any length."""
    text = finding.detail
    if finding.advice:
        word = "To do" if finding.state is FindingState.NOT_OK else "Advice"
        text = f"{text.rstrip('.')}. {word}: {finding.advice}"
    mark = f"{_MARKS[finding.state]:7} "
    head = f"{mark}{finding.name:{name_width}}  "
    if width is None:
        return f"{head}{text}".replace("\n", " ")
    if len(head) <= width // 2:
        return _fill(text, width, head, " " * len(head))
    indent = " " * len(mark)
    return f"{_fill(finding.name, width, mark, indent)}\n{_fill(text, width, indent, indent)}"


def _fill(text: str, width: int, first: str, rest: str) -> str:
    """Wrapped between words only, so that a command or path can be copied."""
    return "\n".join(
        textwrap.wrap(
            text,
            max(width, WIDTH_MIN),
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        )
    )
