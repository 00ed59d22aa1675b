"""The demo of three hosts, once: a cable pulled and plugged in, a host killed and started."""

from __future__ import annotations

import pytest
from support.netns import netns

from zbmd.tools.lab.hosts import kill_hosts as demo_hosts
from zbmd.transport.clock.deadlines import derive

BUDGET = "3s"
"""No node is taken for gone that gets no processor for a second."""


def test_a_cut_off_host_and_a_killed_one_come_back() -> None:
    netns.require_lab()
    figures = demo_hosts.run(3, 1, BUDGET, delay_ms=0.0, loss=0.0)
    assert list(figures) == [
        "cable pulled to new view",
        "cable pulled to the end of the cut-off",
        "cable plugged in to view of all",
        "host killed to new view",
        "host started to view of all",
    ]
    told = demo_hosts.table(figures, derive().recovery_budget_ns)
    assert told.count("\n") == len(figures) + 1


def test_what_cannot_be_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_hosts.main(["--hosts", "99"]) == 2
    assert "99 hosts: 1 to 16 fit" in capsys.readouterr().err
