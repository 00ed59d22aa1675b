"""Attached ranks: the machine event by event, the plan of a meeting, and a supervisor with real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
from rich.pretty import pretty_repr

from zbmd.actors.bootstrap.attached import client
from zbmd.actors.bootstrap.attached import machine as m
from zbmd.actors.bootstrap.attached.client import host_name, plan_of
from zbmd.actors.bootstrap.attached.messages import PACKET_BYTES_MAX, Hello, Order, Plan, decode_order, encode
from zbmd.actors.bootstrap.attached.supervisor import host_config, node_config
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_VARIABLE, SECOND_NS
from zbmd.transport.errors import (
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    UserError,
)

STARTER = 100
VARIABLES = {"RANK": "0"}
COOKIE = "c" * 64


def wanted(rank: int, incarnation: int = 1) -> m.Wanted:
    return m.Wanted(rank=rank, incarnation=incarnation, variables=VARIABLES)


def came(connection: int, rank: int, pid: int = 0) -> m.Came:
    return m.Came(connection=connection, pid=pid or STARTER + connection, rank=rank)


def fed(machine: m.AttachedRanks, *events: m.Event) -> list[m.Action]:
    """The actions of the last event; invariants hold after each."""
    actions: list[m.Action] = []
    for event in events:
        actions = machine.handle(event)
        machine.check_invariants()
    return actions


def admit(connection: int, rank: int) -> m.Admit:
    return m.Admit(connection=connection, rank=rank, incarnation=1, variables=VARIABLES)


@pytest.mark.parametrize("events", [(wanted(1), came(5, 1)), (came(5, 1), wanted(1))])
def test_a_process_is_the_rank_once_it_is_wanted_and_there(events: tuple[m.Event, ...]) -> None:
    assert fed(m.AttachedRanks(STARTER), *events) == [admit(5, 1)]


def test_ends_are_reported_as_what_they_are() -> None:
    machine = m.AttachedRanks(STARTER)
    fed(machine, *(wanted(rank) for rank in range(3)), *(came(rank, rank) for rank in range(3)))

    def end(rank: int, *, clean: bool) -> m.ReportEnd:
        return m.ReportEnd(connection=rank, rank=rank, incarnation=1, clean=clean)

    assert fed(machine, m.ProcessEnded(connection=0)) == [end(0, clean=False)]
    # It may still write to shared memory: its end is not reported before the kernel does.
    assert fed(machine, m.WentOn(connection=1, ends=True)) == []
    assert fed(machine, m.ProcessEnded(connection=1)) == [end(1, clean=True)]
    assert fed(machine, m.StarterEnded()) == []
    assert fed(machine, m.WentOn(connection=2, ends=False)) == [end(2, clean=True), m.End()]
    assert fed(machine, m.ProcessEnded(connection=2), came(9, 1)) == []


def test_it_ends_with_its_starter_if_nobody_came() -> None:
    assert fed(m.AttachedRanks(STARTER), wanted(0), m.StarterEnded()) == [m.End()]


def test_the_starter_is_not_waited_for_once_it_has_come_and_left() -> None:
    machine = m.AttachedRanks(STARTER)
    fed(machine, wanted(0), came(1, 0, pid=STARTER))
    assert isinstance(fed(machine, m.WentOn(connection=1, ends=False))[-1], m.End)


def test_two_processes_cannot_be_one_rank() -> None:
    machine = m.AttachedRanks(STARTER)
    (refusal,) = fed(machine, came(1, 4, pid=7), came(2, 4))
    assert isinstance(refusal, m.Refuse) and "process 7 of this host is rank 4 already" in refusal.reason
    assert fed(machine, m.ProcessEnded(connection=1)) == [m.Close(connection=1)]
    with pytest.raises(LocalProtocolError, match="twice"):
        fed(machine, wanted(4), wanted(4))


def hello(host: str, job: int = 0, rank: int = 0, size: int = 0) -> Hello:
    return Hello(host=host, nonce="n", job=job, rank=rank, size=size)


def test_ranks_stay_attached_only_if_all_are_what_they_are_to_be() -> None:
    stays = Plan(name="x", stays=True)
    attach_again = Plan(name="x", hosts=((0, 1),))
    assert plan_of([hello("a", 5, rank, 2) for rank in range(2)], "x", cookie=COOKIE) == stays
    assert plan_of([hello("a"), hello("a")], "x", cookie=COOKIE) == attach_again
    assert plan_of([hello("a", 5, 0, 2), hello("a")], "x", cookie=COOKIE) == attach_again  # one is new
    assert (
        plan_of([hello("a", 5, 1, 2), hello("a", 5, 0, 2)], "x", cookie=COOKIE) == attach_again
    )  # they change places
    assert (
        plan_of([hello("a", 5, rank, 3) for rank in range(2)], "x", cookie=COOKIE) == attach_again
    )  # one is missing
    assert plan_of([hello("a", 5 + rank, rank, 2) for rank in range(2)], "x", cookie=COOKIE) == attach_again
    assert str(os.getuid()) in host_name()


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        ("aaab", "0, 1, 2; 3: expected as many on each"),
        ("abab", "0, 2; 1, 3: expected as many on each, one after the other"),
        (("k|p", "k|q", "l|p"), "ranks 0 and 1 are on one host, in other namespaces of processes"),
    ],
)
def test_ranks_that_cannot_be_on_several_hosts_so_are_told_why(hosts: Sequence[str], problem: str) -> None:
    plan = plan_of([hello(host) for host in hosts], "x", cookie=COOKIE)
    assert problem in plan.problem and "zbmd-node run --nnodes" in plan.problem and not plan.cookie


def test_ranks_of_several_hosts_get_a_cookie_of_their_own() -> None:
    plan = plan_of([hello(host) for host in "aabbcc"], "x", cookie=COOKIE)
    assert plan == Plan(name="x", hosts=((0, 1), (2, 3), (4, 5)), cookie=COOKIE)


def test_the_supervisor_takes_its_processes_and_ends_with_them() -> None:
    program = (
        "import sys; from zbmd.actors.bootstrap.attached.client import start, attach\n"
        "from zbmd.actors.bootstrap.attached.messages import Order\n"
        "address, _ = start(Order(ranks=2)); print(address, flush=True)\n"
        "attached = attach(address, 0, 60); print(attached.environment.world_size, flush=True)\n"
        "sys.stdin.read()\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    try:
        address, size = first.stdout.readline().strip(), first.stdout.readline().strip()
        assert size == "2"
        with pytest.raises(UserError, match=f"process {first.pid} of this host is rank 0 already"):
            client.attach(address, 0, 60)
        mine = client.attach(address, 1, 60)
        assert mine.stands and mine.environment.rank == 1 and mine.environment.node_address
        first.send_signal(signal.SIGKILL)  # the one that started it
        first.wait()
        assert mine.stands
        mine.detach(ends=False)
        assert not mine.stands
        _until_gone(address)
        with pytest.raises(PeerLost, match="it ends with the process that started it"):
            client.attach(address, 1, 60)
    finally:
        first.kill()
        first.communicate()


def _until_gone(address: str) -> None:
    """Wait until nobody listens at an address."""
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(f"\0{address}")
            except ConnectionRefusedError:
                return
            with contextlib.suppress(OSError):
                probe.recv(1)  # it is taken, or the listener ends
        os.sched_yield()


def test_a_supervisor_whose_starter_dies_at_once_ends() -> None:
    program = (
        "import os; from zbmd.actors.bootstrap.attached.client import start\n"
        "from zbmd.actors.bootstrap.attached.messages import Order\n"
        "print(start(Order(ranks=2))[0], flush=True); os._exit(0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    _until_gone(ended.stdout.strip())


@pytest.mark.parametrize("packet", [b"", b"\x93", encode(Plan(name="x")), b"\x00" * (PACKET_BYTES_MAX + 1)])
def test_a_supervisor_takes_orders_alone(packet: bytes) -> None:
    order = Order(ranks=2, patience_s=3.0, name="x", hosts=2, host=1, cookie=COOKIE, joins=("h:1", "[::1]:2"))
    assert decode_order(encode(order)) == order
    with pytest.raises(RemoteProtocolError):
        decode_order(packet)


def test_the_supervisor_of_the_first_host_says_where_others_join() -> None:
    """It ends with its starter while the others are missing; one that cannot begin says why."""
    program = (
        "import sys; from zbmd.actors.bootstrap.attached.client import start\n"
        "from zbmd.actors.bootstrap.attached.messages import Order\n"
        "order = Order(ranks=1, patience_s=60.0, name='x', hosts=2, cookie=sys.argv[1])\n"
        "print(*start(order), flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        [*command, COOKIE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdin is not None and first.stdout is not None
        address, node = first.stdout.readline().split()
        assert node.rpartition(":")[2].isdecimal()
        first.stdin.close()
    _until_gone(address)
    failed = subprocess.run([*command, "short"], input="", capture_output=True, text=True, timeout=60)
    assert "what came with the job is no cookie" in failed.stderr and "Traceback" in failed.stderr
    assert "it says on standard error why it failed" in failed.stderr


def test_hosts_suspect_each_other_by_the_budget_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(ranks=1, name="x", hosts=2, cookie=COOKIE)
    monkeypatch.delenv(RECOVERY_BUDGET_VARIABLE, raising=False)
    assert node_config(order).recovery_budget_ns is None, "that of the cluster"
    monkeypatch.setenv(RECOVERY_BUDGET_VARIABLE, "1min")
    assert node_config(order).recovery_budget_ns == host_config(1).recovery_budget_ns == 60 * SECOND_NS


def test_no_traceback_shows_the_cookie_of_a_job() -> None:
    order, plan = Order(ranks=2, name="x", cookie=COOKIE), Plan(name="x", cookie=COOKIE)
    assert repr(order) == "Order(ranks=2, patience_s=0.0, name='x', hosts=1, host=0, joins=())"
    assert COOKIE not in pretty_repr(plan) and "name='x'" in pretty_repr(plan)
