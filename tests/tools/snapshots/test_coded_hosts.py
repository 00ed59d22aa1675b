"""Four hosts with a stage each: two are killed at once, their state is rebuilt, and the bits stay."""

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
    """The job may begin before the last host is there, so any of ranks 1 to 3 may be on host 3."""
    netns.require_lab()
    layers = ("--layers", "4")
    arguments = [*SHAPE, *layers, "--steps", str(STEPS), "--data", str(write_text(tmp_path / "text"))]
    plain = plain_by([*arguments, "--out", str(tmp_path / "plain")])
    program, out = str(PROGRAMS / "training/held_up.py"), str(tmp_path / "out")
    job = [program, "train", *arguments, "--mesh", "pp=4", "--redundancy", "ec:2+2", "--out", out]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(tmp_path))
        lab = stack.enter_context(Lab(HOSTS))
        nodes = [stack.enter_context(_node(lab, host, job)) for host in lab.hosts]
        nodes[3].until(r"\]: a rank stands still in step 4")
        for node in nodes[2:]:
            node.close()
        again = [stack.enter_context(_node(lab, host, job)) for host in lab.hosts[2:]]
        result = nodes[0].until(r"\[rank0\]: (\{.*\})")
        assert msgspec.json.decode(result[1])["weights_sha256"] == plain.weights_sha256
        assert [node.end() for node in (*nodes[:2], *again)] == [0] * HOSTS


def _node(lab: Lab, host: LabHost, job: list[str]) -> contextlib.AbstractContextManager[Process]:
    """`zbmd-node run` on a host; two are enough for their ranks to stay, with what they hold."""
    return netns.run_node(lab, host, "--max-restarts", "9", *job, nnodes=f"2:{HOSTS}")
