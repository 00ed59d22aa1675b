"""The machine of a node's jobs: what it starts, ends and tells, and how hosts enter a job's view together."""

from __future__ import annotations

import pytest

from zbmd.actors.cluster.contracts import HostLinked
from zbmd.actors.cluster.jobs import node_events as e
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.node_machine import LocalJobs
from zbmd.actors.cluster.membership.machine import LEFT
from zbmd.actors.cluster.state.job_table import (
    START_TIMEOUT_NS_DEFAULT,
    STOP_GRACE_NS_DEFAULT,
    Command,
    JobPhase,
    JobSpec,
    Order,
    RankDown,
    RankUp,
    Stop,
    Submit,
)
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, ViewChange
from zbmd.actors.view import View
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

JOB = 5
GRACE_NS = STOP_GRACE_NS_DEFAULT


class Host:
    """A node's machine, and what it asked for since the last look."""

    def __init__(self, me: NodeKey) -> None:
        self.me = me
        self.machine = LocalJobs()
        self.now_ns = 1
        self.put(e.IncarnationBegan(me=me))

    def put(self, *events: e.Event) -> list[e.Action]:
        actions: list[e.Action] = []
        for event in events:
            actions += self.machine.handle(event, now_ns=self.now_ns)
            self.machine.check_invariants()
        return actions

    def start(self, actions: list[e.Action]) -> list[Order]:
        """Bring up whatever was to be forked; the reports that the cluster is to receive."""
        orders: list[Order] = []
        for action in actions:
            if isinstance(action, e.Fork):
                done = self.put(e.Forked(key=action.key), e.Joined(key=action.key, address=f"{action.key}"))
                orders += [a.order for a in done if isinstance(a, e.ProposeOrder)]
        return orders


class Hosts:
    """Some nodes that act on the same views, each when the test says so."""

    def __init__(self, size: int, *, domains: tuple[str, ...] = (), **options: object) -> None:
        self.keys = [NodeKey(i, 1) for i in range(size)]
        self.hosts = [Host(key) for key in self.keys]
        named = domains or ("",) * size
        nodes = (Node(key, domain=name) for key, name in zip(self.keys, named, strict=True))
        self.view = ClusterView(epoch=1, nodes=tuple(nodes))
        self.numbers = dict.fromkeys(self.keys, 0)
        spec = JobSpec(**({"job": JOB, "target": "t", "nodes_max": size} | options))  # type: ignore[arg-type]
        self.change((0, Submit(spec=spec)))

    def change(self, *orders: tuple[int, Order], removed: tuple[int, ...] = ()) -> ClusterView:
        """The next view."""
        commands: list[Command] = []
        for node_id, order in orders:
            key = self.keys[node_id]
            self.numbers[key] += 1
            commands.append(Command(origin=key, number=self.numbers[key], order=order))
        gone = tuple(self.keys[node_id] for node_id in removed)
        change = ViewChange(epoch=self.view.epoch + 1, removed=gone, commands=tuple(commands))
        self.view = self.view.after(change)
        return self.view

    def act(self, *node_ids: int) -> dict[int, list[e.Action]]:
        """Have these nodes act on the newest view."""
        return {i: self.hosts[i].put(e.ViewActedOn(view=self.view)) for i in node_ids}

    def up(self) -> dict[int, list[e.Action]]:
        """Have all ranks that are to start come up, and all nodes act on the view that says so."""
        orders: list[tuple[int, Order]] = []
        for node_id, actions in self.act(*range(len(self.hosts))).items():
            orders += [(node_id, order) for order in self.hosts[node_id].start(actions)]
        self.change(*orders)
        return self.act(*range(len(self.hosts)))

    def say(
        self, sender: int, to: int, epoch: int, *, linked: bool = True, ask: bool = False
    ) -> list[e.Action]:
        word = HostLinked(job=JOB, epoch=epoch, linked=linked, ask=ask)
        return self.hosts[to].put(e.HostReported(sender=self.keys[sender], word=word))


def key_of(rank: int, incarnation: int = 1) -> RankKey:
    return RankKey(JOB, rank, incarnation)


def told(actions: list[e.Action]) -> list[tuple[int, int, bool, bool]]:
    return [
        (a.to.id, a.word.epoch, a.word.linked, a.word.ask) for a in actions if isinstance(a, e.SendToHost)
    ]


def kinds(actions: list[e.Action]) -> list[str]:
    return [type(action).__name__ for action in actions]


