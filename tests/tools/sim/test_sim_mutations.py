"""Bugs planted in the machines; see `support.machines.mutations`. Sharded loops: test_sim_shards.py."""

from __future__ import annotations

import pytest
from support.machines.mutations import ANY, BROKEN, Edit, Mutation, require_found

from zbmd.tools.entry.zbmd import main
from zbmd.transport.sim import RunOutcome

MACHINE = "zbmd.training.redundancy.machine"
MIRROR = f"{MACHINE}:Mirror"
INTERFACE = "zbmd.training.redundancy.interface"
RESULTS = "zbmd.training.job.results:StepResults"
LOOP = "zbmd.training.torch.transaction:Transactions._go_to"
REPAIR = "zbmd.collectives.repair.machine:RepairMachine"
VERDICT = "zbmd.collectives.repair.machine:_Case"
VIEWS = "zbmd.collectives.elastic.views_machine:ViewsMachine"
SUPERVISION = "zbmd.actors.supervision.machine:SupervisionMachine"
PEER = "zbmd.actors.core.peer:Peer"
CLUSTER = "zbmd.actors.cluster.membership.machine:ClusterMachine"
DIRECTORY = "zbmd.actors.directory.machine:DirectoryMachine"
UPGRADE = "zbmd.actors.upgrade.local:LocalUpgrade"
LOCAL_JOBS = "zbmd.actors.cluster.jobs.node_machine:LocalJobs"

CALM_PAIR = "--ranks 2 --length 2 --faults 0"

