"""Four hosts, of which two are killed at once: their state is rebuilt or copied, and the bits stay."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
from programs import PROGRAMS
from support.jobs.by_words import plain_by
from support.netns import netns
from support.netns.netns import Process

from zbmd.tools.chaos.small_job import SHAPE, STEPS, write_text
from zbmd.tools.lab.hosts.netns import Lab, LabHost

HOSTS = 4


def test_two_of_four_hosts_are_lost_at_once(tmp_path: Path) -> None:
    says = (
        r"ec:2\+2: groups of ranks: 1 of 2\+2, none with two in one of 4 domains: host 0 \(1\), host 1 \(1\)"
    )
    _lost_and_back(tmp_path, "ec:2+2", lost=(2, 3), says=says)


def test_all_hosts_of_a_named_domain_are_lost_at_once(tmp_path: Path) -> None:
    """By hosts alone, ranks 1 and 3 would have protected each other."""
    says = (
        r"ec:2\+1: groups of ranks: 2 of 1\+1, none with two in one of 2 domains: rack-a \(2\), rack-b \(2\)"
    )
    racks = ("rack-a", "rack-b", "rack-a", "rack-b")
    _lost_and_back(tmp_path, "ec:2+1", lost=(1, 3), domains=racks, says=says)


def test_a_domain_with_a_state_and_all_of_its_replicas_is_lost_at_once(tmp_path: Path) -> None:
    """Ranks 1 and 3 hold the same stage: one in the other rack has a copy, which replicas alone have not."""
    says = "redundancy buddy: it was asked for"
    racks = ("rack-a", "rack-b", "rack-a", "rack-b")
    _lost_and_back(tmp_path, "buddy", lost=(1, 3), domains=racks, says=says, mesh="dp=2,pp=2")


def _lost_and_back(
    tmp_path: Path,
    redundancy: str,
    *,
    lost: tuple[int, ...],
    domains: tuple[str, ...] = (),
    says: str,
    mesh: str = "pp=4",
) -> None:
    """Kill some of four hosts at once and start them again. says: what the first one says of the groups.

    The job may begin before the last host is there, so any of ranks 1 to 3 may be on host 3.
    """
    netns.require_lab()
    layers = ("--layers", "4")
    arguments = [*SHAPE, *layers, "--steps", str(STEPS), "--data", str(write_text(tmp_path / "text"))]
    plain = plain_by([*arguments, "--out", str(tmp_path / "plain")])
    program, out = str(PROGRAMS / "training/held_up.py"), str(tmp_path / "out")
    job = [program, "train", *arguments, "--mesh", mesh, "--redundancy", redundancy, "--out", out]

    def start(host: LabHost) -> Process:
        domain = ("--domain", domains[host.number]) if domains else ()
        return stack.enter_context(_node(lab, host, *domain, *job))

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(tmp_path))
        lab = stack.enter_context(Lab(HOSTS))
        nodes = [start(host) for host in lab.hosts]
        nodes[3].until(r"\]: a rank stands still in step 4")
        for number in lost:
            nodes[number].close()
        nodes = [start(lab.hosts[at]) if at in lost else node for at, node in enumerate(nodes)]
        nodes[0].until(says)
        result = nodes[0].until(r"\[rank0\]: (\{.*\})")
        assert msgspec.json.decode(result[1])["weights_sha256"] == plain.weights_sha256
        assert [node.end() for node in nodes] == [0] * HOSTS


def _node(lab: Lab, host: LabHost, *words: str) -> contextlib.AbstractContextManager[Process]:
    """`zbmd-node run` on a host; two are enough for their ranks to stay, with what they hold."""
    return netns.run_node(lab, host, "--max-restarts", "9", *words, nnodes=f"2:{HOSTS}")