def test_a_job_from_its_first_view_to_its_end() -> None:
    hosts = Hosts(2)
    first = hosts.hosts[0]
    begun = hosts.act(0)[0]
    assert kinds(begun) == ["Open", "Fork"]
    hosts = Hosts(2)
    first, views = hosts.hosts[0], hosts.up()
    (install,) = views[0]
    assert isinstance(install, e.InstallView) and install.to == (0,) and install.view.ranks == (0, 1)
    epoch = install.view.epoch
    linked = first.put(e.Linked(key=key_of(0), epoch=epoch))
    assert told(linked) == [(1, epoch, True, False)]
    assert hosts.say(1, 0, epoch) == [e.EnterView(job=JOB, epoch=epoch, to=(0,))]
    (down, announced) = (*first.put(e.Exited(key=key_of(0), code=0, reason="exit code 0")), None)
    assert isinstance(down, e.ProposeOrder) and isinstance(down.order, RankDown) and down.order.code == 0
    assert announced is None
    one = RankDown(job=JOB, rank=1, incarnation=1, code=0, reason="exit code 0")
    hosts.change((0, down.order), (1, one))
    assert hosts.act(0)[0] == [e.Close(job=JOB)]


def test_a_rank_that_was_given_in_a_view_never_acted_on_here_is_told_to_have_never_run() -> None:
    """Else the job would wait for its end for ever."""
    hosts = Hosts(2)
    first = hosts.hosts[0]
    hosts.change((1, Stop(job=JOB, reason="at once")))
    opened, asked = hosts.act(0)[0]
    assert isinstance(opened, e.Open) and isinstance(asked, e.ProposeOrder)
    assert isinstance(asked.order, RankDown) and (asked.order.rank, asked.order.code) == (0, None)
    hosts.change()
    assert first.put(e.ViewActedOn(view=hosts.view)) == [], "once"
    hosts.change((0, asked.order), (1, RankDown(job=JOB, rank=1, incarnation=1, code=0, reason="")))
    assert hosts.act(0)[0] == [e.Close(job=JOB)]
    job = hosts.view.jobs.job(JOB)
    assert job is not None and job.phase is JobPhase.ENDED


def test_who_misses_a_word_asks_for_it() -> None:
    hosts = Hosts(3)
    first, install = hosts.hosts[0], hosts.up()[0][0]
    assert isinstance(install, e.InstallView)
    epoch = install.view.epoch
    asked = first.put(e.Linked(key=key_of(0), epoch=epoch))
    timer = asked[-1]
    assert isinstance(timer, SetTimer)
    hosts.say(2, 0, epoch)
    first.now_ns = timer.at_ns
    again = first.put(TimerFired())
    assert told(again) == [(1, epoch, True, True)]
    assert told(hosts.say(0, 2, epoch, ask=True)) == [], "it is not linked yet: it will say so"
    hosts.hosts[2].put(e.Linked(key=key_of(2), epoch=epoch))
    assert told(hosts.say(0, 2, epoch, ask=True)) == [(0, epoch, True, False)]


def grow(hosts: Hosts) -> View:
    """A view of the job with one more rank; nobody acts on it yet."""
    job = hosts.view.jobs.job(JOB)
    assert job is not None
    entry = next(entry for entry in job.ranks if not entry.address)
    assert entry.node is not None
    up = RankUp(job=JOB, rank=entry.rank, incarnation=entry.incarnation, address="late")
    hosts.change((entry.node.id, up))
    job = hosts.view.jobs.job(JOB)
    view = None if job is None else job.view()
    assert view is not None
    return view


def pair_with_a_third_to_come() -> tuple[Hosts, int]:
    """Nodes 0 and 1 of a job receive a view; the rank of node 2, which joins later, starts."""
    hosts = Hosts(2, nodes_max=3)
    install = hosts.up()[0][0]
    assert isinstance(install, e.InstallView)
    third = NodeKey(2, 1)
    hosts.keys.append(third)
    hosts.numbers[third] = 0
    hosts.view = hosts.view.after(ViewChange(epoch=hosts.view.epoch + 1, added=(Node(third),)))
    hosts.act(0, 1)
    return hosts, install.view.epoch


def test_members_have_the_failure_domains_of_their_nodes() -> None:
    hosts = Hosts(3, domains=("rack-a", "", "rack-a"))
    for (install,) in hosts.up().values():
        assert isinstance(install, e.InstallView)
        assert [member.domain for member in install.view.members] == ["rack-a", "", "rack-a"]