MUTATIONS = [
    Mutation(
        "a copy that was interrupted counts as whole",
        "commit",
        (
            Edit(
                f"{MIRROR}._copied",
                "if digest is not None:",
                "digest = digest or NO_DIGEST\n    if True:",
            ),
        ),
        BROKEN,
        seed=34,
    ),
    Mutation(
        "a group goes back past what is known to be committed",
        "commit",
        (Edit(f"{MACHINE}:choose", "version < known or None in sources", "None in sources"),),
        BROKEN,
        seed=63,
    ),
    Mutation(
        "replicas go on from a version that nobody knows to be committed",
        "commit",
        (Edit(f"{MACHINE}:choose", "(version > known and not beyond)", "False"),),
        BROKEN,
        seed=8,
    ),
    Mutation(
        "a version counts as committed before the vote",
        "commit",
        (
            Edit(
                f"{MIRROR}._updated",
                "self.state = State.PREPARED",
                "self.state, self.known = State.PREPARED, self.version + 1",
            ),
        ),
        BROKEN,
        seed=8,
    ),
    Mutation(
        "a rank that is ahead goes on from its own version",
        "commit",
        (
            Edit(
                f"{MIRROR}._resume",
                "self.state, self.version = State.HOLDING, self._target",
                "self.state, self.version = State.HOLDING, max(self._target, *(v or 0 for v in self.own))",
            ),
        ),
        BROKEN,
        seed=8,
    ),
    Mutation(
        "what is written again still counts as held",
        "commit",
        (Edit(f"{MIRROR}._resume", "(self.own[1 - self.version % SLOTS] or 0) > self.version", "False"),),
        BROKEN,
        seed=1647,
    ),
    Mutation(
        "ranks that hold the same state do not compare it",
        "commit",
        (Edit(f"{MIRROR}._voted", "if own != votes[first][0]:", "if False:"),),
        BROKEN,
        seed=95,
    ),
    Mutation(
        "a copy is not compared with its original",
        "commit",
        (Edit(f"{MIRROR}._voted", "self.copied and keeper[1] != own", "False"),),
        BROKEN,
        seed=693,
    ),
    Mutation(
        "the digest of what was pulled is not looked at",
        "commit",
        (Edit(f"{MIRROR}._restored", "if self._expected not in (NO_DIGEST, digest):", "if False:"),),
        BROKEN,
        "--ranks 2 --length 1 --faults 2",
        seed=31,
    ),
    Mutation(
        "the digest that a version was voted for with is forgotten",
        "commit",
        (Edit(f"{MIRROR}._voted", "self._voted_for = version, votes[self.place][0]", "pass"),),
        BROKEN,
        "--ranks 2 --length 1 --faults 2",
        seed=31,
    ),
    Mutation(
        "the buddy of a rank is itself",
        "commit",
        (Edit(f"{MACHINE}:buddies", "max(sizes.values()) % n or 1", "max(sizes.values()) % n"),),
        BROKEN,
        seed=4,
    ),
    Mutation(
        "a copy of an earlier version is taken for this one's",
        "commit",
        (
            Edit(
                f"{MIRROR}._all_hold",
                "(copy.ward, copy.version) == (self.ward, version)",
                "copy.ward == self.ward",
            ),
        ),
        BROKEN,
        seed=4,
    ),
    Mutation(
        "who alone saw a commit keeps its record",
        "commit",
        (Edit(f"{RESULTS}.learn_records", "map(self._decoded, rows)", "()"),),
        BROKEN,
        seed=113,
    ),
    Mutation(
        "what another rank saw committed is not reported",
        "training",
        (Edit(f"{MIRROR}.report", "max(known, self.known)", "self.known"),),
        BROKEN,
        seed=45471279076715,
    ),
    Mutation(
        "a record has the digests of as many ranks as there are",
        "commit",
        (Edit(f"{RESULTS}.committed", "keys or range(len(digests))", "range(len(digests))"),),
        BROKEN,
        "--ranks 2 --length 1 --faults 1",
        seed=6,
    ),
    Mutation(
        "a job trains with the ranks that are there",
        "commit",
        (Edit(f"{INTERFACE}:use_of", "len(view.members) == world_size or fits(view.ranks)", "True"),),
        ANY,
        seed=16,
    ),
    Mutation(
        "ranks go on after one has left with the result",
        "commit",
        (Edit(f"{INTERFACE}:use_of", "if view.finished:", "if False:"),),
        ANY,
        seed=3,
    ),
    Mutation(
        "a state is taken from a rank behind", "loop", (Edit(LOOP, "== target)", ">= 0)"),), ANY, seed=8
    ),
    Mutation(
        "an operation returns once its result is here, not once all have it",
        "repair",
        (
            Edit(
                f"{REPAIR}._ended",
                "if event.outcome is Outcome.COMMITTED:",
                "if event.outcome in (RunOutcome.COMMITTED, Outcome.HELD):",
            ),
        ),
        BROKEN,
        seed=8,
    ),
    Mutation(
        "a result that some hold is made again",
        "repair",
        (Edit(f"{VERDICT}.verdict", "if held and not call.own:", "if False:"),),
        BROKEN,
        "--length 6",  # some operations, of which one is cut just so
        seed=494,
    ),
    Mutation(
        "a result that is to be made again still counts as held",
        "repair",
        (Edit(f"{REPAIR}._drop_result", "self.phase = Phase.PENDING", "pass"),),
        BROKEN,
        seed=166,
    ),
    Mutation(
        "an operation is run without its root",
        "repair",
        (Edit(f"{REPAIR}._root_is_absent", "needs >= 0 and", "False and"),),
        BROKEN,
        seed=19,
    ),
    Mutation(
        "each has a result of its own, and gets a copy of another's",
        "repair",
        (Edit(f"{VERDICT}.verdict", "if held and not call.own:", "if held:"),),
        BROKEN,
        seed=12,
    ),
    Mutation(
        "a view is entered before those who lose a member in it have drained",
        "parts",
        (Edit(f"{VIEWS}._enter_if_drained", "or self._draining", ""),),
        ANY,
        seed=2,
    ),
    Mutation(
        "a group is cut by a view in which all of its members stay",
        "parts",
        (Edit(f"{VIEWS}._loses", "not group.members <= set(self._coming.kept)", "True"),),
        BROKEN,
        seed=2,
    ),
    Mutation(
        "a group that nobody calls an operation of does not come to a view without one of its members",
        "parts",
        (Edit(f"{VIEWS}._enter_if_drained", "if len(self._groups) > 1:", "if False:"),),
        ANY,
        seed=112,
    ),
    Mutation(
        "either half of a view may go on",
        "membership",
        (
            Edit(
                f"{CLUSTER}._agreed_by",
                "if not verdict.holds:",
                "if not verdict.holds and 2 * len(asked.present()) < len(self.view.nodes):",
            ),
        ),
        BROKEN,
        seed=586,
    ),
    Mutation(
        "a view is acted on before all of its members know it",
        "membership",
        (Edit(f"{CLUSTER}._learned_by", "if result.missing:", "if False:"),),
        BROKEN,
        seed=19,
    ),
    Mutation(
        "half of the observers are believed",
        "membership",
        (
            Edit(
                "zbmd.actors.cluster.membership.reports:Reports._agreed",
                "2 * says > len(sound)",
                "2 * says >= len(sound)",
            ),
        ),
        BROKEN,
        seed=565,
    ),
    Mutation(
        "a joiner receives no view until it is one of those who must know it",
        "membership",
        (
            Edit(f"{CLUSTER}._catch_up", "if epoch >= self.view.epoch:", "if True:"),
            Edit(f"{CLUSTER}._knocked", "member.key == node.key:", "member.key == node.key and False:"),
        ),
        ANY,
        seed=1001,
    ),
    Mutation(
        "ranks enter a view once those of their own host are linked",
        "jobs",
        (
            Edit(
                f"{LOCAL_JOBS}._enter",
                "not all(local.words.get((epoch, host)) for host in local.hosts)",
                "False",
            ),
        ),
        BROKEN,
        seed=1001,
    ),
    Mutation(
        "a host that went past a view does not say so",
        "jobs",
        (
            Edit(f"{LOCAL_JOBS}._install", "if passed not in local.promised and", "if False and"),
            Edit(f"{LOCAL_JOBS}._host_said", "if promised or passed:", "if promised:"),
        ),
        (RunOutcome.LIVENESS,),
        seed=2062,
    ),
    Mutation(
        "ranks that have lost each other get no other view",
        "jobs",
        (Edit(f"{LOCAL_JOBS}._link_lost", "epoch > local.relinked", "False"),),
        (RunOutcome.LIVENESS,),
        seed=3002,
    ),
    Mutation(
        "a rank that never joins is waited for",
        "jobs",
        (Edit(f"{LOCAL_JOBS}._forked", "if process.hurried:", "if False:"),),
        (RunOutcome.LIVENESS,),
        seed=3016,
    ),
    Mutation(
        "a node whose life has ended lets its ranks go on",
        "jobs",
        (Edit(f"{LOCAL_JOBS}._end_incarnation", "self._condemn(local, process, now_ns, kill=True)", "pass"),),
        BROKEN,
        seed=11,
    ),
    Mutation(
        "a rank that starts again keeps its incarnation",
        "jobs",
        (
            Edit(
                "zbmd.actors.cluster.state.job_rules:_started",
                "incarnation=entry.incarnation + 1",
                "incarnation=max(1, entry.incarnation)",
            ),
        ),
        ANY,
        seed=3007,
    ),
    Mutation(
        "no view is installed when a rank leaves orderly",
        "commit",
        (
            Edit(
                "zbmd.actors.cluster.state.job_rules:_down",
                "return _with_rank(job, _ended(entry, SlotState.FINISHED))",
                "left = _ended(entry, SlotState.FINISHED)\n        "
                "return dataclasses.replace(job, ranks=_with_rank(job, left).ranks)",
            ),
        ),
        (RunOutcome.LIVENESS,),
        "--ranks 3 --length 1 --faults 1",  # a rank must leave just as the view after it is under way
        seed=2,
    ),
    Mutation(
        "rest_for_one forgets the later siblings",
        "supervision",
        (
            Edit(
                f"{SUPERVISION}._restart",
                "group = self._order[self._order.index(c) :]",
                "group = [c]",
            ),
        ),
        BROKEN,
        seed=3,
    ),
    Mutation(
        "restart intensity is off by one",
        "supervision",
        (
            Edit(
                f"{SUPERVISION}._restart",
                "if len(self._restarts_ns) > self._intensity:",
                "if len(self._restarts_ns) >= self._intensity:",
            ),
        ),
        BROKEN,
        seed=1,
    ),
    Mutation(
        "an actor spawned in another process outlives the spawn that was given up",
        "supervision",
        (Edit(f"{PEER}.unspawn", "self.post(wire.Unspawn(call))", "pass"),),
        (RunOutcome.LIVENESS,),
        "--ranks 1",
        seed=7,
    ),
    Mutation(
        "a monitor hears again when the link ends",
        "supervision",
        (Edit(f"{PEER}._on_ended", "self._watches.pop(m.watch, None)", "self._watches.get(m.watch)"),),
        BROKEN,
        "--ranks 1",
        seed=36,
    ),
    Mutation(
        "a message for a dead life of an actor is delivered to the next",
        "links",
        (
            Edit(
                "zbmd.actors.core.system:CoreSystem._create",
                "Ref(self, self.name, self.incarnation, actor_name, incarnation)",
                "Ref(self, self.name, self.incarnation, actor_name, 1)",
            ),
        ),
        BROKEN,
        seed=11,
    ),
    Mutation(
        "the message in which a new version crashed is not handled again",
        "actors",
        (
            Edit(
                f"{UPGRADE}._run",
                "return await self._again(cell, message, error) if is_open else DEFERRED",
                "return DEFERRED",
            ),
        ),
        BROKEN,
        CALM_PAIR,
        seed=1,
    ),
    Mutation(
        "an actor whose new version has crashed keeps what that remembered",
        "actors",
        (Edit(f"{UPGRADE}._run", "self._go_back(cell, before)", "self._go_back(cell, _state(cell.actor))"),),
        BROKEN,
        CALM_PAIR,
        seed=1,
    ),
    Mutation(
        "a version is taken back for what is spawned alone",
        "actors",
        (Edit(f"{UPGRADE}.take_back", "if runs is RunningVersion.NEW", "if runs is None"),),
        ANY,
        CALM_PAIR,
        seed=3008,
    ),
    Mutation(
        "everybody takes itself for the owner of all scripts",
        "actors",
        (Edit("zbmd.actors.routing.routes:Routes._finder_of", "if self.owns(process):", "if True:"),),
        (RunOutcome.LIVENESS,),
        CALM_PAIR,
        seed=1,
    ),
    Mutation(
        "a name stays with an actor that has ended",
        "actors",
        (Edit(f"{DIRECTORY}._ended", "if holder == key]", "if holder is None]"),),
        (RunOutcome.LIVENESS,),
        CALM_PAIR,
        seed=3001,
    ),
    Mutation(
        "who leaves a group leaves it for its own process alone",
        "actors",
        (
            Edit(
                f"{DIRECTORY}._leave",
                "self._tell_change(group, (), (key,), actions)",
                "actions.append(GroupChanged(group=group, joined=(), left=(key,)))",
            ),
        ),
        ANY,
        CALM_PAIR,
        seed=3001,
    ),
    Mutation(
        "a broadcast reaches the first of a process's actors twice",
        "actors",
        (
            Edit(
                f"{PEER}._on_tell_all",
                "for to, incarnation in m.to:",
                "for to, incarnation in (*m.to, m.to[0]):",
            ),
        ),
        BROKEN,
        CALM_PAIR,
        seed=1,
    ),
    Mutation(
        "a program lacks one of its waits",
        "collectives",
        (
            Edit(
                "zbmd.collectives.algorithms.direct:exchange_slices",
                "Wait(peer, 1)",
                "Wait(peer, 0)",
            ),
        ),
        BROKEN,
        seed=36,
    ),
]

WHOLLY_SHRUNK = tuple({mutation.scenario: mutation for mutation in reversed(MUTATIONS)}.values())


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_planted_bug_is_found_shrunk_and_seen_again(
    mutation: Mutation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_found(mutation, monkeypatch, capsys, whole=mutation in WHOLLY_SHRUNK)


def test_without_a_bug_nothing_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The same hunt over the code as it is: what finds the bugs is no checker that fails on anything."""
    assert main(["sim", "hunt", "--seconds", "4"]) == 0, capsys.readouterr().out
