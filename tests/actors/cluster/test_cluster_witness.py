"""The witness machine, whatever is lost and delayed: one tie-breaker an epoch, and all hear of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from zbmd.actors.cluster.membership import witness as w
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.actors.simulated.membership_scenario import WitnessStore
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

RETRY_NS = 10
SCHEDULES = 300
STEPS = 200


@dataclass
class World:
    """Nodes that ask one store over a network that loses and delays, by a seed."""

    rng: random.Random
    nodes: list[w.WitnessMachine]
    store: WitnessStore = field(default_factory=WitnessStore)
    faulty: bool = True
    now_ns: int = 0
    requests: list[tuple[int, w.Read | w.Swap]] = field(default_factory=list[tuple[int, w.Read | w.Swap]])
    answers: list[tuple[int, w.Event]] = field(default_factory=list[tuple[int, w.Event]])
    timers: dict[int, int] = field(default_factory=dict[int, int])
    given: dict[tuple[int, int], NodeKey | None] = field(
        default_factory=dict[tuple[int, int], NodeKey | None]
    )

    def tell(self, node: int, event: w.Event) -> None:
        machine = self.nodes[node]
        for action in machine.handle(event, now_ns=self.now_ns):
            match action:
                case w.Read() | w.Swap():
                    self.requests.append((node, action))
                case SetTimer(at_ns=at_ns):
                    self.timers[node] = at_ns
                case w.TieBreakerNamed(epoch=epoch, holder=holder):
                    assert (node, epoch) not in self.given, "told once"
                    self.given[node, epoch] = holder
        machine.check_invariants()

    def step(self) -> None:
        """One thing that may happen next."""
        self.now_ns += 1
        if self.requests and self.rng.random() < 0.5:
            node, request = self.requests.pop(self.rng.randrange(len(self.requests)))
            lost = self.rng.random() if self.faulty else 1.0
            failed = w.RequestFailed(number=request.number, reason="lost")
            if lost < 0.2:
                self.answers.append((node, failed))
                return
            told = w.RecordRead(number=request.number, record=self.store.do(request))
            self.answers.append((node, failed if lost < 0.4 else told))
            if lost > 0.9 and self.faulty:
                self.answers.append((node, told))  # late, and twice
        elif self.answers:
            self.tell(*self.answers.pop(self.rng.randrange(len(self.answers))))
        for node in [node for node, at_ns in self.timers.items() if at_ns <= self.now_ns]:
            del self.timers[node]
            self.tell(node, TimerFired())


def run(seed: int) -> World:
    rng = random.Random(seed)
    count = rng.choice([2, 2, 3, 4])
    world = World(rng, [w.WitnessMachine(NodeKey(n, 1), retry_ns=RETRY_NS) for n in range(count)])
    epochs = [1] * count
    for _ in range(STEPS):
        if rng.random() < 0.1:
            node = rng.randrange(count)
            epochs[node] += rng.choice([0, 0, 1, 2])
            world.tell(node, w.EpochWanted(epoch=epochs[node]))
        if rng.random() < 0.02:
            node = rng.randrange(count)
            world.tell(node, w.EpochDecided(epoch=epochs[node] - 1))
        world.step()
    world.faulty = False
    for node in range(count):
        world.tell(node, w.EpochWanted(epoch=max(epochs) + 1))
    for _ in range(STEPS):
        world.step()
    assert not world.requests and not world.answers
    last = {world.given[node, max(epochs) + 1] for node in range(count)}
    assert len(last) == 1 and last != {None}, "once nothing is lost, all hear of one and the same"
    return world


def test_an_epoch_has_one_tie_breaker_whatever_is_lost(seed: int) -> None:
    contested = 0
    for offset in range(SCHEDULES):
        world = run(seed + offset)
        by_epoch: dict[int, set[NodeKey]] = {}
        for (_, epoch), holder in world.given.items():
            if holder is not None:
                by_epoch.setdefault(epoch, set()).add(holder)
        assert all(len(holders) == 1 for holders in by_epoch.values()), (seed + offset, by_epoch)
        contested += sum(1 for key, holder in world.given.items() if holder not in (None, NodeKey(key[0], 1)))
    assert contested > SCHEDULES, "others had it now and then"


def test_a_swap_whose_answer_was_lost_is_found_again() -> None:
    machine, store = w.WitnessMachine(NodeKey(1, 3), retry_ns=RETRY_NS), WitnessStore()
    (read,) = machine.handle(w.EpochWanted(epoch=4), now_ns=0)
    assert isinstance(read, w.Read)
    (swap,) = machine.handle(w.RecordRead(number=read.number, record=store.do(read)), now_ns=1)
    assert swap == w.Swap(number=2, revision=0, epoch=4, holder=NodeKey(1, 3))
    assert isinstance(swap, w.Swap)
    store.do(swap)
    assert machine.handle(w.RequestFailed(number=2, reason="reset"), now_ns=2) == [SetTimer(at_ns=12)]
    assert machine.handle(TimerFired(), now_ns=11) == [SetTimer(at_ns=12)]
    (again,) = machine.handle(TimerFired(), now_ns=12)
    assert isinstance(again, w.Read)
    assert machine.handle(w.RecordRead(number=2, record=store.record), now_ns=13) == [], (
        "an answer to an old question"
    )
    (given,) = machine.handle(w.RecordRead(number=again.number, record=store.do(again)), now_ns=13)
    assert given == w.TieBreakerNamed(
        epoch=4, holder=NodeKey(1, 3), reason="the witness gave epoch 4 to node1#3"
    )
    assert machine.handle(w.EpochWanted(epoch=4), now_ns=14) == [], "it has heard of it"


def test_a_witness_that_has_gone_on_gives_nobody() -> None:
    machine = w.WitnessMachine(NodeKey(1, 1), retry_ns=RETRY_NS)
    (read,) = machine.handle(w.EpochWanted(epoch=4), now_ns=0)
    assert isinstance(read, w.Read)
    record = w.TieBreakRecord(epoch=6, holder=NodeKey(2, 1), revision=9)
    assert machine.handle(w.RecordRead(number=read.number, record=record), now_ns=1) == [
        w.TieBreakerNamed(epoch=4, holder=None, reason="the witness has gone on to epoch 6")
    ]


def test_what_is_over_is_not_asked_for() -> None:
    machine = w.WitnessMachine(NodeKey(1, 1), retry_ns=RETRY_NS)
    machine.handle(w.EpochWanted(epoch=4), now_ns=0)
    assert machine.handle(w.EpochDecided(epoch=4), now_ns=1) == []
    assert machine.state is w.WitnessState.IDLE
    assert machine.handle(w.EpochWanted(epoch=3), now_ns=2) == []
    with pytest.raises(LocalProtocolError):
        w.WitnessMachine(NodeKey(1, 1), retry_ns=0)