def test_who_has_promised_waits_for_the_others_before_it_goes_on() -> None:
    hosts, epoch = pair_with_a_third_to_come()
    hosts.hosts[0].put(e.Linked(key=key_of(0), epoch=epoch))
    larger = grow(hosts)
    assert kinds(hosts.act(0)[0]) == [], "node 1 may have promised too"
    done = hosts.say(1, 0, epoch)
    assert kinds(done) == ["EnterView", "InstallView"]
    install = done[1]
    assert isinstance(install, e.InstallView) and install.view == larger


def test_who_has_promised_goes_on_if_another_did_so_without_a_promise() -> None:
    hosts, epoch = pair_with_a_third_to_come()
    hosts.hosts[0].put(e.Linked(key=key_of(0), epoch=epoch))
    larger = grow(hosts)
    passing = hosts.act(1)[1]
    assert told(passing) == [(0, epoch, False, False)]
    assert told(hosts.say(0, 1, epoch, ask=True)) == [(0, epoch, False, False)], "also if that was lost"
    hosts.act(0)
    assert hosts.say(1, 0, epoch, linked=False) == [e.InstallView(job=JOB, view=larger, to=(0,))]


def test_a_death_voids_a_promise() -> None:
    hosts = Hosts(2, nodes_min=1)
    install = hosts.up()[0][0]
    assert isinstance(install, e.InstallView)
    hosts.hosts[0].put(e.Linked(key=key_of(0), epoch=install.view.epoch))
    hosts.change(removed=(1,))
    announced, alone = hosts.act(0)[0]
    assert announced == e.AnnounceDown(key=key_of(1), reason="its host node1#1 went", confirmed=True, to=(0,))
    assert isinstance(alone, e.InstallView) and alone.view.ranks == (0,)


def test_what_does_not_end_when_asked_is_killed() -> None:
    hosts = Hosts(1)
    hosts.up()
    hosts.change((0, Stop(job=JOB, reason="enough")))
    stopping = hosts.act(0)[0]
    assert stopping == [e.Terminate(key=key_of(0)), SetTimer(at_ns=1 + GRACE_NS)]
    host = hosts.hosts[0]
    host.now_ns += GRACE_NS
    timer = SetTimer(at_ns=host.now_ns + derive().stop_kill_ns)
    assert host.put(TimerFired()) == [e.Kill(key=key_of(0)), timer]
    (down,) = host.put(e.Exited(key=key_of(0), code=-9, reason="killed"))
    assert isinstance(down, e.ProposeOrder)
    hosts.change((0, down.order))
    job = hosts.view.jobs.job(JOB)
    assert job is not None and job.reason == "enough; killed after --stop-grace: rank0"


def test_a_stopped_job_has_the_grace_that_it_states_and_a_failed_one_that_of_its_budget() -> None:
    for failed, grace_ns in ((False, 7), (True, derive().stop_grace_ns)):
        hosts = Hosts(1, stop_grace_ns=7)
        hosts.up()
        hosts.change((0, Stop(job=JOB, reason="enough", failed=failed)))
        assert hosts.act(0)[0] == [e.Terminate(key=key_of(0)), SetTimer(at_ns=1 + grace_ns)]
        host = hosts.hosts[0]
        host.now_ns += grace_ns
        assert host.put(TimerFired())[0] == e.Kill(key=key_of(0))
        (down,) = host.put(e.Exited(key=key_of(0), code=-9, reason="killed"))
        assert isinstance(down, e.ProposeOrder)
        hosts.change((0, down.order))
        job = hosts.view.jobs.job(JOB)
        assert job is not None and job.phase is JobPhase.ENDED
        assert job.reason == "enough" + ("" if failed else "; killed after --stop-grace: rank0")


def test_a_process_that_outlives_sigkill_is_named_and_not_waited_for() -> None:
    hosts = Hosts(1, ranks_per_node=2)
    hosts.up()
    hosts.change((0, Stop(job=JOB, reason="enough", kill=True)))
    first, second, timer = hosts.act(0)[0]
    assert (first, second) == (e.Kill(key=key_of(0)), e.Kill(key=key_of(1)))
    assert isinstance(timer, SetTimer) and timer.at_ns == 1 + derive().stop_kill_ns
    host = hosts.hosts[0]
    host.now_ns = timer.at_ns
    downs = [action.order for action in host.put(TimerFired()) if isinstance(action, e.ProposeOrder)]
    hosts.change(*((0, down) for down in downs))
    job = hosts.view.jobs.job(JOB)
    assert job is not None and job.phase is JobPhase.ENDED
    assert job.reason == "enough; still running after SIGKILL: rank0, rank1"
    assert hosts.act(0)[0] == [], "the processes are still there"


