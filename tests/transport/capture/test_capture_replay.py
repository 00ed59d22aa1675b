"""Replay: the same machine answers the same, a changed one is found out, and what cannot be known is said.

The golden logs were written once by this module's `record_…` functions, and must be readable for ever:

    cd tests/transport/capture
    export PYTHONPATH=../..
    python test_capture_replay.py hello > golden_hello_2.txt
    python test_capture_replay.py machines > golden_machines_8.txt
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from support.machines.state_followers import follow_all

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.jobs.node_events import RankKey
from zbmd.actors.cluster.jobs.node_machine import LocalJobs
from zbmd.actors.cluster.port import ALONE, THIS_HOST, after_order
from zbmd.actors.cluster.state.job_table import JobSpec, Order, Stop, Submit
from zbmd.actors.supervision import machine as supervision
from zbmd.actors.supervision.events import ChildPolicy
from zbmd.actors.supervision.machine import SupervisionMachine
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.machine import Mirror, mirror_config
from zbmd.training.scenarios.commit import CommitScenario
from zbmd.training.scenarios.world import CommitOptions
from zbmd.transport import capture
from zbmd.transport.capture.records import Mark
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.handshake import hello
from zbmd.transport.identity import Identity, Side
from zbmd.transport.machine import SetTimer

GOLDEN = Path(__file__).parent / "golden_hello_2.txt"
GOLDEN_OLD = Path(__file__).parent / "golden_hello_1.txt"
"""Of the hello's version 1."""
GOLDEN_MACHINES = Path(__file__).parent / "golden_machines_8.txt"
GOLDEN_MACHINES_OLD = {
    "golden_machines_1.txt": {"membership", "step-commit"},
    "golden_machines_2.txt": {"jobs", "step-commit"},
    "golden_machines_3.txt": {"jobs"},
    "golden_machines_4.txt": {"jobs"},
    "golden_machines_5.txt": {"jobs"},
    "golden_machines_6.txt": {"jobs"},
    "golden_machines_7.txt": set[str](),
}
"""With machines that there are no more, or whose version is another: the kinds of these."""
GOLDEN_MACHINES_GROWN = {"golden_machines_7.txt": {"host"}}
"""Streams of events that have fields more now, with defaults."""
COOKIE = bytes(range(32))
SECRETS = {"cookie": COOKIE}

# ---- kinds: what a layer would register beside its machine; the replayed class can be changed


class Built:
    """Set the class of which a kind is built from now on."""

    commit: ClassVar[Callable[..., Any]] = Mirror
    jobs: ClassVar[Callable[..., Any]] = LocalJobs
    supervision: ClassVar[Callable[..., Any]] = SupervisionMachine
    hello: ClassVar[Callable[..., Any]] = hello.HelloMachine


def _build_jobs(config: Mapping[str, Any]) -> LocalJobs:
    machine: LocalJobs = Built.jobs(**config)
    return machine


def _build_supervision(config: Mapping[str, Any]) -> SupervisionMachine:
    machine: SupervisionMachine = Built.supervision(
        msgspec.convert(config["children"], list[ChildPolicy]),
        strategy=supervision.Strategy(config["strategy"]),
    )
    return machine


def _build_commit(config: Mapping[str, Any]) -> Mirror:
    machine: Mirror = Built.commit(**{**config, "own": tuple(config["own"])})
    return machine


def _build_hello(config: Mapping[str, Any]) -> hello.HelloMachine:
    machine: hello.HelloMachine = Built.hello(
        side=Side(config["side"]),
        identity=msgspec.convert(config["identity"], Identity),
        cookie=config["cookie"],
        nonce=config["nonce"],
        deadline_ns=config["deadline_ns"],
    )
    return machine


JOBS: capture.MachineKind[jobs.Event, jobs.Action] = capture.register(
    "test.jobs", 4, _build_jobs, events=jobs.Event, actions=jobs.Action, states=(LocalJobs,)
)
SUPERVISION: capture.MachineKind[supervision.Event, supervision.Action] = capture.register(
    "test.supervision",
    1,
    _build_supervision,
    events=supervision.Event,
    actions=supervision.Action,
    states=(SupervisionMachine,),
)
COMMIT: capture.MachineKind[zm.Event, zm.Action] = capture.register(
    "test.mirror", 1, _build_commit, events=zm.Event, actions=zm.Action, states=(Mirror,)
)
HELLO: capture.MachineKind[hello.HelloEvent, hello.HelloAction] = capture.register(
    "test.hello", 2, _build_hello, events=hello.HelloEvent, actions=hello.HelloAction, secrets=("cookie",)
)


