"""One simulated rank of a training job: the production machine and rules, over a model of memory.

What a rank does is a generator, as the training thread of a real one does one thing after the other: whatever
lies between two `yield`s is one move, and a kill falls between two moves. An operation of the group ends only
once every member has entered it; when a member dies inside it, or gives up, it ends on some of the others.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import NamedTuple

from zbmd.training.job.task import StepResult
from zbmd.training.redundancy import interface, resizing
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.cut_events import (
    Divide,
    EnteredCut,
    Forget,
    HeldCut,
    Lend,
    Lent,
    Reshard,
    Resharded,
)
from zbmd.training.redundancy.failures import StepFailed
from zbmd.training.redundancy.interface import Agenda, ViewUse, Wish, digests_in
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.resizing import NEVER
from zbmd.training.scenarios.grouped_process import CUT_SHARE, WAIT, Cut, Moves
from zbmd.training.scenarios.meeting import MeetingProcess, rows_in
from zbmd.training.scenarios.world import COPIES_AT, Cells, CommitWorld, StepOrder
from zbmd.training.step.step_hook import Vote
from zbmd.transport import sim

WHOLE_SHARE = 0.3
"""The share of copies that are whole, of those that were under way when an epoch ended."""
CORRUPTED_SHARE = 0.2
"""The share of copies and updates in which memory errs, in a run where it does."""
SAVED_SHARE = 0.5
"""The share of versions that are copied for a checkpoint, in a run where some are."""

BITS = 32


class RunEnded(Exception):
    """This rank is not to go on."""


class Ballot(NamedTuple):
    """A vote, and the samples of the logical shards that the rank reports."""

    vote: Vote
    samples: dict[int, tuple[int, ...]]


class RankProcess(MeetingProcess):
    """One incarnation of a rank; see `zbmd.transport.sim.Process`."""

    def __init__(self, world: CommitWorld, rank: int, incarnation: int, rng: random.Random) -> None:
        super().__init__(world, rank, incarnation, rng)
        self.agreed = Agenda()
        self.copying: zm.CopyWard | None = None
        self.reading: tuple[Cells, int, int] | None = None
        """The memory that is being read, the cell in it, and its digest."""
        self.saving: tuple[Cells, int, int] | None = None
        """The same of the slot that is being copied for a checkpoint."""

    def check_invariants(self) -> None:
        """The machine's own, and: what is being read does not change."""
        if (machine := self.resizing or self.machine) is not None:
            machine.check_invariants()
        for cells, cell, digest in filter(None, (self.reading, self.saving)):
            assert cells.digest(cell) == digest, f"{self.member}: the slot being read has changed"

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
                assert options.shrink and not options.fits(self.view.ranks), "it could go on"
                world.stranded = True
                return
            if use is ViewUse.END:
                assert world.ended or world.is_over, "somebody left before the end"
                world.finished.add(self.member.rank)
                return
            if use is ViewUse.WAIT:
                world.ways.add("waits")
                continue
            if self.member not in self._members:
                world.ways.add("is a spare")
                yield from self._attend()
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

    def _epoch_over(self) -> Moves:
        """Leave the epoch: operations of peers end, and a copy under way ends first."""
        self.world.abandoned.add(self.view.epoch)
        self.world.unattended.add(self.view.epoch)
        if self.copying is not None:
            yield False
            self._end_copy(whole=self.rng.random() < WHOLE_SHARE)
        yield from self._staged()  # what follows may write any slot
        self.reading = None
        machine = self.machine
        if machine is not None and machine.state is not zm.State.FAILED:
            self._feed(zm.EpochOver())

    def _open(self) -> None:
        """Make the machine, in the first epoch that this rank takes part in."""
        world, options = self.world, self.world.options
        own: tuple[int | None, int | None] = (None, None)
        place, ranks, known = self._place, len(self._members), world.log.last
        if options.resizes:
            self.resizing = world.resizing(
                place=place, ranks=ranks, known=known, first=options.first, outlives=options.files
            )
            self.machine = world.machines[self.member] = self.resizing.mirror
            made = self.view.epoch if options.files else NEVER
            self.cells = world.divide(self.member, made, ranks, place)
            return
        if (file := self._kept) is not None:
            own = file.stamps[0], file.stamps[1]
            self._learn_of(file)
        self.machine = world.machines[self.member] = world.mirror(
            place=place,
            ranks=ranks,
            known=known,
            first=options.first,
            own=own,
            outlives=options.files,
            replicas=options.replicas,
            beside=options.replicas and options.beside,
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

    def _attend(self) -> Moves:
        """Take part as the members of an epoch meet; see `zbmd.training.job.job.Job`."""
        if not self.world.options.resizes:
            return
        known = 0 if self.resizing is None else self._mirror.known
        try:
            every = yield from self._together("records", self.results.share(), meeting=True)
            self.results.learn_records(rows_in(every))
            known = max(known, self.results.known)
            reports = yield from self._report(known)
            version = self.results.known
            if self.resizing is not None:
                yield from self._enter_cut(reports)
                version = self.resizing.chosen
            every = yield from self._together("share", self.results.go_on_from(version), meeting=True)
            self.results.learn(version, rows_in(every))
        except Cut:
            self.world.unattended.add(self.view.epoch)
        if self.resizing is not None:
            self._feed(zm.EpochOver())

    def _end(self) -> Moves:
        """Part from the others, when what the run makes is on disk."""
        world, version = self.world, self._mirror.version
        yield from self._together("end")
        right = world.holds(self.member, version % SLOTS, self._key, version)
        assert right or (world.corrupted and world.unverified), "it ends with wrong bits"
        agreed = world.ended_in.setdefault(self.view.epoch, version)
        assert agreed == version, f"members end at versions {agreed} and {version}"
        world.ended[self.member.rank] = version
        world.finished.add(self.member.rank)
        raise RunEnded

    # ---- the machine

    def _feed(self, event: zm.Event | EnteredCut | Resharded | Lent) -> list[resizing.Action]:
        known, actions = self._mirror.known, list[resizing.Action]()
        match event:
            case zm.Entered():
                actions += self._mirror.handle(event, now_ns=0)
            case EnteredCut() | Resharded() | Lent():
                assert self.resizing is not None
                actions += self.resizing.handle(event, now_ns=0)
            case _:
                actions += (self.resizing or self._mirror).handle(event, now_ns=0)
        assert self._mirror.known >= known, "what is known to be committed grows"
        return actions

    def _meet(self) -> Moves:
        world, members = self.world, self._members
        every = yield from self._together("records", self.results.share(), meeting=True)
        self.results.learn_records(rows_in(every))
        known = max(self.results.known, world.log.last if self._is_lowest else 0)
        reports = yield from self._report(known)
        if self.resizing is None:
            options, held = world.options, tuple(one for one in reports if isinstance(one, zm.Held))
            keys = () if options.files else self._keys
            hosts = tuple(options.host(member.rank) for member in members)
            entered = zm.Entered(held=held, hosts=hosts, place=self._place, keys=keys)
            for action in self._feed(entered):
                yield from self._restore(action, known=max(one.known for one in held))
        else:
            yield from self._enter_cut(reports)
            world.cut(self.member, self.resizing.cut.made)
            yield from self._together("handles")
        version = self._mirror.version
        assert version >= world.saved, f"version {world.saved} is saved, and {version} is gone on from"
        assert version >= world.log.last, f"version {world.log.last} is logged, and {version} is gone on from"
        assert world.chosen.setdefault(self.view.epoch, version) == version, (
            "members go on from different ones"
        )

    def _enter_cut(self, reports: Sequence[zm.Held | HeldCut]) -> Moves:
        options, members = self.world.options, self._members
        cuts, ranks = tuple(one for one in reports if isinstance(one, HeldCut)), len(members)
        entered = EnteredCut(
            held=cuts[:ranks],
            beside=cuts[ranks:],
            hosts=tuple(options.host(member.rank) for member in members),
            place=self._everyone.index(self.member),
            epoch=self.view.epoch,
        )
        for action in self._feed(entered):
            yield from self._restore(action, known=max(one.held.known for one in cuts))

    def _restore(self, action: resizing.Action, *, known: int) -> Moves:
        world, cells = self.world, self.cells
        match action:
            case zm.Restore(version=version, source=source):
                member = self._members[source.place]
                cell = source.slot + (0 if source.own else COPIES_AT)
                self._unstamp(version)
                cells.tear(version % SLOTS)
                wrong = not world.holds(member, cell, self._key, version)
                yield from self._pull(world.cells[member], cell, version % SLOTS)
                compared = not source.own or world.has_voter(self._members, self._key, version)
                if not compared or (wrong and version not in world.committed):
                    world.unverified = True
                world.ways.add("pulls")
                digest = cells.digest(version % SLOTS)
                if digest == source.digest:
                    world.voted[self.member] = version
                for more in self._feed(zm.Restored(digest=digest)):
                    yield from self._restore(more, known=known)
            case Divide(parts=parts, part=part):
                kept = world.drop_undivided(self.member, action)
                if world.options.files:
                    yield False  # it may be killed between the removal of its file and the new one
                self.cells = world.divide(self.member, self.view.epoch, parts, part, kept)
            case Reshard():
                yield from self._reshard(action, known=known)
            case Lend(sources=sources):
                world.ways.add("lends")
                given = tuple(found.digest(cell) for found, cell in map(self._located, sources))
                for more in self._feed(Lent(given=given)):
                    yield from self._restore(more, known=known)
            case Forget():
                world.forget(self.member)
            case zm.StartAnew():
                self._unstamp(world.options.first)
                cells.begin(world.options.first)
                if world.options.files:
                    self._stamp(world.options.first)
            case zm.Resume(version=version):
                right = world.holds(self.member, version % SLOTS, self._key, version)
                assert right or world.corrupted, f"it goes on from {version}, which it does not hold"
                if self.results.result(version + 1) is not None:
                    world.ways.add("rolls back")
            case zm.Fail(lost=True, reason=reason):
                world.check_lost(known, self._everyone)
                world.state_lost, world.reason = True, reason
                raise RunEnded
            case zm.Fail(reason=reason):
                self._diverged(reason)
            case _:
                raise AssertionError(f"{action} after an epoch was entered")

    def _reshard(self, work: Reshard, *, known: int) -> Moves:
        """Read all parts of the cut before, one after the other, into our part of the new one."""
        world, slot, sources = self.world, work.version % SLOTS, list[tuple[Cells, int]]()
        self._unstamp(work.version)
        self.cells.tear(slot)
        for found in work.sources:
            cells, cell = self._located(found)
            sources.append((cells, cell))
            self.reading = cells, cell, cells.digest(cell)
            yield False
            self.reading = None
            if self._is_cut() and self.rng.random() < CUT_SHARE:
                raise Cut
        self.cells.assemble(sources, work.version)
        if world.options.leaves:
            self._stamp(work.version)
        world.unverified = world.unverified or bool(world.corrupted)
        world.ways.add("reshards")
        given = tuple(
            cells.digest(cell)
            for (cells, cell), found in zip(sources, work.sources, strict=True)
            if found.source.place == self._place
        )
        for more in self._feed(Resharded(digest=self.cells.digest(slot), given=given)):
            yield from self._restore(more, known=known)

    def _diverged(self, reason: str) -> None:
        world = self.world
        places = [place for place, member in enumerate(self._everyone) if member.rank in world.corrupted]
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
        """Do a step, as trainers do: with most replicas the update comes before the vote."""
        world, machine, version = self.world, self._mirror, self._mirror.version + 1
        order = StepOrder(epoch=self.view.epoch, version=version, members=self._members, place=self._place)
        asked = Agenda(0 if self.coming is None else self.coming.epoch, self.wishes)
        first = machine.applies_first
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
            self._note(done)
        self._voted(told)
        if not first:
            yield from self._update(order)
            if self.world.options.files:
                self._stamp(version)
            self._feed(zm.Updated())
            self._note(done)
        world.ways.add("steps")
        yield False

    def _update(self, order: StepOrder) -> Moves:
        slot = order.version % SLOTS
        yield from self._staged(slot)
        self._unstamp(order.version)
        self.cells.tear(slot)
        yield False
        if self.world.options.talks:
            yield from self._together(f"optimizer {order.version}")
        self.cells.update(order)
        alike = self.world.options.keys(len(self._members)).count(self._key)
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
        if not options.files:
            self._stamp(machine.version + machine.applies_first)
        if machine.applies_first:
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
                case Forget():
                    self.world.forget(self.member)
                case _:
                    raise AssertionError(f"{action} after a vote")
        self._remove_orphans()
        if (kept := self._kept) is not None:
            kept.record = self.results.share().tolist()

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
        if machine.applies_first:
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
            for member, own in world.keys(self._members).items():
                assert world.corrupted or world.holds(member, version % SLOTS, own, version)
            world.saved = max(world.saved, version)
            world.ways.add("saves")

        elif world.options.saving and self.saving is None and self.rng.random() < SAVED_SHARE:
            slot = version % SLOTS
            self.saving = self.cells, slot, self.cells.digest(slot)

    def _staged(self, slot: int | None = None) -> Moves:
        """Wait until a slot, or any, is copied for a checkpoint, if one is; see `Checkpoints.staged`."""
        if self.saving is not None and slot in (None, self.saving[1]):
            yield False
            self.saving = None
            self.world.ways.add("waits for a copy")

    def _agree_on_log(self, version: int) -> Moves:
        every = yield from self._together("share", self.results.go_on_from(version), meeting=True)
        self.results.learn(version, rows_in(every))
        missing = self.results.missing(self.world.log.last) if self._is_lowest else None
        if missing is not None:
            self.world.log.append(missing.record)
            self.world.ways.add("logs for another")
        if self._is_lowest:
            self.results.in_log(self.world.log.last)
        yield from self._together("logged")

    def _unstamp(self, version: int) -> None:
        """The slot is about to be written; see `StampedSlots.begin`."""
        if self._kept is not None:
            self._kept.stamps[version % SLOTS] = None

    def _stamp(self, version: int) -> None:
        """The slot is whole; see `StampedSlots.end`."""
        if self._kept is not None:
            self._kept.stamps[version % SLOTS] = version

    def _note(self, done: StepResult) -> None:
        """Keep the result of a step that is done; see `KeptState.note_step`."""
        self.results.keep(done)
        if self._kept is not None:
            self._kept.notes[done.version % SLOTS] = done
