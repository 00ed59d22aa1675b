"""Parities in a job: simulated ranks that are killed between any two moves, as many as the code allows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from zbmd.training.native._kernels import code
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.coded.driver import CodedRow, row_numbers
from zbmd.training.redundancy.coded.field import flat, parity_matrix, rebuilding_matrix
from zbmd.training.redundancy.coded.machine import (
    CODED_MIRROR,
    Code,
    CodedHeld,
    CodedMirror,
    EnteredCoded,
    Rebuild,
    Rebuilding,
    choose,
    coded_config,
)
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

NBYTES = 200
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def content(place: int, version: int) -> Bytes:
    """The state of a rank after a step."""
    made: Bytes = np.random.default_rng((place, version)).integers(256, size=NBYTES, dtype=np.uint8)
    return made


def digest(data: Bytes) -> int:
    return hash(data.tobytes()) & (1 << 63) - 1 or 1


class Rank:
    """A machine with memory: two slots of state, two of parities."""

    def __init__(self, place: int, ranks: int, made: Code, known: int = 0) -> None:
        self.machine = CodedMirror(place=place, ranks=ranks, code=made, known=known)
        self.slots = [np.zeros(NBYTES, np.uint8) for _ in "01"]
        self.parities = [np.zeros(made.room, np.uint8) for _ in "01"]

    def report(self, known: int) -> CodedHeld:
        first, second = self.parities
        return self.machine.coded_report(known, (digest(first), digest(second)))

    def put(self, event: object) -> list[object]:
        """Put an event; a second machine that is restored from the state of the first one answers alike."""
        if self.machine.place:
            return list(self.machine.handle(event, now_ns=0))  # type: ignore[arg-type]
        follower, states = CODED_MIRROR.build(coded_config(self.machine)), CODED_MIRROR.states
        assert states is not None
        states.restore(follower, states.encode(self.machine))
        actions = self.machine.handle(event, now_ns=0)  # type: ignore[arg-type]
        assert follower.handle(event, now_ns=0) == actions  # type: ignore[arg-type]
        return list(actions)


class Job:
    """Ranks that do steps together; a random number decides who is killed, and where between two moves."""

    def __init__(self, ranks: int, made: Code, draw: random.Random) -> None:
        self.code, self.draw = made, draw
        self.domains = tuple(range(ranks))
        self.ranks = [Rank(place, ranks, made) for place in range(ranks)]
        self.committed = 0
        self.is_lost = False
        self.weak: set[int] = set()
        """Replacements that have no parities yet."""

    def shard(self, place: int, block: int, slot: int, size: int) -> Bytes:
        found = np.zeros(size, np.uint8)
        part = self.ranks[place].slots[slot][block * size : (block + 1) * size]
        found[: len(part)] = part
        return found

    def enter(self) -> bool:
        """A new epoch; whether all go on."""
        reports = tuple(rank.report(self.committed) for rank in self.ranks)  # as logged
        every = [rank.put(EnteredCoded(held=reports, domains=self.domains)) for rank in self.ranks]
        if isinstance(every[0][0], zm.Fail):
            assert all(isinstance(actions[0], zm.Fail) for actions in every), "all say the same"
            self.is_lost = True
            return False
        rebuilt = [
            (rank, actions[0].chosen)
            for rank, actions in zip(self.ranks, every, strict=True)
            if isinstance(actions[0], Rebuild)
        ]
        for rank, chosen in rebuilt:
            self.rebuild(rank, chosen)
        for rank, chosen in rebuilt:
            rank.put(zm.Restored(digest=digest(rank.slots[chosen.version % 2])))
        for rank, actions in zip(self.ranks, every, strict=True):
            if isinstance(actions[0], zm.StartAnew):
                rank.slots[0][:] = content(rank.machine.place, 0)
            version = rank.machine.version
            assert version >= self.committed, "no acknowledged step is lost"
            assert (rank.slots[version % 2] == content(rank.machine.place, version)).all(), "the same bits"
        assert len({rank.machine.version for rank in self.ranks}) == 1
        return True

    def rebuild(self, rank: Rank, chosen: Rebuilding) -> None:
        me, slot = rank.machine.place, chosen.version % 2
        group = next(one for one in chosen.groups if me in one.members)
        size = group.block_bytes(NBYTES)
        for block in range(group.data):
            number = group.stripe_of(me, block)
            stripe, left = group.stripe(number), dict[int, Bytes]()
            for at, (place, other) in enumerate(stripe.data):
                if place not in chosen.lost:
                    left[at] = self.shard(place, other, slot, size)
            for at, place in enumerate(stripe.parity):
                if place in chosen.parities:
                    begin = group.parities_of(place).index(number) * size
                    left[group.data + at] = self.ranks[place].parities[slot][begin : begin + size]
            have = sorted(left)[: group.data]
            out = np.zeros(size, np.uint8)
            factors = flat(rebuilding_matrix(group.data, group.parity, have, [block]))
            code([out], [np.ascontiguousarray(left[one]) for one in have], factors)
            part = rank.slots[slot][block * size : (block + 1) * size]
            part[:] = out[: len(part)]

    def encode(self, rank: Rank, version: int) -> None:
        me, slot, group = rank.machine.place, version % 2, rank.machine.group
        size, matrix = group.block_bytes(NBYTES), parity_matrix(group.data, group.parity)
        for at, number in enumerate(group.parities_of(me)):
            stripe = group.stripe(number)
            shards = [self.shard(place, block, slot, size) for place, block in stripe.data]
            out = np.zeros(size, np.uint8)
            code([out], shards, flat((matrix[stripe.parity.index(me)],)))
            rank.parities[slot][at * size : (at + 1) * size] = out

    def step(self, stop_at: int) -> bool:
        """Move all ranks through a step, in any order; stop after so many moves: whether it was done."""
        moves = 0
        version = self.ranks[0].machine.version
        for phase in ("hold", "encode", "vote", "update"):
            order = list(self.ranks)
            self.draw.shuffle(order)
            for rank in order:
                if moves == stop_at:
                    return False
                moves += 1
                slot = version % 2
                match phase:
                    case "hold":
                        rank.needs = bool(rank.put(zm.AllHold(version=version)))  # type: ignore[attr-defined]
                    case "encode":
                        if rank.needs:  # type: ignore[attr-defined]
                            rank.parities[slot][:] = 0xEE  # torn, should it be killed now
                            self.encode(rank, version)
                            rank.put(zm.Copied(digest=digest(rank.parities[slot])))
                    case "vote":
                        self.weak.clear()
                        own = [digest(one.slots[slot]) for one in self.ranks]
                        copies = [one.machine.copies[slot] for one in self.ranks]
                        votes = tuple(
                            (one, copy.digest) for one, copy in zip(own, copies, strict=True) if copy
                        )
                        (commit,) = rank.put(zm.Voted(votes=votes))
                        assert isinstance(commit, zm.Commit) and commit.version == version
                        self.committed = version
                    case _:
                        rank.slots[1 - slot][:] = content(rank.machine.place, version + 1)
                        rank.put(zm.Updated())
        return True

    def kill(self, victims: Sequence[int], *, moved: bool) -> None:
        """Lose ranks; the others give up their epoch, those in the middle of a copy without it."""
        for place, rank in enumerate(self.ranks):
            if place in victims:
                self.ranks[place] = Rank(place, len(self.ranks), self.code)
                self.weak.add(place)
                continue
            if rank.machine.state is zm.State.COPYING:
                rank.put(zm.Copied(digest=None))
            rank.put(zm.EpochOver())
        if moved:  # replacements are on other hosts now
            self.domains = tuple(self.draw.sample(range(len(self.ranks)), len(self.ranks)))


def history(seed: int, data: int, parity: int, *, ranks: int, victims_max: int, moved: bool = False) -> Job:
    draw = random.Random(seed)
    job = Job(ranks, Code(data=data, parity=parity, nbytes=NBYTES, room=4 * NBYTES), draw)
    job.enter()
    for _ in range(6):
        most = victims_max if victims_max > parity else parity - len(job.weak)
        if job.step(draw.randrange(4 * ranks + 2) if most else 1000):
            continue
        most = victims_max if victims_max > parity else parity - len(job.weak)
        count = draw.randrange(1, most + 1)
        job.kill(draw.sample(range(ranks), count), moved=moved and draw.random() < 0.3)
        if not job.enter():
            break
    return job


@pytest.mark.parametrize(("data", "parity", "ranks"), [(2, 1, 3), (4, 2, 6), (2, 2, 4), (4, 2, 5)])
def test_as_many_ranks_as_there_are_parities_may_be_killed_at_any_moment(
    seed: int, data: int, parity: int, ranks: int
) -> None:
    for number in range(60):
        job = history(seed + number, data, parity, ranks=ranks, victims_max=parity)
        assert not job.is_lost, seed + number


def test_more_losses_end_the_run_with_a_reason_and_never_with_other_bits(seed: int) -> None:
    """`Job.enter` compares each state that a rank goes on from."""
    lost = 0
    for number in range(80):
        lost += history(seed + number, 2, 1, ranks=4, victims_max=4, moved=True).is_lost
    assert lost, "some have lost more than one of a group"


def test_every_choice_of_lost_hosts_is_rebuilt() -> None:
    made = Code(data=4, parity=2, nbytes=NBYTES, room=NBYTES)
    for victims in (*combinations(range(6), 2), (0, 1, 2)):
        job = Job(6, made, random.Random(1))
        job.enter()
        assert job.step(1000) and job.step(1000)
        assert not job.step(12), "all parities of the version are there"
        job.kill(victims, moved=False)
        assert job.enter() == (len(victims) == 2)
        if len(victims) == 2:
            assert job.ranks[0].machine.version == 2 and job.step(1000)


def test_too_many_losses_are_named() -> None:
    made = Code(data=2, parity=1, nbytes=NBYTES, room=NBYTES)
    fresh = CodedHeld(held=zm.Held(own=(0, None), known=0, copies=(None, None)))
    knows = CodedHeld(held=zm.Held(own=(4, None), known=4, copies=(None, None)))
    found = choose((knows, fresh, fresh), made)
    assert isinstance(found, zm.Lost) and found.places == (1, 2)
    assert "version 4 was committed" in found.reason and "more than the 1 of 2 + 1" in found.reason


def test_a_rebuilt_shard_with_another_digest_ends_the_run() -> None:
    job = Job(3, Code(data=2, parity=1, nbytes=NBYTES, room=NBYTES), random.Random(1))
    job.enter()
    assert job.step(1000) and not job.step(9)
    job.kill((2,), moved=False)
    job.ranks[0].parities[1][:] ^= 1
    reports = tuple(rank.machine.coded_report(0) for rank in job.ranks)
    (action,) = job.ranks[2].put(EnteredCoded(held=reports, domains=job.domains))
    assert isinstance(action, Rebuild) and action.chosen.digests[2] == digest(content(2, 1))
    job.rebuild(job.ranks[2], action.chosen)
    (failed,) = job.ranks[2].put(zm.Restored(digest=digest(job.ranks[2].slots[1])))
    assert isinstance(failed, zm.Fail) and "memory or a link has erred" in failed.reason


@pytest.mark.parametrize("damaged", range(1, 6))
def test_parities_that_are_not_what_was_voted_for_are_not_used_and_encoded_again(damaged: int) -> None:
    """A lost rank, and parities of another one whose memory has erred, are two of the two that may be."""
    job = Job(6, Code(data=4, parity=2, nbytes=NBYTES, room=NBYTES), random.Random(1))
    job.enter()
    assert job.step(1000) and not job.step(18), "all have voted for version 1"
    job.kill((0,), moved=False)
    job.ranks[damaged].parities[1][3] ^= 1
    assert job.enter()
    machine = job.ranks[damaged].machine
    assert machine.version == 1 and machine.copies[1] is None
    assert sum(rank.machine.copies[1] is None for rank in job.ranks) == 2
    assert job.step(1000) and machine.copies[1] is not None
    job.kill((0, 1, 2), moved=False)
    assert not job.enter(), "and three are too many"


def test_reports_come_as_they_were_sent_and_others_are_refused(seed: int) -> None:
    held = zm.Held(own=(4, 5), known=4, copies=(None, zm.Copy(ward=1, version=5, digest=9)), digest=7)
    said = CodedRow(
        held=CodedHeld(held=held, domains=((), (2, 0, 1)), digests=(1, 7, 3), voted=(2, 9, 4)), handles=()
    )
    row = said.encoded(3)
    found = CodedRow.decoded(row, ranks=3, place=1, slot=1, incarnation=1)
    assert found.held == said.held
    draw = random.Random(seed)
    for _ in range(300):
        bad = row.copy()
        bad[draw.randrange(len(bad))] = draw.choice((2**64 - 1, 2**50, draw.randrange(9)))
        try:
            again = CodedRow.decoded(bad, ranks=3, place=1, slot=1, incarnation=1)
        except RemoteProtocolError:
            continue
        assert len(again.held.digests) in (0, 3) and len(again.held.voted) in (0, 3)
    with pytest.raises(RemoteProtocolError):
        CodedRow.decoded(row[:-1], ranks=3, place=1, slot=1, incarnation=1)
    assert len(row) == row_numbers(3)
    with pytest.raises(LocalProtocolError):
        Job(3, Code(data=2, parity=1, nbytes=NBYTES, room=NBYTES), draw).ranks[0].put(zm.AllHold(version=0))
