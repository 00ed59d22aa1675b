"""One simulated rank of a training job: the production machine and rules, over a model of memory.

What a rank does is a generator, as the training thread of a real one does one thing after the other: whatever
lies between two `yield`s is one move, and a kill falls between two moves. An operation of the group ends only
once every member has entered it; when a member dies inside it, or gives up, it ends on some of the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeAlias, assert_never

import numpy as np

from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.view import MemberId, View
from zbmd.collectives.scenarios.hosted_job import NODE, Enter, Message, Parted, joined, linked, member_of
from zbmd.training.job.results import StepResults
from zbmd.training.job.task import ResultRow, StepResult
from zbmd.training.redundancy import interface
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.failures import StepFailed
from zbmd.training.redundancy.interface import Agenda, ViewUse, Wish, digests_in
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.scenarios.world import COPIES_AT, Asked, Cells, CommitWorld, StepOrder
from zbmd.training.step.step_hook import Vote
from zbmd.transport import sim
from zbmd.transport.errors import LocalProtocolError

MOVE_NS_MAX = 3_000_000
CUT_SHARE = 0.5
"""The share of operations that are cut for a member, of those that could also end for it."""
WHOLE_SHARE = 0.3
"""The share of copies that are whole, of those that were under way when an epoch ended."""
STUCK_SHARE = 0.5
"""The share of operations that do not end for a member, if another died after it had entered them."""
CORRUPTED_SHARE = 0.2
"""The share of copies and updates in which memory errs, in a run where it does."""

BITS = 32

WAIT = True
"""Yielded by a rank that waits for a view; other moves yield False."""
Moves: TypeAlias = Generator[bool, None, None]


class Cut(Exception):
    """The epoch is over: a member is lost, or has given up."""


class RunEnded(Exception):
    """This rank is not to go on."""


class Ballot(NamedTuple):
    """A vote, and the samples of the logical shards that the rank reports."""

    vote: Vote
    samples: dict[int, tuple[int, ...]]


class RankProcess:
    """One incarnation of a rank; see `zbmd.transport.sim.Process`."""

    def __init__(self, world: CommitWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.member = MemberId(rank=rank, incarnation=incarnation)
        self.cells = world.open(self.member)
        self.view = self.installed = View(epoch=0, members=())
        self.coming: View | None = None
        self.lost: set[MemberId] = set()
        self.machine: zm.Mirror | None = None
        self.results = StepResults(ResultRow(world.contents.shards, world.contents.samples), 0)
        self.wishes = Wish.NOTHING
        self.agreed = Agenda()
        self.copying: zm.CopyWard | None = None
        self.reading: tuple[Cells, int, int] | None = None
        """The memory that is being read, the cell in it, and its digest."""
        self.effects: list[sim.Effect[Message]] = []
        self.waits = True
        self.program = self._run()

    def check_invariants(self) -> None:
        """The machine's own, and: what is being read does not change."""
        if self.machine is not None:
            self.machine.check_invariants()
        if self.reading is not None:
            cells, cell, digest = self.reading
            assert cells.digest(cell) == digest, f"{self.member}: the slot being read has changed"

    # ---- stimuli

    def deliver(self, stimulus: sim.Stimulus[Message], *, now_ns: int) -> Sequence[sim.Effect[Message]]:
        """Take a stimulus, and make the next move if it is due."""
        match stimulus:
            case sim.Started():
                return [joined(self.member), *self._signals(now_ns), *self._go_on(now_ns)]
            case sim.Arrived(message=message):
                return self._take(message, now_ns)
            case sim.PeerEnded(peer=peer, incarnation=incarnation):
                if peer != NODE:
                    self.lost.add(member_of(peer, incarnation))
                return []
            case sim.TimerFired(name="move"):
                return self._go_on(now_ns)
            case sim.TimerFired(name=name):
                self.wishes |= self._asked()[int(name)].wish
                return []
            case sim.Commanded():
                raise LocalProtocolError("a rank is not a node")
            case _:
                assert_never(stimulus)

    def _asked(self) -> list[Asked]:
        return [asked for asked in self.world.options.asked if asked.rank == self.member.rank]

    def _signals(self, now_ns: int) -> list[sim.Effect[Message]]:
        """Arm the signals of the rank's first process; a replacement gets none."""
        if self.member.incarnation > 1:
            return []
        every = enumerate(self._asked())
        return [sim.SetTimer(name=str(at), at_ns=now_ns + asked.after_ns) for at, asked in every]

    def _take(self, message: Message, now_ns: int) -> Sequence[sim.Effect[Message]]:
        match message:
            case jobs.InstallView(view=view):
                if view.epoch <= self.installed.epoch:
                    return []  # overtaken by the next
                self.installed = view
                return self._link()
            case Enter(epoch=epoch):
                if epoch != self.installed.epoch or epoch <= self.view.epoch or self.coming is not None:
                    return []
                self.coming = self.installed
                return self._go_on(now_ns) if self.waits else []
            case Parted(member=member):
                self.lost.add(member)
                return []
            case jobs.Joined() | jobs.Linked():
                raise LocalProtocolError("a rank is not a node")
            case _:
                assert_never(message)

    def _link(self) -> list[sim.Effect[Message]]:
        """Link up for the newest view, unless another is to be entered first."""
        if self.coming is not None or self.installed.epoch <= self.view.epoch:
            return []
        return [linked(self.member, self.installed.epoch)]

    def _go_on(self, now_ns: int) -> list[sim.Effect[Message]]:
        self.effects = []
        try:
            self.waits = next(self.program)
        except StopIteration:
            return [*self.effects, sim.Exit()]
        if self.waits:
            return self.effects
        at_ns = now_ns + self.rng.randint(1, MOVE_NS_MAX)
        return [*self.effects, sim.SetTimer(name="move", at_ns=at_ns)]

    # ---- epochs; see `through_epochs` and `zbmd.training.job.job.Job`

    def _run(self) -> Moves:
        world, options = self.world, self.world.options
        while True:
            while self.coming is None:
                yield WAIT
            self.view, self.coming = self.coming, None
            links = set(self.view.ids)
            self.lost -= {member for member in self.lost & links if world.lives(member)}
            self.effects += self._link()
            try:
                use = interface.use_of(self.view, options.world_size, options.fits)
            except StepFailed:
                assert options.shrink and not options.fits(len(links)), "it could go on"
                world.stranded = True
                return
            if use is ViewUse.END:
                assert world.ended or world.is_over, "somebody left before the end"
                world.finished.add(self.member.rank)
                return
            if use is ViewUse.WAIT:
                world.ways.add("waits")
                continue
            try:
                yield from self._in_epoch()
            except Cut:
                yield from self._epoch_over()
            except RunEnded:
                return
            else:
                world.ways.add("follows")
                yield from self._epoch_over()

    @property
    def _members(self) -> tuple[MemberId, ...]:
        return self.view.ids

    @property
    def _place(self) -> int:
        return self._members.index(self.member)

    @property
    def _keys(self) -> tuple[int, ...]:
        """The keys of the members' shards; see `Task.state_keys`."""
        options = self.world.options
        return () if options.sharded else options.keys(len(self._members))

    @property
    def _is_lowest(self) -> bool:
        return self._place == 0

    @property
    def _mirror(self) -> zm.Mirror:
        assert self.machine is not None
        return self.machine

    def _is_cut(self) -> bool:
        """Whether this rank may see an operation of the epoch end."""
        return self.view.epoch in self.world.abandoned or not self.lost.isdisjoint(self._members)

    def _together(self, name: str, value: object = None) -> Generator[bool, None, list[object]]:
        """Enter an operation of all members, and wait for its end. Raises `Cut`."""
        operation = self.world.operations.setdefault((self.view.epoch, name), {})
        operation[self.member] = value
        yield False
        members, stuck = self._members, False
        while stuck or len(operation) < len(members):
            if self._is_cut():
                raise Cut
            yield False
            stuck = stuck or (
                len(operation) == len(members)
                and not all(map(self.world.lives, members))
                and self.rng.random() < STUCK_SHARE
            )
        if self._is_cut() and self.rng.random() < CUT_SHARE:
            raise Cut
        return [operation[member] for member in members]

    def _epoch_over(self) -> Moves:
        """Leave the epoch: operations of peers end, and a copy under way ends first."""
        self.world.abandoned.add(self.view.epoch)
        if self.copying is not None:
            yield False
            self._end_copy(whole=self.rng.random() < WHOLE_SHARE)
        self.reading = None
        machine = self.machine
        if machine is not None and machine.state is not zm.State.FAILED:
            self._feed(zm.EpochOver())

    def _open(self) -> None:
        """Make the machine, in the first epoch that this rank takes part in."""
        world, options = self.world, self.world.options
        own: tuple[int | None, int | None] = (None, None)
        if options.files:
            file = world.files[self.member.rank]
            own = file.stamps[0], file.stamps[1]
            for version, done in zip(own, file.notes, strict=True):
                if done is not None and done.version == version:
                    self.results.keep(done)
        self.machine = world.machines[self.member] = world.mirror(
            place=self._place,
            ranks=len(self._members),
            known=world.log.last,
            first=options.first,
            own=own,
            outlives=options.files,
            replicas=options.replicas,
        )

    def _in_epoch(self) -> Moves:
        """Train in one epoch. Raises `Cut` and `RunEnded`; returns to follow all to the next view."""
        world, last = self.world, self.world.options.last
        yield from self._together("groups")
        if self.machine is None:
            self._open()
        yield from self._meet()
        version = self._mirror.version
        yield from self._agree_on_log(version)
        if version > world.options.first:
            yield from self._reached("again")
        while self._mirror.version < last:
            yield from self._step()
            agreed = self.agreed
            yield from self._reached("", save=bool(agreed.wishes))
            self.wishes &= ~agreed.wishes
            if agreed.wishes & Wish.STOP and self._mirror.version < last:
                world.ways.add("stops")
                yield from self._end()
            if agreed.epoch > self.view.epoch:
                return
        yield from self._settle("last")
        yield from self._end()

    def _end(self) -> Moves:
        """Part from the others, when what the run makes is on disk."""
        world, version = self.world, self._mirror.version
        yield from self._together("end")
        right = world.holds(self.member, version % SLOTS, self.member.rank, version)
        assert right or (world.corrupted and world.unverified), "it ends with wrong bits"
        agreed = world.ended_in.setdefault(self.view.epoch, version)
        assert agreed == version, f"members end at versions {agreed} and {version}"
        world.ended[self.member.rank] = version
        world.finished.add(self.member.rank)
        raise RunEnded

    # ---- the machine

    def _feed(self, event: zm.Event) -> list[zm.Action]:
        known = self._mirror.known
        actions = self._mirror.handle(event, now_ns=0)
        assert self._mirror.known >= known, "what is known to be committed grows"
        return actions

    def _meet(self) -> Moves:
        world, members = self.world, self._members
        every = yield from self._together("records", self.results.share())
        self.results.learn_records(_rows(every))
        known = max(self.results.known, world.log.last if self._is_lowest else 0)
        every = yield from self._together("meet", self._mirror.report(known))
        held = tuple(one for one in every if isinstance(one, zm.Held))
        options = world.options
        entered = zm.Entered(
            held=held,
            hosts=tuple(options.host(member.rank) for member in members),
            place=self._place,
            keys=() if options.files else self._keys,
        )
        for action in self._feed(entered):
            yield from self._restore(action, known=max(one.known for one in held))
        version = self._mirror.version
        assert version >= world.saved, f"version {world.saved} is saved, and {version} is gone on from"
        assert version >= world.log.last, f"version {world.log.last} is logged, and {version} is gone on from"
        assert world.chosen.setdefault(self.view.epoch, version) == version, (
            "members go on from different ones"
        )

    def _restore(self, action: zm.Action, *, known: int) -> Moves:
        world, cells = self.world, self.cells
        match action:
            case zm.Restore(version=version, source=source):
                member = self._members[source.place]
                cell = source.slot + (0 if source.own else COPIES_AT)
                cells.tear(version % SLOTS)
                wrong = not world.holds(member, cell, self.member.rank, version)
                yield from self._pull(world.cells[member], cell, version % SLOTS)
                compared = not source.own or world.has_voter(self._members, self.member.rank, version)
                if not compared or (wrong and version not in world.committed):
                    world.unverified = True
                world.ways.add("pulls")
                digest = cells.digest(version % SLOTS)
                if digest == source.digest:
                    world.voted[self.member] = version
                for more in self._feed(zm.Restored(digest=digest)):
                    yield from self._restore(more, known=known)
            case zm.StartAnew():
                self._write_file(world.options.first, None)
                cells.begin(world.options.first)
                self._wrote_file(world.options.first, None)
            case zm.Resume(version=version):
                right = world.holds(self.member, version % SLOTS, self.member.rank, version)
                assert right or world.corrupted, f"it goes on from {version}, which it does not hold"
                if self.results.result(version + 1) is not None:
                    world.ways.add("rolls back")
            case zm.Fail(lost=True, reason=reason):
                world.check_lost(known, self._members)
                world.state_lost, world.reason = True, reason
                raise RunEnded
            case zm.Fail(reason=reason):
                self._diverged(reason)
            case _:
                raise AssertionError(f"{action} after an epoch was entered")

    def _diverged(self, reason: str) -> None:
        world = self.world
        places = [place for place, member in enumerate(self._members) if member.rank in world.corrupted]
        named = {int(found) for found in re.findall(r"(?:places?|and) (\d+)", reason)}
        assert named.intersection(places), reason
        world.corruption_noticed = True
        raise RunEnded

    def _pull(self, source: Cells, source_cell: int, cell: int) -> Moves:
        """Copy a member's cell, which takes a while. Raises `Cut`: the cell is torn then."""
        self.reading = source, source_cell, source.digest(source_cell)
        for _ in range(2):
            yield False
            if self._is_cut() and self.rng.random() < CUT_SHARE:
                self.reading = None
                raise Cut
        self._read(cell)

    def _read(self, cell: int) -> None:
        assert self.reading is not None
        source, source_cell, _ = self.reading
        self.reading = None
        self.cells.copy(source, source_cell, cell)
        self._err(cell)

    def _err(self, cell: int) -> None:
        """In a run of bad memory: have a cell hold something else, where that must be noticed."""
        if self.world.options.corrupting and self.rng.random() < CORRUPTED_SHARE:
            self.world.corrupted.add(self.member.rank)
            self.cells.err(cell, self.member.rank % BITS)

    # ---- steps

    def _step(self) -> Moves:
        """Do a step, as trainers do: with replicas the update comes before the vote."""
        world, machine, version = self.world, self._mirror, self._mirror.version + 1
        order = StepOrder(epoch=self.view.epoch, version=version, members=self._members, place=self._place)
        asked = Agenda(0 if self.coming is None else self.coming.epoch, self.wishes)
        first = machine.replicas
        self.cells.compute(order)
        if not first:
            yield from self._together(f"begun {version}")
            yield from self._keep(version - 1)
        yield from self._together(f"reduced {version}")
        if not self.cells.reduce(order):
            raise Cut
        if first:
            yield from self._update(order)
            self._feed(zm.Updated())
            yield False
        told = yield from self._together(f"vote {version}", self._ballot(version, asked))
        done = self._done(version, told)
        if first:
            self.results.keep(done)
        self._voted(told)
        if not first:
            self._write_file(version, None)
            yield from self._update(order)
            self._wrote_file(version, done)
            self._feed(zm.Updated())
            self.results.keep(done)
        world.ways.add("steps")
        yield False

    def _update(self, order: StepOrder) -> Moves:
        slot = order.version % SLOTS
        self.cells.tear(slot)
        yield False
        if self.world.options.talks:
            yield from self._together(f"optimizer {order.version}")
        self.cells.update(order)
        alike = self.world.options.keys(len(self._members)).count(self.world.key(self.member.rank))
        if self._mirror.replicas and alike > 1:
            self._err(slot)

    def _ballot(self, version: int, asked: Agenda) -> Ballot:
        """Return this rank's vote, when its copy is whole."""
        machine, cells, options = self._mirror, self.cells, self.world.options
        contents = self.world.contents
        shards = options.logical_shards(self._place, len(self._members), contents.shards)
        ids = contents.sample_ids(version)
        samples = {shard: tuple(int(one) for one in ids[shard]) for shard in shards}
        slot = machine.version % SLOTS
        if machine.replicas:
            vote = asked.vote(cells.digest(1 - slot), 0)
        else:
            own, kept = cells.digest(slot), machine.copies[slot]
            vote = asked.vote(own, own if kept is None else kept.digest)
        return Ballot(vote, samples)

    def _done(self, version: int, told: Sequence[object]) -> StepResult:
        ballots = [one for one in told if isinstance(one, Ballot)]
        samples = {shard: ids for ballot in ballots for shard, ids in ballot.samples.items()}
        assert len(samples) == sum(len(ballot.samples) for ballot in ballots), "a shard is computed twice"
        shards = range(self.world.contents.shards)
        return StepResult(
            version=version,
            losses=tuple(float(shard) for shard in shards),
            samples=tuple(samples[shard] for shard in shards),
            grad_norm=1.0,
        )

    def _keep(self, version: int) -> Moves:
        """Copy the ward's shard of a version that all hold; see `RedundancyDriver._keep`."""
        for action in self._feed(zm.AllHold(version=version)):
            assert isinstance(action, zm.CopyWard)
            self.copying = action
            source = self.world.cells[self._members[action.ward]]
            self.cells.tear(COPIES_AT + action.slot)
            self.reading = source, version % SLOTS, source.digest(version % SLOTS)
            yield False
            if self._is_cut() and self.rng.random() < CUT_SHARE:
                raise Cut
            self._end_copy(whole=True)
            yield False

    def _end_copy(self, *, whole: bool) -> None:
        work, self.copying = self.copying, None
        assert work is not None
        cell = COPIES_AT + work.slot
        if whole:
            self._read(cell)
        self.reading = None
        self._feed(zm.Copied(digest=self.cells.digest(cell) if whole else None))

    def _voted(self, told: Sequence[object]) -> None:
        votes = [one.vote for one in told if isinstance(one, Ballot)]
        self.agreed = Agenda.agreed(votes)
        for action in self._feed(digests_in(votes)):
            match action:
                case zm.Commit(version=version, digests=digests):
                    self.world.voted[self.member] = version
                    self._committed(version, digests)
                case zm.Fail(lost=False, reason=reason):
                    self._diverged(reason)
                case _:
                    raise AssertionError(f"{action} after a vote")

    def _committed(self, version: int, digests: tuple[int, ...]) -> None:
        world, members = self.world, self._members
        world.check_commit(version, digests, members)
        if self.view.epoch not in world.abandoned and all(map(world.lives, members)):
            world.check_safe(version, members)
        found = self.results.committed(
            version,
            digests,
            epoch=self.view.epoch,
            members=[member.rank for member in members],
            keys=self._keys,
            at_ns=0,
        )
        if found is not None:
            self.effects.append(sim.Note(value=("Commit", version)))
            if self._is_lowest:
                world.log.append(found.record)

    def _settle(self, name: str) -> Moves:
        """Protect the version that is held at once; see `RedundancyDriver.settle`."""
        machine = self._mirror
        if machine.replicas:
            return
        version = machine.version
        yield from self._together(f"settle {name} {version}")
        yield from self._keep(version)
        told = yield from self._together(f"settled {name} {version}", self._ballot(version, Agenda()))
        self._voted(told)

    # ---- between steps

    def _reached(self, name: str, *, save: bool = False) -> Moves:
        """All have come to a version: write the checkpoint, if it is due."""
        world, version, key = self.world, self._mirror.version, (self.view.epoch, self._mirror.version)
        wishes = self.agreed.wishes if save else Wish.NOTHING
        if not name:
            assert world.acted.setdefault(key, wishes) == wishes, "a wish is acted on at different versions"
        if save or version == world.options.last:
            yield from self._settle(f"{name} save")
            yield from self._together(f"{name} written {version}")
            for member in self._members:
                assert world.corrupted or world.holds(member, version % SLOTS, member.rank, version)
            world.saved = max(world.saved, version)
            world.ways.add("saves")

    def _agree_on_log(self, version: int) -> Moves:
        """See `zbmd.training.job.job.Job`."""
        every = yield from self._together("share", self.results.go_on_from(version))
        self.results.learn(version, _rows(every))
        missing = self.results.missing(self.world.log.last) if self._is_lowest else None
        if missing is not None:
            self.world.log.append(missing.record)
            self.world.ways.add("logs for another")
        yield from self._together("logged")

    def _write_file(self, version: int, _done: StepResult | None) -> None:
        if self.world.options.files:
            self.world.files[self.member.rank].stamps[version % SLOTS] = None

    def _wrote_file(self, version: int, done: StepResult | None) -> None:
        if self.world.options.files:
            file, slot = self.world.files[self.member.rank], version % SLOTS
            file.stamps[slot], file.notes[slot] = version, done


def _rows(every: Sequence[object]) -> list[list[float]]:
    return [one.tolist() for one in every if isinstance(one, np.ndarray)]
