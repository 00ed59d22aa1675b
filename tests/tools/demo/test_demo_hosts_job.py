"""The training job over three hosts: a cable is pulled, a host killed, and the weights are a plain run's."""

from __future__ import annotations

import pytest
from support.netns import netns

from zbmd.tools.lab.hosts import job as demo_hosts_job

PATIENT_NS = 3_000_000_000
"""Of the recovery budget: no node is taken for gone that gets no processor for a second."""


@pytest.mark.slow
def test_a_host_is_cut_off_and_comes_back_and_the_bits_stay() -> None:
    netns.require_lab()
    figures, same = demo_hosts_job.run(kill=False, budget_ns=PATIENT_NS)
    assert same
    assert list(figures) == [
        "cable pulled to new view, ms",
        "cable pulled to the notice of it, ms",
        "cable pulled: the next committed step beyond the notice, ms",
        "cable pulled to the next committed step, ms",
        "as the cut-off host joins: the longest time between two steps, ms",
        "an ordinary step, ms",
        "the longest time between two steps of the whole run, ms",
    ]


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_one_that_is_killed_and_the_bits_stay() -> None:
    """Four ranks on two hosts; that the host is gone, its peers find out by its silence alone. The network is
    slow, loses packets, and is some way long.
    """
    netns.require_lab()
    figures, same = demo_hosts_job.run(
        layout=demo_hosts_job.WITH_SPARE,
        delay_ms=1,
        loss=0.002,
        rate_mbps=100,
        pull=False,
        budget_ns=PATIENT_NS,
    )
    assert same
    assert list(figures)[:3] == [
        "host killed to the notice of it, ms",
        "host killed: the next committed step beyond the notice, ms",
        "host killed to the next committed step, ms",
    ]
