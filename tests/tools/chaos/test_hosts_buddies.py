"""Two hosts with two ranks each: one is killed, its ranks' state comes from the other, and the bits stay.

ZeRO goes on with the ranks that are left; the stages of a pipeline wait for another host.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec
import pytest
from programs import PROGRAMS
from support.jobs.by_words import plain_by
from support.netns import netns
from support.netns.netns import Process

from zbmd.tools.chaos.small_job import SHAPE, STEPS, write_text
from zbmd.tools.lab.hosts.netns import Lab, LabHost


@pytest.mark.parametrize(
    "options", [("--zero", "3"), ("--layers", "2", "--mesh", "pp=4", "--balance", "on")], ids=" ".join
)
def test_what_a_lost_host_held_comes_from_the_other(tmp_path: Path, options: tuple[str, ...]) -> None:
    netns.require_lab()
    layers = options[:2] if options[0] == "--layers" else ()
    arguments = [*SHAPE, *layers, "--steps", str(STEPS), "--data", str(write_text(tmp_path / "text"))]
    out = str(tmp_path / "plain")
    plain = plain_by([*arguments, "--out", out])
    job = [
        str(PROGRAMS / "training/held_up.py"),
        "train",
        *arguments,
        *options,
        "--out",
        str(tmp_path / "out"),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(tmp_path))
        lab = stack.enter_context(Lab(2))
        first, second = [stack.enter_context(_node(lab, host, job)) for host in lab.hosts]
        second.until(r"\]: a rank stands still in step 4")
        second.close()
        waits = "--mesh" in options
        nodes = [first, *([stack.enter_context(_node(lab, lab.hosts[1], job))] if waits else [])]
        result = first.until(r"\[rank0\]: (\{.*\})")
        assert msgspec.json.decode(result[1])["weights_sha256"] == plain.weights_sha256
        assert [node.end() for node in nodes] == [0] * len(nodes)


def _node(lab: Lab, host: LabHost, job: list[str]) -> contextlib.AbstractContextManager[Process]:
    """`zbmd-node run` on a host. One node is enough for its ranks to stay, with what they hold."""
    return netns.run_node(lab, host, "--max-restarts", "9", *job, nnodes="1:2", ranks=2)