def test_a_node_leaves_once_another_host_would_wait_for_one_of_its_ranks() -> None:
    hosts = Hosts(2, nodes_min=1, ranks_per_node=2, stop_grace_ns=7)
    view = next(action.view for action in hosts.up()[0] if isinstance(action, e.InstallView))
    for rank, host in ((0, 0), (1, 0), (2, 1), (3, 1)):
        hosts.hosts[host].put(e.Linked(key=key_of(rank), epoch=view.epoch))
    word = HostLinked(job=JOB, epoch=view.epoch, linked=True)
    host = hosts.hosts[1]
    host.put(e.HostReported(sender=hosts.keys[0], word=word))
    asked = host.put(e.LeaveAsked())
    assert asked == [e.Terminate(key=key_of(2)), e.Terminate(key=key_of(3)), SetTimer(at_ns=1 + 7)]
    assert host.put(e.Exited(key=key_of(3), code=0, reason="saved")) == [e.LeaveCluster()]
    host.now_ns = 5
    assert host.put(e.IncarnationEnded(reason=LEFT)) == [], "the other one may save on"
    host.now_ns = 8
    assert host.put(TimerFired()) == [e.Kill(key=key_of(2))]


def test_a_node_without_ranks_leaves_at_once() -> None:
    assert Host(NodeKey(0, 1)).put(e.LeaveAsked()) == [e.LeaveCluster()]


def test_when_its_life_ends_everything_is_killed_and_nothing_told() -> None:
    hosts = Hosts(2, ranks_per_node=2)
    host = hosts.hosts[0]
    begun = hosts.act(0)[0]
    host.put(e.Forked(key=key_of(0)))
    assert host.put(e.IncarnationEnded(reason="it is cut off")) == [e.Kill(key=key_of(0))]
    assert kinds(begun) == ["Open", "Fork", "Fork"]
    assert host.put(e.Forked(key=key_of(1))) == [e.Kill(key=key_of(1))], "the fork was under way"
    assert host.put(e.Exited(key=key_of(0), code=-9, reason="killed")) == []
    assert host.put(e.Joined(key=key_of(1), address="late")) == []
    assert host.put(e.Exited(key=key_of(1), code=-9, reason="killed")) == [e.Close(job=JOB)]


def test_a_process_that_joins_before_its_fork_is_reported_is_up_once_it_is() -> None:
    """A template that waits for a core reports a fork late; the process has run meanwhile."""
    hosts = Hosts(1, ranks_per_node=3)
    host = hosts.hosts[0]
    hosts.act(0)
    joined = [e.Joined(key=key_of(rank), address=f"a{rank}") for rank in range(3)]
    assert host.put(*joined) == [], "there is no process yet that could be ended"
    (order,) = host.put(e.Forked(key=key_of(0)))
    assert isinstance(order, e.ProposeOrder) and isinstance(order.order, RankUp)
    assert (order.order.rank, order.order.address) == (0, "a0")
    assert kinds(host.put(e.LossProven(key=key_of(1)))) == ["ProposeOrder", "AnnounceDown"]
    assert host.put(e.Forked(key=key_of(1))) == [e.Kill(key=key_of(1))], "it is not up: it has died"
    assert host.put(e.IncarnationEnded(reason="it is cut off")) == [e.Kill(key=key_of(0))]
    assert host.put(e.Forked(key=key_of(2))) == [e.Kill(key=key_of(2))], "it is not up any more"
    with pytest.raises(LocalProtocolError, match="was not to be forked"):
        host.put(e.Forked(key=key_of(0)))


def test_a_death_is_told_before_its_exit_status_is_known_and_once() -> None:
    hosts = Hosts(1, ranks_per_node=2)
    hosts.up()
    host = hosts.hosts[0]
    told_down, announced = host.put(e.LossProven(key=key_of(1)))
    assert isinstance(told_down, e.ProposeOrder) and isinstance(told_down.order, RankDown)
    assert told_down.order.code is None
    assert isinstance(announced, e.AnnounceDown) and not announced.confirmed and announced.to == (0,)
    hosts.change((0, told_down.order))
    assert kinds(hosts.act(0)[0]) == ["Fork"], "the next one need not wait for the last one's memory to go"
    (confirmed,) = host.put(e.Exited(key=key_of(1), code=-11, reason="killed (SIGSEGV)"))
    assert isinstance(confirmed, e.AnnounceDown) and confirmed.confirmed


