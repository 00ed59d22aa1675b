"""The state of a simulated training job that outlives its processes, and what must hold of it.

Each incarnation of a rank has four cells of memory that peers can read, also after its death: two slots of
its own shard, and two of copies. What a shard holds is the scenario's choice (`Contents`): here a hash chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol, TypeAlias

from zbmd.actors.view import MemberId
from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.collectives.scenarios.hosted_job import JobOptions, Message
from zbmd.training.job.mesh import DATA_AXIS, Mesh
from zbmd.training.job.results import state_digest
from zbmd.training.job.task import StepResult
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.cut_events import Divide, Keeps
from zbmd.training.redundancy.interface import Wish
from zbmd.training.redundancy.machine import SLOTS
from zbmd.training.redundancy.resizing import ResizingMirror
from zbmd.training.run.audit import Audit, audit
from zbmd.training.run.ledger import CommitRecord
from zbmd.transport import sim

COPIES_AT = SLOTS
"""The first cell of copies; those before it are slots of the own shard."""
CELLS = 2 * SLOTS
SHARDS, SAMPLES = 4, 2
"""Logical shards of a step of the hash chain, and the samples of each."""
TORN = 1
"""The content of a cell that is being written: no version's."""
PART_BITS = 16


def part_key(parts: int, part: int) -> int:
    """Return the key of a part of a state that is cut into so many."""
    return parts << PART_BITS | part