# ---- runs to record


def recorder(directory: Path, **options: Any) -> capture.LogRecorder:
    origin = capture.Origin(process="rank0", incarnation=1)
    return capture.LogRecorder(directory, origin, capture.Clocks(hybrid=HybridClock()), **options)


def verdicts(directory: Path, wanted: capture.Filter | None = None) -> list[capture.Verdict]:
    return list(capture.replay_log(directory, wanted, secrets=SECRETS))


def run_jobs(log: capture.Recorder, seed: int) -> None:
    """A host's job: ranks are forked, join, are killed and replaced, in an order drawn by the seed."""
    rng = random.Random(seed)
    tap = capture.Tap(log, JOBS, "host", _build_jobs({}), {})
    tap.handle(jobs.IncarnationBegan(me=THIS_HOST.key), now_ns=0)
    view = after_order(ALONE, Submit(spec=JobSpec(job=1, target="job.py", ranks_per_node=4)), elapsed_ns=0)
    views, waiting = deque([view]), list[jobs.Event]()
    now_ns, kills, keys = 0, 2, list[RankKey]()

    def order(given: Order) -> None:
        nonlocal view
        view = after_order(view, given, elapsed_ns=1_000)
        views.append(view)

    while views or waiting:
        if views:
            event: jobs.Event = jobs.ViewActedOn(view=views.popleft())
        else:
            event = waiting.pop(0 if isinstance(waiting[0], jobs.Forked) else rng.randrange(len(waiting)))
        now_ns += rng.randrange(1_000_000)
        for action in tap.handle(event, now_ns=now_ns):
            match action:
                case jobs.ProposeOrder(order=asked):
                    order(asked)
                case jobs.Fork(key=key):
                    waiting.insert(0, jobs.Forked(key=key))
                    waiting.append(jobs.Joined(key=key, address=f"a{key.rank}"))
                case jobs.InstallView(view=installed):
                    tap.mark(installed.epoch)
                    keys = [RankKey(1, m.rank, m.incarnation) for m in installed.members]
                    waiting += [jobs.Linked(key=key, epoch=installed.epoch) for key in keys]
                case jobs.EnterView(to=to) if kills:
                    kills -= 1
                    victim = rng.choice(to)
                    key = next(key for key in keys if key.rank == victim)
                    waiting.append(jobs.LossProven(key=key))
                    waiting.append(jobs.Exited(key=key, code=-9, reason="killed (SIGKILL)"))
                case jobs.EnterView():
                    order(Stop(job=1, reason="enough"))
                case jobs.Terminate(key=key):
                    waiting.append(jobs.Exited(key=key, code=0, reason="exit code 0"))
                case _:
                    pass
        tap.check_invariants()
    tap.close("over")


def run_supervision(log: capture.Recorder, seed: int) -> None:
    """Three children that end again and again, until their supervisor gives up."""
    rng = random.Random(seed)
    children = [ChildPolicy(child=f"c{i}") for i in range(3)]
    config = {"children": children, "strategy": "rest_for_one"}
    machine = SupervisionMachine(children, strategy=supervision.Strategy("rest_for_one"))
    tap = capture.Tap(log, SUPERVISION, "root", machine, config)
    waiting: list[supervision.Event] = [supervision.StartRequested()]
    now_ns = 0
    while True:
        if not waiting:
            if machine.phase is supervision.SupervisorPhase.STOPPED:
                break
            child = rng.choice([c for c, s in machine.states.items() if s is supervision.ChildState.RUNNING])
            waiting.append(supervision.ChildExited(child=child, normal=False, reason="fell over"))
        now_ns += rng.randrange(1_000_000)
        for action in tap.handle(waiting.pop(0), now_ns=now_ns):
            match action:
                case supervision.StartChild(child=child):
                    waiting.append(supervision.ChildStarted(child=child))
                case supervision.StopChild(child=child) | supervision.KillChild(child=child):
                    waiting.append(supervision.ChildExited(child=child, normal=True, reason="asked"))
                case _:
                    pass
        tap.check_invariants()