def entered(hosts: Hosts) -> int:
    """Bring a job's first view to where all hosts have entered it; its epoch."""
    (install,) = hosts.up()[0]
    assert isinstance(install, e.InstallView)
    epoch = install.view.epoch
    for node_id, host in enumerate(hosts.hosts):
        host.put(e.Linked(key=key_of(node_id), epoch=epoch))
    for node_id in range(len(hosts.hosts)):
        for other in range(len(hosts.hosts)):
            if other != node_id:
                hosts.say(other, node_id, epoch)
    return epoch


def lose_link(host: Host, epoch: int) -> list[e.Action]:
    """A rank reports a link that it lost; what its host does once its patience has ended."""
    (timer,) = host.put(e.LinkLost(key=key_of(host.me.id), epoch=epoch))
    assert isinstance(timer, SetTimer)
    host.now_ns = timer.at_ns
    return host.put(TimerFired())


def test_ranks_that_lost_a_link_and_live_get_another_view() -> None:
    hosts = Hosts(2)
    epoch = entered(hosts)
    (ask,) = lose_link(hosts.hosts[1], epoch)
    assert isinstance(ask, e.ProposeOrder)
    members = hosts.view.jobs.jobs[0].view()
    hosts.change((1, ask.order))
    job = hosts.view.jobs.jobs[0]
    view = job.view()
    assert members is not None and view is not None
    assert view.epoch > epoch and view.members == members.members
    for actions in hosts.act(0, 1).values():
        assert kinds(actions) == ["InstallView"]
    assert not hosts.hosts[1].put(e.LinkLost(key=key_of(1), epoch=epoch)), "that view is over"
    hosts.change((1, ask.order))
    assert hosts.view.jobs.jobs[0].view() == view, "an order about an older view changes nothing"


def test_a_link_that_a_death_took_asks_for_no_view_of_its_own() -> None:
    hosts = Hosts(2)
    epoch = entered(hosts)
    survivor = hosts.hosts[0]
    assert kinds(survivor.put(e.LinkLost(key=key_of(0), epoch=epoch))) == ["SetTimer"]
    (down,) = hosts.hosts[1].put(e.Exited(key=key_of(1), code=-9, reason="killed"))
    assert isinstance(down, e.ProposeOrder)
    hosts.change((1, down.order))
    forks = hosts.act(0, 1)[1]
    orders = hosts.hosts[1].start(forks)
    hosts.change(*((1, order) for order in orders))
    assert "InstallView" in kinds(hosts.act(0, 1)[0])
    survivor.now_ns += 60 * GRACE_NS
    assert not survivor.put(TimerFired())


def test_a_rank_that_never_joins_is_given_up_once_others_wait_for_it() -> None:
    hosts = Hosts(2)
    hosts.up()
    second = hosts.hosts[1]
    down = RankDown(job=JOB, rank=1, incarnation=1, code=-9, reason="killed")
    second.put(e.Exited(key=key_of(1), code=-9, reason="killed"))
    hosts.change((1, down))
    (fork,) = hosts.act(1)[1]
    assert isinstance(fork, e.Fork)
    second.now_ns = 1000
    (timer,) = second.put(e.Forked(key=fork.key))
    assert isinstance(timer, SetTimer) and timer.at_ns == 1000 + START_TIMEOUT_NS_DEFAULT
    second.now_ns = timer.at_ns
    told, kill = second.put(TimerFired())
    assert isinstance(told, e.ProposeOrder) and isinstance(told.order, RankDown)
    assert (told.order.rank, told.order.incarnation, told.order.code) == (1, 2, None)
    assert "it was started 10min ago and has not joined its job" in told.order.reason
    assert "--start-timeout" in told.order.reason
    assert kill == e.Kill(key=fork.key)
    assert second.put(e.Joined(key=fork.key, address="too late")) == []


def test_before_its_jobs_first_view_a_rank_may_take_its_time() -> None:
    hosts = Hosts(1)
    (_, fork) = hosts.act(0)[0]
    assert isinstance(fork, e.Fork)
    assert hosts.hosts[0].put(e.Forked(key=fork.key)) == []
