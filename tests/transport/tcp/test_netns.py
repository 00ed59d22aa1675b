"""TCP links and bulk stripes between hosts: a pulled cable ends them, delay and loss do not."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.netns import netns
from support.processes.children import children_of

from zbmd.tools.lab.hosts.netns import Lab, LabError, LabHost, sweep
from zbmd.transport.errors import UserError


@pytest.fixture(autouse=True)
def lab_is_there() -> None:
    netns.require_lab()


def interfaces() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_each_host_has_a_name_an_address_and_a_home_of_its_own() -> None:
    before = interfaces()
    with Lab(2) as lab:
        script = (
            "import os, socket; print(socket.gethostname(), os.listdir('/sys/class/net'), os.environ['HOME'])"
        )
        for host in lab.hosts:
            with netns.process(host, sys.executable, "-c", script) as process:
                assert process.until(rf"^{host.name} \['\w+', '\w+'\] {host.home}$")
        assert interfaces() == before, "all devices are the hosts'"
        assert Path(lab.hosts[0].home).stat().st_mode & 0o077 == 0
    assert interfaces() == before


@pytest.mark.parametrize("kind", ["bridged", "shaped"])
def test_nothing_is_left_of_one_that_is_killed(kind: str) -> None:
    command = [sys.executable, PROGRAMS / "transport/killed_lab.py", kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as made:
        assert made.stdout is not None
        assert made.stdout.readline() == b"made\n"
        pidfds = [os.pidfd_open(pid) for pid in children_of(made.pid)]
        made.send_signal(signal.SIGKILL)
    (folder,) = Path(tempfile.gettempdir()).glob(f"zbmd-lab-{made.pid}-*")
    assert len(pidfds) == 3, "two hosts, and the bridge or switch"
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], netns.TIMEOUT_S)[0]
        os.close(pidfd)
    sweep()
    assert not folder.exists(), "its folder goes with the next laboratory"


def test_what_cannot_be_had_is_said() -> None:
    with pytest.raises(UserError, match="17 hosts"):
        Lab(17)
    with Lab(1) as lab, pytest.raises(LabError, match="shaped"):
        lab.hosts[0].shape(delay_ms=1)


def test_the_kernel_keeps_to_a_rate_where_nothing_else_is_shaped() -> None:
    with Lab(2) as lab:
        lab.hosts[1].shape(rate_mbps=250)
        rules = [
            host.popen(["tc", "qdisc", "show", "dev", "eth0"], stdout=-1, text=True) for host in lab.hosts
        ]
        told = [process.communicate()[0] for process in rules]
    assert "tbf" not in told[0] and "tbf" in told[1] and "rate 250Mbit" in told[1]


def test_a_pulled_cable_ends_links_and_stripes_and_a_plugged_one_takes_new_ones() -> None:
    """By the deadline that follows from the budget: nobody says goodbye, so silence has to tell."""
    with Lab(2) as lab:
        with netns.peers(lab, budget="500ms") as (listener, dialer):
            dialer.tell("put 1000000")
            dialer.until("^put intact$")
            lab.hosts[1].pull_cable()
            dialer.tell("put 16000000")
            dialer.until("^put failed PeerLost$")
            for process in (dialer, listener):
                # On a starved machine the kernel's word on the same silence may come before ours.
                reason = process.until("^ended PeerLost (.*)$")[1]
                assert "500 ms" in reason or "Connection timed out" in reason
        lab.hosts[1].plug_cable()
        with netns.peers(lab, budget="500ms") as (_, dialer):
            dialer.tell("frames 1000 100")
            dialer.until("^framed 1000$")


def test_delay_loss_and_a_rate_are_survived_in_order_and_with_nothing_lost(seed: int) -> None:
    with Lab(2, shaped=True, seed=seed) as lab:
        for host in lab.hosts:
            host.shape(delay_ms=20, loss=0.01, rate_mbps=100)
        with netns.peers(lab, budget="1s") as (_, dialer):
            dialer.tell("frames 2000 200")
            dialer.until("^framed 2000$")
            for _ in range(2):
                dialer.tell("put 1000000")
                dialer.until("^put intact$")


def wait_for_timers(host: LabHost, *, all_of: str = "", any_of: str = "") -> None:
    """Until the timers of a host's connections are these: `keepalive,2` has sent two probes in vain."""
    command = [*host.enter(), "ss", "-tnoH", "state", "established"]
    deadline_s, told = time.monotonic() + netns.TIMEOUT_S, ""
    while time.monotonic() < deadline_s:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        timers = {f"{kind},{count}" for kind, count in re.findall(r"timer:\((\w+),[^,]+,(\d+)\)", told)}
        if timers == {all_of} or any_of in timers:
            return
    pytest.fail(f"never {all_of or any_of}, but:\n{told}")


def test_a_probe_that_is_lost_ends_no_idle_connection() -> None:
    """Once it did: a network that lost 0.5 % ended one of a job's idle stripes every second or two."""
    with Lab(2, shaped=True) as lab, netns.peers(lab, budget="1s") as (_, dialer):
        wait_for_timers(lab.hosts[0], all_of="keepalive,0")
        for loss, timers in ((1.0, {"any_of": "keepalive,2"}), (0.0, {"all_of": "keepalive,0"})):
            for host in lab.hosts:
                host.shape(loss=loss)
            wait_for_timers(lab.hosts[0], **timers)
        dialer.tell("frames 10 100")
        dialer.until("^framed 10$")
        dialer.tell("put 1000000")
        dialer.until("^put intact$")


def test_a_cable_pulled_for_less_than_the_deadline_does_no_harm() -> None:
    with Lab(2, shaped=True) as lab, netns.peers(lab, budget="60s") as (_, dialer):
        lab.hosts[0].pull_cable()
        dialer.tell("frames 2000 200")
        lab.hosts[0].plug_cable()
        dialer.until("^framed 2000$")
        lab.hosts[1].shape(rate_mbps=100)
        dialer.tell("put 2000000")
        dialer.until("^put intact$")