def run_commit(log: capture.Recorder, seed: int) -> int:
    """A simulated job with kills: the machine of every rank's every life is recorded. Returns how many."""
    lives: list[int] = []

    class Recorded(Mirror):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            lives.append(self.place)
            config = mirror_config(self, outlives=arguments["outlives"])
            name = f"rank{self.place} life {len(lives)}"
            self._tap = capture.Tap(log, COMMIT, name, Mirror(**arguments), config)

        def handle(self, event: zm.Event, *, now_ns: int) -> list[zm.Action]:
            actions = super().handle(event, now_ns=now_ns)
            assert self._tap.handle(event, now_ns=now_ns) == actions
            for action in actions:
                if isinstance(action, zm.Commit):
                    self._tap.mark(action.version)
            return actions

    options = CommitOptions(world_size=4, steps=8, kills=3, sharded=seed % 2 == 1)
    CommitScenario(mirror=Recorded).run(seed, options)
    return len(lives)


def run_hello(log: capture.Recorder, *, listener_cookie: bytes = COOKIE) -> None:
    """Two sides greet each other; their bytes are cut into pieces on the way."""
    taps: dict[Side, capture.Tap[hello.HelloEvent, hello.HelloAction]] = {}
    for side, cookie in ((Side.DIALER, COOKIE), (Side.LISTENER, listener_cookie)):
        identity = Identity(name=f"{side.value}-process", pid=1, uid=0, incarnation=1)
        config = {
            "side": side,
            "identity": identity,
            "cookie": cookie,
            "nonce": side.value.ljust(32).encode(),
            "deadline_ns": 10_000,
        }
        machine = hello.HelloMachine(**config)  # type: ignore[arg-type]
        taps[side] = capture.Tap(log, HELLO, f"hello as {side.value}", machine, config)
    waiting: list[tuple[Side, hello.HelloEvent]] = [
        (Side.LISTENER, hello.Opened(peer_uid=0)),
        (Side.DIALER, hello.Opened(peer_uid=None)),
    ]
    now_ns = 0
    while waiting:
        side, event = waiting.pop(0)
        now_ns += 10
        other = Side.DIALER if side is Side.LISTENER else Side.LISTENER
        for action in taps[side].handle(event, now_ns=now_ns):
            if isinstance(action, hello.SendBytes):
                half = len(action.data) // 2
                for part in (action.data[:half], action.data[half:]):
                    waiting.append((other, hello.BytesReceived(data=part)))
    for tap in taps.values():
        tap.close("done")


# ---- identical


@pytest.mark.parametrize("run", [run_jobs, run_supervision])
def test_a_host_and_a_supervisor_replay_identical(
    tmp_path: Path, seed: int, run: Callable[[capture.Recorder, int], None]
) -> None:
    log = recorder(tmp_path)
    run(log, seed)
    log.close()
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Identical) and verdict.events > 5 and not verdict.code_changed


def test_a_job_with_kills_replays_identical(tmp_path: Path, seed: int) -> None:
    log = recorder(tmp_path)
    lives = run_commit(log, seed)
    log.close()
    found = verdicts(tmp_path)
    assert len(found) == lives >= 4
    assert all(isinstance(verdict, capture.Identical) for verdict in found), found


def test_both_sides_of_a_hello_replay_identical_and_the_secret_stays_out(tmp_path: Path) -> None:
    log = recorder(tmp_path)
    run_hello(log)
    run_hello(log, listener_cookie=bytes(32))
    log.close()
    found = verdicts(tmp_path)
    (other,) = [verdict for verdict in found if not isinstance(verdict, capture.Identical)]
    # It had another cookie than the one that the replay is given.
    assert isinstance(other, capture.Divergence) and other.stream == "hello as listener"
    assert len(found) == 4
    (process,) = capture.open_log(tmp_path).processes
    configs = [bytes(stream.config) for stream in process.streams.values()]
    assert len(configs) == 4 and not any(COOKIE in config or b"cookie" in config for config in configs)


def test_a_digest_of_the_actions_is_enough_to_tell(tmp_path: Path, seed: int) -> None:
    log = recorder(tmp_path, actions=capture.Detail.DIGEST)
    run_supervision(log, seed)
    log.close()
    (verdict,) = verdicts(tmp_path)
    assert isinstance(verdict, capture.Identical)


def test_a_replay_survives_rotation(tmp_path: Path, seed: int) -> None:
    disk = capture.DiskLimits(segment_bytes=1 << 12)
    log = recorder(tmp_path, limits=capture.LogLimits(disk=disk))
    for i in range(10):
        run_jobs(log, seed + i)
        log.flush()
    log.close()
    (process,) = capture.open_log(tmp_path).processes
    assert len(process.segments) > 1
    found = verdicts(tmp_path)
    assert [type(verdict) for verdict in found] == [capture.Identical] * 10


