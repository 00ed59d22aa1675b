"""The training job over three hosts: a cable is pulled and plugged in, and the weights are a plain run's."""

from __future__ import annotations

import netns
import pytest

from zbmd.tools import demo_hosts_job

STEPS = 300


@pytest.mark.slow
def test_a_host_is_cut_off_and_comes_back_and_the_bits_stay() -> None:
    netns.require_lab()
    figures, same = demo_hosts_job.run(STEPS, kill=False)
    assert same
    assert list(figures) == [
        "cable pulled to new view, ms",
        "cable pulled to the next committed step, ms",
        "as the cut-off host joins: the longest time between two steps, ms",
        "an ordinary step, ms",
        "the longest time between two steps of the whole run, ms",
    ]
