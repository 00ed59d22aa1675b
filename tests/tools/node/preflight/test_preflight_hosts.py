"""`--preflight` over several hosts: one with a slow cable is named and leaves, and a spare one is taken."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from functools import partial
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.netns import netns
from support.netns.netns import Process

from zbmd.actors.process.exit import REQUEUE_EXIT_CODE
from zbmd.tools.lab.hosts.netns import Lab, LabHost
from zbmd.tools.node.preflight.gate import LIMIT_NS
from zbmd.tools.node.preflight.links import STRANGERS_MAX, TOKEN_BYTES, probe, serve_probe
from zbmd.tools.node.preflight.survey import LinkSpeed

HOSTS = 4
SLOW, LOST = 2, 3
LIMIT_S = LIMIT_NS / 1e9
PROGRAM = PROGRAMS / "tools" / "makes_step.py"


@pytest.mark.slow
def test_a_host_with_a_slow_cable_does_not_take_part() -> None:
    netns.require_lab()
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(HOSTS + 1))
        for host in lab.hosts:  # as fast as one processor for all of them sends beside other work
            host.shape(rate_mbps=4 if host.number == SLOW else 100)
        nodes = [stack.enter_context(_node(lab, host, host.number)) for host in lab.hosts[:HOSTS]]
        nodes[0].until(r"preflight: \S+ does not take part: its link to \S+ is bad: [\d.,]+ MB/s, where")
        assert _limit_of(nodes[0], "before the job begins", HOSTS - 1, HOSTS) <= LIMIT_S
        nodes[SLOW].until(r"preflight: this host does not take part: its link to")
        assert nodes[SLOW].ended() == REQUEUE_EXIT_CODE
        spare = stack.enter_context(_node(lab, lab.hosts[HOSTS], SLOW))
        assert _limit_of(nodes[0], "before the job begins", 1, 1, of_all=HOSTS) <= LIMIT_S
        good = [spare, *(node for number, node in enumerate(nodes) if number != SLOW)]
        assert [node.end() for node in good] == [0] * HOSTS


@pytest.mark.slow
def test_a_host_whose_cable_became_slow_gets_no_ranks_when_they_start_again(tmp_path: Path) -> None:
    netns.require_lab()
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(HOSTS + 1))
        for host in lab.hosts:
            host.shape(rate_mbps=100)
        job = ("--preflight", "--recovery-budget", "20s", str(PROGRAM), str(tmp_path / "go"))
        run = partial(netns.run_node, lab, nnodes=str(HOSTS), timeout_s=400.0)
        nodes = [stack.enter_context(run(host, *job, number=host.number)) for host in lab.hosts[:HOSTS]]
        assert _limit_of(nodes[0], "before the job begins", HOSTS, HOSTS) <= LIMIT_S
        nodes[0].until(rf"rank 0 of {HOSTS} has made a step")
        nodes[LOST].process.kill()
        lab.hosts[SLOW].shape(rate_mbps=4)  # between the first step and the restart
        back = stack.enter_context(run(lab.hosts[LOST], *job, number=LOST))
        back.until(r"this node is \S+ at ")
        nodes[0].until(r"preflight: \S+ does not take part: its link to \S+ is bad: [\d.,]+ MB/s, where")
        assert _limit_of(nodes[0], "before ranks start again", HOSTS - 1, HOSTS) <= LIMIT_S
        nodes[SLOW].until(r"preflight: this host does not take part: its link to")
        assert nodes[SLOW].ended() == REQUEUE_EXIT_CODE
        spare = stack.enter_context(run(lab.hosts[HOSTS], *job, number=SLOW))
        assert _limit_of(nodes[0], "before ranks start again", 1, 1, of_all=HOSTS) <= LIMIT_S
        (tmp_path / "go").touch()
        good = [nodes[0], *(nodes[n] for n in range(1, HOSTS) if n not in (SLOW, LOST)), back, spare]
        assert [node.end() for node in good] == [0] * HOSTS


def _limit_of(node: Process, when: str, fit: int, hosts: int, *, of_all: int = 0) -> float:
    """Return how long a check took, as the node reports it. of_all: hosts that are here, all of them fit."""
    words = rf"preflight: {when}: {fit} of {hosts} hosts are fit, checked in ([\d.]+) s"
    words += rf" \(all hosts: {of_all} of {of_all}\)$" if of_all else "$"
    return float(node.until(words)[1])


def _node(lab: Lab, host: LabHost, number: int) -> contextlib.AbstractContextManager[Process]:
    job = ("--preflight", "-m", "this")
    return netns.run_node(lab, host, *job, nnodes=str(HOSTS), number=number, timeout_s=240.0)


# ---- a link


@pytest.fixture
def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_a_link_is_measured_by_who_knows_the_token(listener: socket.socket) -> None:
    token = secrets.token_bytes(TOKEN_BYTES)
    thread = threading.Thread(target=serve_probe, args=(listener, token))
    thread.start()
    address = listener.getsockname()
    refused = probe(address, bytes(TOKEN_BYTES))
    assert isinstance(refused, str) and "cannot be measured" in refused
    found = probe(address, token)
    assert isinstance(found, LinkSpeed) and found.bytes_per_s > 0 and found.trip_ns > 0
    thread.join()
    gone = probe(address, token)
    assert isinstance(gone, str) and "cannot be measured" in gone


def test_strangers_do_not_keep_a_host_for_ever(listener: socket.socket) -> None:
    thread = threading.Thread(target=serve_probe, args=(listener, secrets.token_bytes(TOKEN_BYTES)))
    thread.start()
    for _ in range(STRANGERS_MAX):
        assert isinstance(probe(listener.getsockname(), bytes(TOKEN_BYTES)), str)
    thread.join()