def test_without_a_recorder_a_tap_is_its_machine() -> None:
    tap: capture.Tap[jobs.Event, jobs.Action] = capture.Tap(None, JOBS, "host", LocalJobs(), {})
    begun = jobs.IncarnationBegan(me=THIS_HOST.key)
    submit = Submit(spec=JobSpec(job=1, target="job.py"))
    acted = jobs.ViewActedOn(view=after_order(ALONE, submit, elapsed_ns=0))
    machine = LocalJobs()
    for event in (begun, acted):
        assert tap.handle(event, now_ns=1) == machine.handle(event, now_ns=1)
    tap.check_invariants()
    tap.mark(1)
    tap.close("x")
    assert tap.stream == 0


# ---- divergence

Mutation = Callable[[zm.Event, list[zm.Action]], Sequence[zm.Action]]


def _only_first_digest(_: zm.Event, actions: list[zm.Action]) -> Sequence[zm.Action]:
    return [replace(a, digests=a.digests[:1]) if isinstance(a, zm.Commit) else a for a in actions]


def _wrong_slot(_: zm.Event, actions: list[zm.Action]) -> Sequence[zm.Action]:
    return [replace(action, slot=9) if isinstance(action, zm.CopyWard) else action for action in actions]


def _never_begins(_: zm.Event, actions: list[zm.Action]) -> Sequence[zm.Action]:
    return [action for action in actions if not isinstance(action, zm.StartAnew)]


def _raises(event: zm.Event, actions: list[zm.Action]) -> Sequence[zm.Action]:
    if isinstance(event, zm.Voted):
        raise LocalProtocolError("a vote is not expected")
    return actions


MUTATIONS: dict[str, Mutation] = {
    "forgets digests": _only_first_digest,
    "writes the wrong slot": _wrong_slot,
    "never begins": _never_begins,
    "in reverse": lambda _, actions: actions[::-1],
    "says all twice": lambda _, actions: [*actions, *actions],
    "raises": _raises,
}


def mutant(mutation: Mutation) -> type[Mirror]:
    class Mutant(Mirror):
        def handle(self, event: zm.Event, *, now_ns: int) -> list[zm.Action]:
            return list(mutation(event, super().handle(event, now_ns=now_ns)))

    return Mutant


