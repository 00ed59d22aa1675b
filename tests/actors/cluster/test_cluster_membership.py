"""The view-change machine: seeded faults, every single kill of small clusters, and what it says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.actors.cluster.heartbeats import detector as d
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.membership.reports import COMMANDS_WAITING_MAX
from zbmd.actors.cluster.messages import (
    Action,
    FoundCluster,
    JoinCluster,
    Learn,
    LeaveRequested,
    MemberReport,
    Ordered,
    Received,
    Send,
    Stopped,
    Suspected,
    Trusted,
)
from zbmd.actors.cluster.state.job_table import CommandRefused, JobSpec, Stop, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView
from zbmd.actors.simulated.jobs_scenario import JobsScenario
from zbmd.actors.simulated.membership_scenario import (
    LIVENESS_NS,
    SECOND_NS,
    Cluster,
    MembershipScenario,
    Packet,
    WitnessStore,
    build,
    in_one_view,
    name_of,
)
from zbmd.tools.lab.proofs.membership_states import STORIES, explore, explore_pairs, run_schedules
from zbmd.transport import sim
from zbmd.transport.clock.deadlines import MILLISECOND_NS, derive
from zbmd.transport.machine import TimerFired
from zbmd.transport.sim import Options, RunOutcome, parse_plan, run_scenario

World = tuple[sim.Simulation[Packet], Cluster]


def names(*ids: int) -> frozenset[str]:
    return frozenset(name_of(node_id) for node_id in ids)


def formed(seed: int, size: int, *, protected: frozenset[str] | None = None) -> World:
    """A cluster in which everybody has joined."""
    simulation, cluster = build(seed, size)
    if protected is not None:
        cluster.protected = protected
    everybody = names(*range(size))
    simulation.run(until=lambda: in_one_view(cluster, everybody), for_ns=LIVENESS_NS)
    assert in_one_view(cluster, everybody)
    return simulation, cluster


def settle(world: World, expected: frozenset[str]) -> None:
    simulation, cluster = world
    simulation.run(until=lambda: in_one_view(cluster, expected), for_ns=LIVENESS_NS)
    assert in_one_view(cluster, expected), [str(r) for r in simulation.history[-20:]]


@given(
    seed=st.integers(0, 2**32),
    ranks=st.integers(1, 11),
    length=st.integers(1, 3),
    faults=st.integers(0, 6),
)
@settings(max_examples=25, deadline=None)
def test_clusters_stand_faults(seed: int, ranks: int, length: int, faults: int) -> None:
    scenario, options = MembershipScenario(), Options(ranks=ranks, length=length, faults=faults)
    report = run_scenario(scenario, seed, options, scenario.draw_plan(seed, options), tell=None)
    assert report.outcome is RunOutcome.OK, report


def test_who_is_cut_off_as_a_view_is_installed_stops_though_it_has_commands() -> None:
    """It knows a view that it cannot enter, and waited for that with the commands of its job, for ever."""
    fault = "partition:groups=node0+node2/node1,at={}ns,for={}ns"
    plan = parse_plan(";".join([fault.format(3433369838, 1817573661), fault.format(4429671818, 1901264580)]))
    report = run_scenario(JobsScenario(), 160487494768267, Options(ranks=3, length=6), plan, tell=None)
    assert report.outcome is RunOutcome.OK, report


@pytest.mark.parametrize("seed", [66_630, 33_706])
def test_whom_the_cut_off_accuse_when_their_network_heals_stays(seed: int) -> None:
    """Their suspicions came just before the next change was due, and condemned one whom they heard again."""
    assert run_schedules(1, math.inf, seed) == 0


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("story", STORIES)
def test_kills_at_any_point_of_any_story(story: str, size: int) -> None:
    """A few of them; `python -m zbmd.tools.lab.proofs.membership_states kills` tries them all."""
    found = explore(story, size, points_max=15)
    assert found.points_all >= found.points >= 15


def test_pairs_of_kills() -> None:
    """Second kills after some of the first; the same command with `--pairs` tries all."""
    found = explore_pairs("a node joins", 2, firsts_max=3)
    assert found.points > 40
    assert found.decided > 0


def test_the_half_with_the_lowest_id_goes_on_and_the_other_stops() -> None:
    simulation, cluster = formed(1, 4, protected=names(0, 1))
    halves = (tuple(sorted(names(0, 1))), tuple(sorted(names(2, 3))))
    fault = sim.Partition(groups=halves, at_ns=simulation.now_ns - sim.SIM_START_NS, for_ns=5 * SECOND_NS)
    simulation.apply(fault)
    settle((simulation, cluster), names(0, 1))
    simulation.run(for_ns=2 * SECOND_NS)
    reasons = {key.id: reason for key, reason in cluster.stops}
    assert set(reasons) == {2, 3}
    for reason in reasons.values():
        assert reason.startswith("it is cut off: ") and reason.endswith("are here, 3 are needed")
    settle((simulation, cluster), names(0, 1, 2, 3))


def test_a_node_that_hears_nobody_condemns_nobody() -> None:
    simulation, cluster = formed(2, 5, protected=names(0, 1, 2, 3))
    for source in range(4):
        at_ns = simulation.now_ns - sim.SIM_START_NS
        simulation.apply(
            sim.Cut(source=name_of(source), target=name_of(4), at_ns=at_ns, for_ns=3 * SECOND_NS)
        )
    simulation.run(for_ns=3 * SECOND_NS)
    view = cluster.nodes[name_of(0)].acts_on
    assert view is not None and set(view.ids) >= {0, 1, 2, 3}
    settle((simulation, cluster), names(0, 1, 2, 3, 4))


def reports_to(actions: list[Action]) -> dict[int, tuple[NodeKey, ...]]:
    """Whom they tell of whom."""
    sent = [a for a in actions if isinstance(a, Send)]
    return {a.to.id: a.message.down for a in sent if isinstance(a.message, MemberReport)}


def test_what_is_taken_back_is_taken_back_from_all_who_were_told() -> None:
    # A partition's smaller side reported the speaker to the next in line; when it had healed, it told the
    # speaker alone that all was well. The next in line believed it still, and condemned the speaker.
    nodes = tuple(Node(NodeKey(node_id, 1)) for node_id in range(5))
    machine = ClusterMachine(nodes[4], derive())
    machine.handle(JoinCluster(doors=nodes[:1]), now_ns=1)
    learn = Learn(view=ClusterView(epoch=3, nodes=nodes))
    machine.handle(Received(sender=nodes[0], message=learn), now_ns=2)
    first, other = nodes[0].key, nodes[1].key
    assert reports_to(machine.handle(Suspected(key=first, reason="silent"), now_ns=3)) == {1: (first,)}
    assert reports_to(machine.handle(Suspected(key=other, reason="silent"), now_ns=4)) == {2: (first, other)}
    assert reports_to(machine.handle(Trusted(key=first), now_ns=5)) == {0: (other,), 1: (other,), 2: (other,)}
    assert reports_to(machine.handle(Trusted(key=other), now_ns=6)) == {0: (), 1: (), 2: ()}
    machine.check_invariants()


def test_a_node_that_leaves_is_let_go_in_a_view_without_it() -> None:
    simulation, cluster = formed(3, 3)
    cluster.protected = frozenset()
    simulation.command(name_of(0), "leave")
    settle((simulation, cluster), names(1, 2))
    simulation.run(until=lambda: not simulation.lives(name_of(0)), for_ns=SECOND_NS)
    assert [reason for _, reason in cluster.stops] == ["it left"]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_nodes_may_leave_at_once(size: int) -> None:
    simulation, cluster = formed(size, size)
    cluster.protected = frozenset()
    for node_id in range(size):
        simulation.command(name_of(node_id), "leave")
    everybody = names(*range(size))
    simulation.run(until=lambda: not any(map(simulation.lives, everybody)), for_ns=5 * SECOND_NS)
    assert sorted(reason for _, reason in cluster.stops) == ["it left"] * size


@pytest.mark.parametrize("seed", range(200))
def test_nodes_may_leave_while_others_leave(seed: int) -> None:
    """A round of a node is cut short by the view in which the others have left."""
    size = 2 + seed % 3
    simulation, cluster = formed(seed, size)
    cluster.protected = frozenset()
    chosen = simulation.rng("leave")
    for node_id in chosen.sample(range(size), size):
        simulation.command(name_of(node_id), "leave")
        simulation.run(for_ns=chosen.randint(0, 10 ** chosen.randint(4, 8)))
    everybody = names(*range(size))
    simulation.run(until=lambda: not any(map(simulation.lives, everybody)), for_ns=5 * SECOND_NS)
    assert sorted(reason for _, reason in cluster.stops) == ["it left"] * size


def test_the_last_to_leave_does_not_wait_for_the_dead() -> None:
    simulation, cluster = formed(2, 2)
    cluster.protected = frozenset()
    simulation.command(name_of(0), "leave")
    simulation.crash(name_of(1))
    simulation.run(until=lambda: not simulation.lives(name_of(0)), for_ns=5 * SECOND_NS)
    assert [reason for _, reason in cluster.stops] == ["it left"]


def test_deaths_that_come_together_cost_one_view() -> None:
    simulation, cluster = formed(4, 9)
    cluster.protected = frozenset()
    before = cluster.acted_on
    for node_id in (1, 4, 6, 8):
        simulation.crash(name_of(node_id))
    settle((simulation, cluster), names(0, 2, 3, 5, 7))
    assert cluster.acted_on == before + 1


def test_what_many_nodes_order_at_once_is_one_view_and_each_order_is_applied_once() -> None:
    simulation, cluster = formed(5, 9)
    cluster.protected = frozenset()
    before = cluster.acted_on
    for node_id in range(9):
        for number in range(3):
            simulation.command(
                name_of(node_id), Submit(spec=JobSpec(job=1 + 10 * node_id + number, target="t"))
            )
    began_ns = simulation.now_ns
    simulation.run(until=lambda: all_have(cluster, 27), for_ns=SECOND_NS)
    assert all_have(cluster, 27) and cluster.acted_on <= before + 2
    assert simulation.now_ns - began_ns < cluster.deadlines.heartbeat_ns, "nobody waits for suspicions"
    view = cluster.nodes[name_of(3)].acts_on
    assert view is not None and [origin.number for origin in view.jobs.origins] == [3] * 9


def all_have(cluster: Cluster, jobs: int) -> bool:
    views = [node.acts_on for node in cluster.nodes.values()]
    return all(view is not None and len(view.jobs.jobs) == jobs for view in views)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_orders_survive_the_death_of_the_speaker(seed: int) -> None:
    simulation, cluster = formed(seed, 4)
    cluster.protected = frozenset()
    for number in range(5):
        simulation.command(name_of(3), Submit(spec=JobSpec(job=1 + number, target="t")))
    delay_ns = simulation.rng("delay").randint(0, 20_000_000)
    simulation.run(for_ns=delay_ns)
    simulation.crash(name_of(0))
    settle((simulation, cluster), names(1, 2, 3))
    simulation.run(for_ns=SECOND_NS)
    for node_id in (1, 2, 3):
        view = cluster.nodes[name_of(node_id)].acts_on
        assert view is not None and [job.id for job in view.jobs.jobs] == [1, 2, 3, 4, 5]
        assert view.jobs.applied(NodeKey(3, cluster.nodes[name_of(3)].me.key.incarnation)) == 5


def test_an_order_that_no_cluster_takes_is_refused_at_once() -> None:
    machine = ClusterMachine(Node(NodeKey(7, 1)), derive())
    machine.handle(FoundCluster(), now_ns=1)
    with pytest.raises(CommandRefused, match="no script or module is given"):
        machine.handle(Ordered(order=Submit(spec=JobSpec(job=1, target=""))), now_ns=2)
    for number in range(COMMANDS_WAITING_MAX):
        machine.handle(Ordered(order=Stop(job=number + 1, reason="x")), now_ns=3)
    with pytest.raises(CommandRefused, match="commands of node7#1 are pending already"):
        machine.handle(Ordered(order=Stop(job=1, reason="x")), now_ns=4)
    now_ns = 5
    while machine.view.jobs.applied(machine.me.key) < COMMANDS_WAITING_MAX:
        now_ns += derive().heartbeat_ns
        before = machine.view.epoch
        machine.handle(TimerFired(), now_ns=now_ns)
        machine.check_invariants()
        assert machine.view.epoch == before + 1, "it goes on for as long as there is something to agree on"
    assert machine.view.jobs.age_ns == now_ns - 1


def test_the_only_member_leaves_at_once() -> None:
    machine = ClusterMachine(Node(NodeKey(7, 1)), derive())
    machine.handle(FoundCluster(), now_ns=1)
    assert machine.handle(LeaveRequested(), now_ns=2) == [Stopped(reason="it left")]
    assert machine.handle(LeaveRequested(), now_ns=3) == []


def test_the_limit_of_silence_follows_what_was_heard() -> None:
    deadlines = derive()
    detector, steady, jumpy = d.Detector(deadlines), NodeKey(1, 1), NodeKey(2, 1)
    longest = [d.Limit(key=key, limit_ns=deadlines.suspicion_ns) for key in (steady, jumpy)]
    assert (
        detector.handle(d.Observe(subjects=(steady, jumpy), beat_ns=deadlines.heartbeat_ns), now_ns=0)
        == longest
    )
    beat_ns = deadlines.heartbeat_ns
    beats = tuple(number * beat_ns for number in range(1, 33))
    late = tuple(at_ns + (at_ns // beat_ns % 3) * beat_ns // 2 for at_ns in beats)

    def limit_of(key: NodeKey) -> int:
        return detector.silence(key, 0)[1]

    (limit,) = detector.handle(d.Beats(key=steady, arrivals_ns=beats), now_ns=0)
    assert limit == d.Limit(key=steady, limit_ns=limit_of(steady)), "a batch is as good as each"
    for at_ns in late:
        detector.handle(d.Beats(key=jumpy, arrivals_ns=(at_ns,)), now_ns=0)
    detector.check_invariants()
    assert 4 * beat_ns <= limit_of(steady) < limit_of(jumpy) <= deadlines.suspicion_ns
    at_ns = beats[-1] + limit_of(steady)
    assert detector.handle(d.Looked(), now_ns=at_ns - 1) == []
    silent = d.Silent(key=steady, reason=f"not heard for {limit_of(steady) / 1e6:.0f} ms")
    assert detector.handle(d.Looked(), now_ns=at_ns) == [silent]
    assert detector.handle(d.Looked(), now_ns=at_ns) == [], "told once"
    assert detector.handle(d.Beats(key=steady, arrivals_ns=(beats[-1],)), now_ns=at_ns) == [], "it is old"
    heard = detector.handle(d.Beats(key=steady, arrivals_ns=(at_ns + 1,)), now_ns=at_ns)
    assert heard[1:] == [d.Audible(key=steady)], "it was suspected"
    assert detector.handle(d.Beats(key=NodeKey(3, 1), arrivals_ns=(at_ns,)), now_ns=at_ns) == []


def test_a_cluster_without_a_job_is_patient_for_longer_and_no_longer_once_it_has_one() -> None:
    deadlines, peer = derive(), NodeKey(1, 1)
    detector = d.Detector(deadlines)

    def limit_with(*, busy: bool) -> int:
        beat_ns = d.beat_ns(deadlines, busy=busy)
        (limit,) = detector.handle(d.Observe(subjects=(peer,), beat_ns=beat_ns), now_ns=0)
        detector.check_invariants()
        assert isinstance(limit, d.Limit)
        return limit.limit_ns

    calm_ns = limit_with(busy=False)
    assert deadlines.suspicion_ns < calm_ns < deadlines.tcp_user_timeout_ms * MILLISECOND_NS
    assert calm_ns + deadlines.agreement_ns < deadlines.recovery_budget_ns
    beat_ns = d.beat_ns(deadlines, busy=False)
    detector.handle(d.Beats(key=peer, arrivals_ns=tuple(range(beat_ns, 33 * beat_ns, beat_ns))), now_ns=0)
    assert limit_with(busy=False) == calm_ns, "four beats, however regular"
    assert 4 * deadlines.heartbeat_ns < limit_with(busy=True) <= deadlines.suspicion_ns


def witnessed(seed: int, size: int, *, protected: frozenset[str]) -> tuple[World, WitnessStore]:
    """A cluster in which a witness says who may go on with half of a view."""
    store = WitnessStore()
    simulation, cluster = build(seed, size, store)
    cluster.protected = frozenset()
    everybody = names(*range(size))
    simulation.run(until=lambda: in_one_view(cluster, everybody), for_ns=LIVENESS_NS)
    assert in_one_view(cluster, everybody)
    cluster.protected = protected
    return (simulation, cluster), store


@pytest.mark.parametrize("dead", [0, 1])
def test_with_a_witness_either_of_two_nodes_goes_on_alone(dead: int) -> None:
    (simulation, cluster), store = witnessed(4, 2, protected=names(1 - dead))
    at_ns = simulation.now_ns - sim.SIM_START_NS
    simulation.apply(sim.Crash(process=name_of(dead), at_ns=at_ns, for_ns=3 * SECOND_NS))
    settle((simulation, cluster), names(1 - dead))
    assert store.record.holder is not None and store.record.holder.id == 1 - dead
    simulation.run(for_ns=3 * SECOND_NS)
    settle((simulation, cluster), names(0, 1))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 4])
def test_of_two_halves_one_goes_on_as_the_witness_says(seed: int, size: int) -> None:
    world, store = witnessed(seed, size, protected=frozenset())
    simulation, cluster = world
    halves = tuple(tuple(sorted(names(*range(at, at + size // 2)))) for at in (0, size // 2))
    store.deaf = frozenset(halves[seed % 2]) if seed < 4 else frozenset()
    at_ns = simulation.now_ns - sim.SIM_START_NS
    simulation.apply(sim.Partition(groups=halves, at_ns=at_ns, for_ns=10 * SECOND_NS))
    simulation.run(for_ns=5 * SECOND_NS)
    held = [half for half in halves if in_one_view(cluster, frozenset(half))]
    assert len(held) == 1, [str(r) for r in simulation.history[-20:]]
    assert held[0] == halves[1 - seed % 2] or seed >= 4, "who hears the witness"
    simulation.run(for_ns=5 * SECOND_NS)
    settle(world, names(*range(size)))


def test_without_an_answer_of_the_witness_both_halves_stop() -> None:
    (simulation, cluster), store = witnessed(7, 2, protected=frozenset())
    store.deaf = names(0, 1)
    at_ns = simulation.now_ns - sim.SIM_START_NS
    simulation.apply(
        sim.Partition(groups=(tuple(names(0)), tuple(names(1))), at_ns=at_ns, for_ns=4 * SECOND_NS)
    )
    simulation.run(until=lambda: len({key.id for key, _ in cluster.stops}) == 2, for_ns=4 * SECOND_NS)
    reasons = {reason for _, reason in cluster.stops}
    assert "it is cut off: 1 of 2 are half of view 2, and the witness has named nobody" in reasons
    assert not any(node.acts_on for node in cluster.nodes.values())


@given(seed=st.integers(0, 2**32), size=st.integers(2, 6))
@settings(max_examples=25, deadline=None)
def test_no_two_halves_decide_whatever_happens_to_them_and_to_the_witness(seed: int, size: int) -> None:
    """`Cluster` holds all views against each other; nobody is protected, so everybody may have to stop."""
    (simulation, _), store = witnessed(seed, size, protected=frozenset())
    rng = simulation.rng("faults")
    everybody = [name_of(node_id) for node_id in range(size)]
    for _ in range(4):
        at_ns = simulation.now_ns - sim.SIM_START_NS
        cut = sorted(rng.sample(everybody, size // 2))
        rest = tuple(name for name in everybody if name not in cut)
        groups = (rest, tuple(cut))
        simulation.apply(sim.Partition(groups=groups, at_ns=at_ns, for_ns=rng.randrange(2 * SECOND_NS)))
        store.deaf = frozenset(rng.sample(everybody, rng.randrange(size + 1)))
        if rng.random() < 0.5:
            for_ns = rng.randrange(SECOND_NS)
            simulation.apply(sim.Crash(process=rng.choice(everybody), at_ns=at_ns, for_ns=for_ns))
        simulation.run(for_ns=rng.randrange(3 * SECOND_NS))