@lru_cache(maxsize=1024)
def _mesh(whole: str, world_size: int, ranks: int) -> Mesh:
    """Return a mesh with so many of its ranks. Simulated ranks ask at each move, so these are cached."""
    mesh = Mesh.parse(whole, world_size)
    return mesh.along_data(ranks * mesh.size(DATA_AXIS) // world_size)


@lru_cache(maxsize=4096)
def _active(mesh: Mesh, ranks: tuple[int, ...]) -> tuple[int, ...]:
    return mesh.among(ranks)


@lru_cache(maxsize=1024)
def _state_keys(mesh: Mesh) -> tuple[int, ...]:
    return mesh.state_keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A signal: the process of `rank` is to ask all ranks for something, `after_ns` after its start."""

    rank: int
    after_ns: int
    wish: Wish


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions(JobOptions):
    """One run. `steps` of them lead from version `first` to the last; hosts have `per_host` ranks, 0: all.

    mesh: of `zbmd train`, "": dp. beside: replicas vote for a version beside the step after it. sharded: each
    rank alone holds its shard, as under ZeRO. files: the state is in files, which outlive their ranks. kept:
    it is in memory that outlives them. talks: the optimizer has an operation in its update, as Muon has.
    corrupting: memory errs now and then, where a vote or a digest must notice it. saving: a slot is copied
    for a checkpoint now and then, beside the steps that follow.
    """

    mesh: str = ""
    per_host: int = 0
    sharded: bool = False
    files: bool = False
    kept: bool = False
    talks: bool = False
    beside: bool = False
    corrupting: bool = False
    saving: bool = False
    first: int = 0
    asked: tuple[Asked, ...] = ()

    @property
    def resizes(self) -> bool:
        """Whether a sharded state is recut for each number of ranks."""
        return self.shrink and self.sharded

    @property
    def last(self) -> int:
        """The version that the run ends with, unless it is stopped."""
        return self.first + self.steps

    def of_mesh(self, ranks: int) -> Mesh:
        """The mesh of so many ranks: fewer than all are fewer along `dp`."""
        return _mesh(self.mesh or f"{DATA_AXIS}={self.world_size}", self.world_size, ranks)

    @property
    def replicas(self) -> bool:
        """Whether ranks with equal keys stand for each other, as a run of `zbmd train` has it."""
        if self.sharded or self.files:
            return False
        mesh = self.of_mesh(self.world_size)
        return self.world_size > 1 and mesh.has_replicas(self.per_host or self.world_size)

    @property
    def leaves(self) -> bool:
        """Whether ranks that have ended leave a state that is recut, in files or in memory."""
        return self.resizes and (self.files or self.kept)

    def fits(self, ranks: Sequence[int]) -> bool:
        """Whether the job can train with these ranks, fewer than all."""
        return self.shrink and (self.replicas or self.resizes) and bool(self.active(ranks))

    def active(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those of these ranks that train; the others wait for another view."""
        return _active(self.of_mesh(self.world_size), tuple(ranks))

    def keys(self, ranks: int) -> tuple[int, ...]:
        """The keys of the shards of so many ranks, by their places."""
        if self.resizes:
            return tuple(part_key(ranks, part) for part in range(ranks))
        return tuple(range(ranks)) if self.sharded else _state_keys(self.of_mesh(ranks))

    def host(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.per_host if self.per_host else 0

    def logical_shards(self, place: int, ranks: int, shards: int) -> range:
        """The logical shards of which the rank at a place reports loss and samples."""
        mesh = self.of_mesh(ranks)
        elsewhere = any(at for axis, at in mesh.coordinates(place).items() if axis not in mesh.data_axes)
        shares = assign_shards(shards, mesh.data_ranks)
        return range(0) if elsewhere else range(*shares[mesh.data_place(place)])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOrder:
    """The step to `version`, of the rank at `place` of `members`."""

    epoch: int
    version: int
    members: tuple[MemberId, ...]
    place: int


class Cells(Protocol):
    """The memory of one incarnation of a rank."""

    def digest(self, cell: int) -> int:
        """Return the digest of what the cell holds now."""
        ...

    def tear(self, cell: int) -> None:
        """Write something into it that is no version, as work under way does."""
        ...

    def err(self, cell: int, bit: int) -> None:
        """Flip a bit of it, another one for each `bit` below 32, as bad memory does."""
        ...

    def begin(self, version: int) -> None:
        """Write the first version, from a seed or a checkpoint, into its slot."""
        ...

    def compute(self, order: StepOrder) -> None:
        """Do the part of a step that needs no other rank."""
        ...

    def reduce(self, order: StepOrder) -> bool:
        """Add up the parts of all members, which have all entered; False if a lost one cuts it short here."""
        ...

    def update(self, order: StepOrder) -> None:
        """Write the next version into its slot."""
        ...

    def copy(self, source: Cells, source_cell: int, cell: int) -> None:
        """Pull what a cell of a member holds into one of ours."""
        ...

    def assemble(self, sources: Sequence[tuple[Cells, int]], version: int) -> None:
        """Put our part of a version together, in its slot, from the cells of all parts of another cut."""
        ...


class Contents(Protocol):
    """The contents of versions, the step from one to the next, and the samples that belong to it."""

    shards: int
    samples: int

    def digest_of(self, key: int, version: int) -> int:
        """Of the one content that a shard may have at `version`."""
        ...

    def sample_ids(self, version: int) -> Sequence[Sequence[int]]:
        """The samples of each logical shard in the step to `version`."""
        ...

    def open(self, member: MemberId, key: int) -> Cells:
        """The cells of a new incarnation, none of which holds a version."""
        ...


ContentsOf: TypeAlias = "Callable[[sim.Simulation[Message]], Contents]"
"""Makes the contents of a job in a simulation."""


@lru_cache(maxsize=1 << 14)
def chained(key: int, version: int) -> int:
    """Return the one content of a shard: a hash chain, as a step is a function of the one before."""
    return key + 2 if version == 0 else _next(chained(key, version - 1), version)


def _next(content: int, version: int) -> int:
    said = content.to_bytes(8, "little") + version.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


class HashCells(Cells):
    """Cells of a hash chain; a content is its own digest."""

    def __init__(self, key: int) -> None:
        self.key = key
        self.held = [TORN] * CELLS

    def digest(self, cell: int) -> int:
        """See `Cells`."""
        return self.held[cell]

    def tear(self, cell: int) -> None:
        """See `Cells`."""
        self.held[cell] = TORN

    def err(self, cell: int, bit: int) -> None:
        """See `Cells`."""
        self.held[cell] ^= 1 << bit

    def begin(self, version: int) -> None:
        """See `Cells`."""
        self.held[version % SLOTS] = chained(self.key, version)

    def compute(self, order: StepOrder) -> None:
        """See `Cells`: nothing."""

    def reduce(self, order: StepOrder) -> bool:
        """See `Cells`: nothing."""
        return True

    def update(self, order: StepOrder) -> None:
        """See `Cells`."""
        version = order.version
        self.held[version % SLOTS] = _next(self.held[1 - version % SLOTS], version)

    def copy(self, source: Cells, source_cell: int, cell: int) -> None:
        """See `Cells`."""
        self.held[cell] = source.digest(source_cell)

    def assemble(self, sources: Sequence[tuple[Cells, int]], version: int) -> None:
        """See `Cells`."""
        found = [cells.digest(cell) for cells, cell in sources]
        right = [chained(part_key(len(found), part), version) for part in range(len(found))]
        self.held[version % SLOTS] = chained(self.key, version) if found == right else sum(found) + TORN


class HashChain(Contents):
    """The simplest job whose versions can be distinguished."""

    shards, samples = SHARDS, SAMPLES

    def __init__(self, simulation: sim.Simulation[Message]) -> None:
        """It needs nothing of the simulation."""

    def digest_of(self, key: int, version: int) -> int:
        """See `Contents`."""
        return chained(key, version)

    def sample_ids(self, version: int) -> Sequence[Sequence[int]]:
        """See `Contents`."""
        first = version * SHARDS * SAMPLES
        return [range(first + shard * SAMPLES, first + (shard + 1) * SAMPLES) for shard in range(SHARDS)]

    def open(self, member: MemberId, key: int) -> Cells:
        """See `Contents`."""
        return HashCells(key)


class SimulatedLog:
    """The commit log of a run; see `zbmd.training.run.ledger.CommitLog`."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.records: list[CommitRecord] = []

    @property
    def last(self) -> int:
        """The highest version in the log, or the first version of the run."""
        return self.records[-1].version if self.records else self.first

    def append(self, record: CommitRecord) -> None:
        """Log a version, unless it is already there."""
        found = next((old for old in self.records if old.version == record.version), None)
        if found is None:
            assert record.version == self.last + 1, f"version {record.version} follows {self.last} in the log"
            self.records.append(record)
            return
        assert found.digest == record.digest, f"version {record.version} is logged with other digests"
        assert found.shards == record.shards, f"version {record.version} is logged with other samples"


@dataclass(slots=True)
class RankFile:
    """The state file of one rank: its cells, and of each slot the version that is whole, with its result.

    Memory that outlives a rank is as a file, with the record of the last version that it saw committed.
    """

    cells: Cells
    stamps: list[int | None] = field(default_factory=lambda: [None, None])
    notes: list[StepResult | None] = field(default_factory=lambda: [None, None])
    record: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True)
class Bank:
    """The cells of one incarnation for a part of the cut that was made in an epoch. file: where they lie."""

    made: int
    parts: int
    cells: Cells
    part: int = 0
    file: RankFile | None = None

    @property
    def name(self) -> tuple[int, int, int]:
        """The name of its file."""
        return self.made, self.part, self.parts

    @property
    def whole(self) -> list[int]:
        """The digests of its cells, in a file of those that are whole."""
        stamped = (
            range(CELLS)
            if self.file is None
            else [slot for slot in range(SLOTS) if self.file.stamps[slot] is not None]
        )
        return [self.cells.digest(cell) for cell in stamped]


@dataclass(slots=True)
class CommitWorld:
    """A simulated job: the memory of its ranks, its log, and what its ranks do together."""

    options: CommitOptions
    contents: Contents
    log: SimulatedLog = field(init=False)
    mirror: type[zm.Mirror] = zm.Mirror
    """The machine of ranks; a test's choice."""
    resizing: type[ResizingMirror] = ResizingMirror
    """That of a state which is recut."""
    lives: Callable[[MemberId], bool] = lambda member: True
    cells: dict[MemberId, Cells] = field(default_factory=dict[MemberId, Cells])
    files: dict[int, RankFile] = field(default_factory=dict[int, RankFile])
    banks: dict[MemberId, tuple[Bank, ...]] = field(default_factory=dict[MemberId, tuple[Bank, ...]])
    """Of a state that is recut: all memory of an incarnation, that in use first."""
    folders: dict[int, list[Bank]] = field(default_factory=dict[int, "list[Bank]"])
    """By host: the files of a state that is recut, which outlive their ranks."""
    machines: dict[MemberId, zm.Mirror] = field(default_factory=dict[MemberId, zm.Mirror])
    operations: dict[tuple[int, str], dict[MemberId, object]] = field(
        default_factory=dict[tuple[int, str], dict[MemberId, object]]
    )
    """By epoch and name: what each member that has entered it brought."""
    abandoned: set[int] = field(default_factory=set[int])
    """Epochs that a member has given up: its peers' operations end."""
    unattended: set[int] = field(default_factory=set[int])
    """Epochs whose beginning one of all ranks there has given up, also one that waits."""
    committed: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """The digests of committed versions, by place."""
    voted: dict[MemberId, int] = field(default_factory=dict[MemberId, int])
    """The last version of which a member knows the digest: it voted for it, or compared what it pulled."""
    chosen: dict[int, int] = field(default_factory=dict[int, int])
    """By epoch: the version that its members go on from."""
    acted: dict[tuple[int, int], Wish] = field(default_factory=dict[tuple[int, int], Wish])
    """By epoch and version: what all ranks were asked for there."""
    saved: int = 0
    """The highest version of which a checkpoint is whole."""
    ended: dict[int, int] = field(default_factory=dict[int, int])
    """By rank: the version that it ended the run with."""
    ended_in: dict[int, int] = field(default_factory=dict[int, int])
    """By epoch: the version that its members ended the run with."""
    finished: set[int] = field(default_factory=set[int])
    reason: str = ""
    """Why the state is lost."""
    state_lost: bool = False
    stranded: bool = False
    """Ranks are lost for good, and the others cannot go on."""
    corrupted: set[int] = field(default_factory=set[int])
    """Ranks whose memory or processor has erred."""
    unverified: bool = False
    """A shard was pulled whose digest nobody left had voted for: bad memory may stay unnoticed then."""
    corruption_noticed: bool = False
    ways: set[str] = field(default_factory=set[str])
    """Events of this run by name, for tests that want all of them to happen."""

    def __post_init__(self) -> None:
        self.log = SimulatedLog(self.options.first)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended before its last version, as it may."""
        return self.state_lost or self.stranded or self.corruption_noticed

    def key(self, rank: int) -> int:
        """The key of a rank's shard; groups of another size have one key alone, or recut their state."""
        return self.options.keys(self.options.world_size)[rank]

    def keys(self, members: Sequence[MemberId]) -> dict[MemberId, int]:
        """The keys of these members' shards."""
        if self.options.resizes:
            return dict(zip(members, self.options.keys(len(members)), strict=True))
        return {member: self.key(member.rank) for member in members}

    def holds(self, member: MemberId, cell: int, key: int, version: int) -> bool:
        """Whether a cell holds what the shard of a key is at `version`."""
        return self.cells[member].digest(cell) == self.contents.digest_of(key, version)

    def has_voter(self, members: Sequence[MemberId], key: int, version: int) -> bool:
        """Whether any of `members` knows the digest of the shard of a key at `version`."""
        return any(self.voted.get(one) == version for one, own in self.keys(members).items() if own == key)

    def open(self, member: MemberId) -> Cells:
        """Return the cells of a new incarnation: those of its file, or kept memory, if it has one."""
        if self.options.resizes or not (self.options.files or self.options.kept):
            cells = self.contents.open(member, self.key(member.rank))
        else:
            if member.rank not in self.files:
                self.files[member.rank] = RankFile(self.contents.open(member, self.key(member.rank)))
            cells = self.files[member.rank].cells
        self.cells[member] = cells
        return cells

    def divide(self, member: MemberId, made: int, parts: int, part: int, kept: Sequence[Bank] = ()) -> Cells:
        """Open cells for a part of a state, beside those that are kept."""
        cells = self.cells[member] = self.contents.open(member, part_key(parts, part))
        bank = Bank(made, parts, cells, part, RankFile(cells) if self.options.leaves else None)
        self.banks[member] = (bank, *kept)
        if self.options.leaves:
            self.folder(member).append(bank)
        return cells

    def drop_undivided(self, member: MemberId, work: Divide) -> Sequence[Bank]:
        """Give back what `work` does not keep; return what it does."""
        now, *older = self.banks[member]
        kept = {Keeps.OWN: [now], Keeps.OLDER: older, Keeps.NOTHING: []}[work.keeps]
        self.remove(member, [bank for bank in (now, *older) if bank not in kept])
        self.ways.add("is recut")
        return kept

    def cut(self, member: MemberId, made: int) -> None:
        """Note the cut that the cells in use belong to."""
        now, *older = self.banks[member]
        cut = replace(now, made=made)
        self.banks[member] = (cut, *older)
        if self.options.leaves:
            folder = self.folder(member)
            folder[folder.index(now)] = cut

    def forget(self, member: MemberId) -> None:
        """Give back the cells that were kept."""
        now, *older = self.banks[member]
        self.banks[member] = (now,)
        self.remove(member, older)

    def folder(self, member: MemberId) -> list[Bank]:
        """Return what is on a host of a state that is recut and outlives its rank."""
        return self.folders.setdefault(self.options.host(member.rank), [])

    def remove(self, member: MemberId, banks: Sequence[Bank]) -> None:
        """Delete the files of these parts, if they have any."""
        folder = self.folder(member)
        folder[:] = [bank for bank in folder if all(bank is not one for one in banks)]

    # ---- what must hold

    def check_commit(self, version: int, digests: tuple[int, ...], members: Sequence[MemberId]) -> None:
        """A version is committed with the content that it may have; what is not corrupted, that is."""
        wanted = tuple(self.contents.digest_of(key, version) for key in self.keys(members).values())
        if not self.corrupted:
            assert digests == wanted, f"version {version} is committed with a wrong content"
        before = self.committed.get(version, digests)
        is_recut = self.options.resizes and len(before) != len(digests)
        alike = self.corrupted or is_recut or set(before) == set(digests)
        assert alike, f"version {version} is committed twice"
        assert version in self.committed or version <= max(self.committed, default=self.options.first) + 1
        self.committed[version] = digests

    def check_safe(self, version: int, members: Sequence[MemberId]) -> None:
        """Check that a committed version survives the loss of any one rank, if it can."""
        options = self.options
        if self.corrupted or len(members) == 1:
            return
        keys = self.keys(members)
        for member in members:
            if options.files:
                file = self.banks[member][0].file if options.resizes else self.files[member.rank]
                assert file is not None and version in file.stamps, f"{member} has no whole {version}"
            elif options.replicas:
                alike = [m for m in members if keys[m] == keys[member]]
                held = all(self.holds(m, version % SLOTS, keys[m], version) for m in alike)
                assert held, f"version {version} of {member} is not on all of {alike}"
            else:
                copies = [
                    m
                    for m in members
                    if m != member and self.holds(m, COPIES_AT + version % SLOTS, keys[member], version)
                ]
                assert copies, f"version {version} of {member} is committed without a copy"

    def check_lost(self, known: int, members: Sequence[MemberId]) -> None:
        """The state is said to be lost only if it is."""
        if self.options.resizes:
            self._check_cuts_lost(known, members)
            return
        for version in range(known, self.options.last + 1):
            gone = [
                member
                for member in members
                if not any(
                    self.holds(m, cell, self.key(member.rank), version)
                    for m in ((member,) if self.options.files else members)
                    for cell in range(CELLS)
                )
            ]
            assert gone, f"version {version} is said to be lost, and all of it is here"

    def _check_cuts_lost(self, known: int, members: Sequence[MemberId]) -> None:
        banks = [bank for member in members for bank in self.banks.get(member, ())]
        held = [(bank, {bank.cells.digest(cell) for cell in range(CELLS)}) for bank in banks]
        if self.options.leaves:
            hosts = {self.options.host(member.rank) for member in members if member in self.banks}
            left = [bank for host in hosts for bank in self.folders.get(host, ())]
            held = [(bank, set(bank.whole)) for bank in left] + ([] if self.options.files else held)
        for made, parts in {(bank.made, bank.parts) for bank, _ in held}:
            there = {found for bank, all_of in held if bank.made == made for found in all_of}
            for version in range(known, self.options.last + 1):
                wanted = {self.contents.digest_of(part_key(parts, part), version) for part in range(parts)}
                assert not wanted <= there, f"version {version} is said to be lost, and all of it is here"

    def check_ledger(self) -> None:
        """Every committed version is logged once, with each of its samples once, and its one digest."""
        steps = max(self.committed, default=self.options.first) - self.options.first
        found = audit(self.log.records, self._samples, base_version=self.options.first, steps=steps)
        wanted = Audit(
            steps=steps,
            steps_lost=0,
            samples=steps * self.contents.shards * self.contents.samples,
            samples_skipped=0,
            samples_repeated=0,
        )
        assert found == wanted, f"the log has {found}, and should have {wanted}"
        for record in () if self.corrupted else self.log.records:
            ranks = len(record.members) if self.options.resizes else self.options.world_size
            keys = set(self.options.keys(ranks))
            digest = state_digest({key: self.contents.digest_of(key, record.version) for key in keys})
            assert record.digest == digest, f"version {record.version} is logged with another digest"

    def _samples(self, version: int) -> list[int]:
        return [one for ids in self.contents.sample_ids(version) for one in ids]