@pytest.fixture(scope="module")
def recorded_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("job")
    log = recorder(directory)
    for job in range(4):  # so that every mutation meets what it changes
        run_commit(log, job)
    log.close()
    return directory


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutated_machine_diverges_and_the_story_says_where(
    recorded_job: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(Built, "commit", staticmethod(mutant(MUTATIONS[name])))
    found = [v for v in verdicts(recorded_job) if isinstance(v, capture.Divergence)]
    assert found
    entries = {entry.number: entry for entry in capture.open_log(recorded_job).processes[0].entries()}
    for divergence in found:
        entry = entries[divergence.number]
        assert divergence.event == capture.describe(entry.record)
        assert divergence.expected != divergence.actual
        assert divergence.story and divergence.process == "rank0#1"
        assert divergence.difference
        last = [e.record.step for n, e in entries.items() if n < entry.number and isinstance(e.record, Mark)]
        assert divergence.step in (None, *last)


def test_a_divergence_names_the_first_action_that_differs(
    recorded_job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Built, "commit", staticmethod(mutant(_wrong_slot)))
    divergence = next(v for v in verdicts(recorded_job) if isinstance(v, capture.Divergence))
    assert "slot=0" in divergence.difference and "slot=9" in divergence.difference
    assert "CopyWard" in divergence.difference


# ---- the golden logs


def golden_recorder(directory: Path) -> capture.LogRecorder:
    """A log whose clocks stand still."""
    clocks = capture.Clocks(
        monotonic_ns=lambda: 5_000, wall_ns=lambda: 1_700_000_000_000_000_000, hybrid=HybridClock()
    )
    origin = capture.Origin(process="rank0", incarnation=1, job=7, hosts=("golden",), release="0.1.0")
    return capture.LogRecorder(directory, origin, clocks)


def record_machines(directory: Path) -> None:
    """A host that loses ranks, a supervisor that gives up, and the ranks of a job with kills."""
    log = golden_recorder(directory)
    run_jobs(log, 1)
    run_supervision(log, 1)
    run_commit(log, 1)
    log.close("done")


def record_hello(directory: Path) -> None:
    """Hellos that are accepted and refused."""
    log = golden_recorder(directory)
    log.note("the golden log of format 1")
    run_hello(log)
    log.mark(0, 1)
    run_hello(log, listener_cookie=COOKIE)
    log.close("done")


def test_the_golden_log_of_format_1_replays_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = tmp_path / "golden"
    capture.text_to_capture(GOLDEN.read_text(), golden)
    assert capture.capture_to_text(golden) == GOLDEN.read_text()
    found = verdicts(golden)
    assert [(type(verdict), verdict.code_changed) for verdict in found] == [(capture.Identical, False)] * 4
    (process,) = capture.open_log(golden).processes
    assert process.origin.release == "0.1.0" and process.ending is capture.Ending.CLOSED
    assert process.find_step(1) is not None

    class Hasty(hello.HelloMachine):
        def handle(self, event: hello.HelloEvent, *, now_ns: int) -> list[hello.HelloAction]:
            return [a for a in super().handle(event, now_ns=now_ns) if not isinstance(a, SetTimer)]

    monkeypatch.setattr(Built, "hello", staticmethod(Hasty))
    assert [type(verdict) for verdict in verdicts(golden)] == [capture.Divergence] * 4


def test_a_hello_of_another_version_is_read_and_its_replay_says_which(tmp_path: Path) -> None:
    capture.text_to_capture(GOLDEN_OLD.read_text(), tmp_path / "golden")
    found = verdicts(tmp_path / "golden")
    assert len(found) == 4
    for verdict in found:
        assert isinstance(verdict, capture.Incomplete)
        assert "version 1 of the machine test.hello" in verdict.reason


@pytest.mark.parametrize(
    "text",
    ["# ../outside.zlog\nAAAA\n", "# /etc/a.zlog\nAAAA\n", "AAAA\n", "# a/0.zlog\nA\n", "# a/0.txt\nAAAA\n"],
)
def test_text_that_is_no_capture_is_refused_and_writes_nothing(tmp_path: Path, text: str) -> None:
    with pytest.raises(capture.NotACapture):
        capture.text_to_capture(text, tmp_path / "in")
    assert list(tmp_path.rglob("*")) == []


class _NoViewAfterLoss(LocalJobs):
    def handle(self, event: jobs.Event, *, now_ns: int) -> list[jobs.Action]:
        actions = super().handle(event, now_ns=now_ns)
        return [a for a in actions if not isinstance(a, jobs.EnterView) or a.epoch == 1]


class _Forgetful(SupervisionMachine):
    def handle(self, event: supervision.Event, *, now_ns: int) -> list[supervision.Action]:
        actions = super().handle(event, now_ns=now_ns)
        return actions if isinstance(event, supervision.StartRequested) else actions[:1]


def test_the_golden_machines_replay_identical_and_mutants_diverge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    golden = tmp_path / "golden"
    capture.text_to_capture(GOLDEN_MACHINES.read_text(), golden)
    found = verdicts(golden)
    assert len(found) >= 6
    assert all(isinstance(verdict, capture.Identical) and not verdict.code_changed for verdict in found), (
        found
    )
    (log,) = capture.open_log(golden).processes
    kinds = {"test.jobs", "test.supervision", "test.mirror"}
    assert follow_all(log, random.Random(seed)) == kinds
    mutants: list[tuple[str, Callable[..., Any]]] = [
        ("jobs", _NoViewAfterLoss),
        ("supervision", _Forgetful),
        ("commit", mutant(_wrong_slot)),
        ("commit", mutant(_only_first_digest)),
        ("commit", mutant(MUTATIONS["in reverse"])),
    ]
    for name, mutated in mutants:
        with monkeypatch.context() as patch:
            patch.setattr(Built, name, staticmethod(mutated))
            assert any(isinstance(verdict, capture.Divergence) for verdict in verdicts(golden)), name


@pytest.mark.parametrize("name", GOLDEN_MACHINES_OLD)
def test_golden_machines_beside_some_that_are_gone_replay_identical(tmp_path: Path, name: str) -> None:
    golden = Path(__file__).parent / name
    capture.text_to_capture(golden.read_text(), tmp_path / "golden")
    gone: set[str] = set()
    others = 0
    for verdict in verdicts(tmp_path / "golden"):
        if isinstance(verdict, capture.Incomplete):
            gone |= {kind for kind in GOLDEN_MACHINES_OLD[name] if f"test.{kind}" in verdict.reason}
        else:
            assert isinstance(verdict, capture.Identical), verdict
            assert verdict.code_changed == (verdict.stream in GOLDEN_MACHINES_GROWN.get(name, ())), verdict
            others += 1
    assert gone == GOLDEN_MACHINES_OLD[name] and others >= 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        {"hello": record_hello, "machines": record_machines}[sys.argv[1]](Path(directory))
        sys.stdout.write(capture.capture_to_text(Path(directory)))
