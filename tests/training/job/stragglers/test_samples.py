"""Samples of steps: phases, collections, other threads, and counters of a kernel."""

from __future__ import annotations

import gc
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from zbmd.training.job.stragglers import samples
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS, Field, Sampler
from zbmd.training.profiler.lines import StepLine
from zbmd.transport.tcp.sockets import smoothed_round_trip


def line(**ns: int) -> StepLine:
    wall = sum(ns.values())
    return StepLine(
        step=1, begin_ns=0, end_ns=wall, ns=ns, unit_ns={}, passes={}, flops=0, hardware_flops=0, overlap=None
    )


def test_phases_are_those_of_the_profile() -> None:
    with closing(Sampler(3)) as sampler:
        sampler.restart()
        gc.disable()
        try:
            made = sampler.sample(
                line(forward=5, backward=7, recompute=1, optimizer=2, data=4, comm=9, idle=3)
            )
        finally:
            gc.enable()
    assert made.shape == (SAMPLE_NUMBERS,) and made[Field.KNOWN] == 1 and made[Field.INCARNATION] == 3
    assert [made[field] for field in (Field.PASSES, Field.UPDATE, Field.DATA, Field.WAIT)] == [13, 2, 4, 9]


def test_collections_are_counted_and_taken_from_the_passes() -> None:
    with closing(Sampler(1)) as sampler:
        sampler.restart()
        gc.collect()
        made = sampler.sample(line(forward=10**12))
    assert made[Field.COLLECTOR] > 0
    assert made[Field.PASSES] == 10**12 - made[Field.COLLECTOR]
    assert sampler._collecting not in gc.callbacks


def test_other_threads_that_compute_are_counted() -> None:
    with closing(Sampler(1)) as sampler:
        sampler.restart()
        busy = threading.Thread(target=lambda: sum(range(3_000_000)))
        busy.start()
        busy.join()
        made = sampler.sample(line(forward=1))
    assert made[Field.OTHERS] > 0


def test_only_delays_of_passes_and_updates_count(tmp_path: Path) -> None:
    """Those at the end of waits slow no rank; what the thread has computed was no delay either."""
    thread = tmp_path / f"proc/self/task/{threading.get_native_id()}/schedstat"
    thread.parent.mkdir(parents=True)
    thread.write_text("0 0 0")
    ms = 1_000_000
    with closing(Sampler(1, root=tmp_path)) as sampler:
        thread.write_text(f"0 {80 * ms} 0")
        waited = sampler.sample(line(backward=4 * ms, optimizer=ms, comm=100 * ms))
        thread.write_text(f"0 {160 * ms} 0")
        sampler.restart()
        until_ns = time.thread_time_ns() + 50 * ms
        while time.thread_time_ns() < until_ns:
            pass
        thread.write_text(f"0 {240 * ms} 0")
        computed = sampler.sample(line(backward=60 * ms, comm=100 * ms))
        thread.write_text(f"0 {241 * ms} 0")
        short = sampler.sample(line(backward=60 * ms, comm=100 * ms))
    assert 0 < waited[Field.DELAY] <= 5 * ms
    assert computed[Field.DELAY] <= 10 * ms
    assert short[Field.DELAY] == ms


def test_steal_and_quota_are_rates_of_what_the_kernel_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    stat, quota = tmp_path / "proc/stat", tmp_path / "sys/fs/cgroup/job/cpu.stat"
    quota.parent.mkdir(parents=True)
    stat.write_text("cpu  1 2 3 4 5 6 7 100 0 0\n")
    quota.write_text("usage_usec 5\nthrottled_usec 1000\n")
    rates = samples._Rates(tmp_path)
    with closing(rates):
        rates._at_ns -= samples.RATES_EVERY_NS
        stat.write_text("cpu  1 2 3 4 5 6 7 105 0 0\n")
        quota.write_text("usage_usec 5\nthrottled_usec 101000\n")
        found = rates.read()
    assert 0 < found.steal <= 1 and 0 < found.throttled <= 100_000_000 / samples.RATES_EVERY_NS


def test_a_kernel_without_counters_gives_zeros(tmp_path: Path) -> None:
    with closing(Sampler(1, root=tmp_path)) as sampler:
        made = sampler.sample(line(forward=1))
    assert [made[field] for field in (Field.DELAY, Field.STEAL, Field.THROTTLED)] == [0, 0, 0]


@pytest.mark.parametrize(("host", "counts"), [("127.0.0.2", True), ("127.0.0.1", False)])
def test_the_round_trip_of_a_connection_to_another_host_is_the_kernels(host: str, counts: bool) -> None:
    with (
        socket.create_server((host, 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)) as one,
    ):
        other, _ = server.accept()
        with other:
            one.sendall(b"x")
            assert other.recv(1) == b"x"
            round_trip_us, segments = smoothed_round_trip(one)
            assert 0 < round_trip_us < 10_000_000 and segments == 1
            assert smoothed_round_trip(server) == (0, 0)
            trips = samples._measured_trips()
            assert (trips.least_us > 0) is (trips.most_us >= trips.least_us > 0) is counts
            ends = (samples.address_number("127.0.0.1"), samples.address_number(host))
            # The other end is a connection of this process as well.
            assert {trips.own, trips.peer} == ({*ends} if counts else {0.0})


def test_an_address_is_one_number_however_a_socket_names_it() -> None:
    number = samples.address_number
    assert number("::ffff:10.0.0.1") == number("10.0.0.1") != number("10.0.0.2")
    assert number("fe80::1%eth0") == number("fe80::1") and number("10.0.0.1").is_integer()
