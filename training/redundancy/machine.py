"""Sans-I/O: replicas of what one rank alone holds, and the version that a group continues from after a loss.

Under ZeRO a rank alone holds its shard of masters and moments; on a mesh its stage's layers, or its slice of
them, with their moments: all of that is called its shard here. It has two slots: version v is in slot v % 2,
and the update writes the other slot. A *buddy* keeps copies in two slots of the same kind. All ranks do the
same things in one order:

 hold v ──first operation of the next step──▶ all ranks hold v: copy the ward's v   (during the passes)
        ──the norm is shared, with votes────▶ every copy of v is complete: v is committed
        ──update──────────────────────────▶ hold v + 1, and v

So v + 1 is written only when every rank's v has a copy, and the slot of v - 1 is overwritten only then. After
a loss all present ranks report what they hold (`Held`), and continue from the highest version of which every
rank's shard exists (`choose`): with one rank lost that is the last committed version or one later. A rank
that is ahead goes back to its other slot, since its copy may have been lost with the other rank. A
replacement pulls its shard from the buddy. If a rank and its buddy are lost at once, the committed state is
lost, and the run fails with that reason.

A version may also be protected at once, without a step after it: the actions of a step are done twice then.

Shards have keys, and ranks with equal keys hold the same shard, as those along `dp` of a mesh do. If they
stand for each other (`replicas`), nothing is copied, and the update comes before the vote:

 hold v ──update──▶ hold v, and v + 1, prepared ──votes──▶ v + 1 is committed, on all ranks with the same bits

A rank overwrites the slot of v only after a step that all ranks have voted for. So after a loss the group
continues from the last version that any rank knows to be committed: who has only prepared it promotes it, who
does not hold it pulls it from a rank with its key, and what was prepared beyond is computed again, since
nobody knows the losses and samples of who was lost. The group may have another size in each epoch, with other
keys. A sharded state has to be recut for that: see `zbmd.training.redundancy.resizing`.

Replicas whose state lies on a device vote for a version beside the step that follows it (`beside`), in the
order of those that have copies: the device's memory is copied to the host meanwhile.

If the state outlives its rank (`outlives`: in a file), there are no copies and no buddies either: a
replacement begins with its predecessor's state, and everything else is the same.

Versions are counted from the beginning of the plan: the number of steps that led to them. A run that resumes
begins with the version of its checkpoint, which each rank can load again (`first`).

A vote carries the digests of the own shard and of the copy of the ward's: a copy that differs from its
original ends the run, and so do shards of equal keys that differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, assert_never

from zbmd.training.redundancy.holdings import NO_DIGEST as NO_DIGEST
from zbmd.training.redundancy.holdings import SLOTS as SLOTS
from zbmd.training.redundancy.holdings import Copy as Copy
from zbmd.training.redundancy.holdings import Held as Held
from zbmd.training.redundancy.holdings import Source as Source
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError


def buddies(hosts: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each rank's buddy, given the ranks' hosts: on another host wherever possible.

    Every rank has one ward. The ranks in the order of their hosts, the fullest first, are shifted by its
    size.
    """
    n = len(hosts)
    if n < 2:
        return (0,) * n
    sizes = {host: hosts.count(host) for host in hosts}
    order = sorted(range(n), key=lambda place: (-sizes[hosts[place]], hosts[place], place))
    shift = max(sizes.values()) % n or 1
    found = [0] * n
    for at, place in enumerate(order):
        found[place] = order[(at + shift) % n]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The version to continue from, and why.

    `sources`: for each place the location of its shard, None: its own slot.
    """

    version: int
    sources: tuple[Source | None, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The state of `places` is lost, and why."""

    places: tuple[int, ...]
    reason: str


LOST_WITH_BUDDY = "a rank and its buddy were lost at once"
LOST_WITH_REPLICAS = "all ranks that held the same state were lost at once"
LOST_WITH_FILE = "its file is gone, or of another run, or damaged"


def choose(
    held: Sequence[Held],
    cause: str = LOST_WITH_BUDDY,
    keys: Sequence[int] | None = None,
    *,
    beyond: bool = True,
) -> Choice | Lost:
    """Return what a group continues from, given what its ranks hold, in order: the same on all of them.

    `cause`: how a shard can have been lost. `keys`: of the ranks' shards; None: all differ. A rank can begin
    with its `first` version, if no later one was committed. `beyond`: whether a version may be chosen that
    nobody knows to be committed.
    """
    keys = range(len(held)) if keys is None else keys
    known = max(one.known for one in held)
    versions = {one.first for one in held}
    versions |= {version for one in held for version in one.own if version is not None}
    versions |= {copy.version for one in held for copy in one.copies if copy is not None}
    for version in sorted(versions, reverse=True):
        sources = sources_of(held, keys, version)
        if version < known or None in sources or (version > known and not beyond):
            continue
        pulled = sum(isinstance(source, Source) for source in sources)
        reason = f"version {version} is the highest of which every shard is here; {pulled} are to be pulled"
        return Choice(
            version=version,
            sources=tuple(source if isinstance(source, Source) else None for source in sources),
            reason=reason,
        )
    candidates = sorted(version for version in versions | {known} if version >= known)
    missing = [
        [p for p, found in enumerate(sources_of(held, keys, version)) if found is None]
        for version in candidates
    ]
    gone = min(missing, key=len)
    return Lost(
        places=tuple(gone),
        reason=f"version {known} was committed, and of the shards of places {', '.join(map(str, gone))} "
        f"neither originals nor copies are left: {cause}",
    )


class _Here(Enum):
    HERE = "here"


def sources_of(held: Sequence[Held], keys: Sequence[int], version: int) -> list[Source | _Here | None]:
    """Return, for each place, the location of its shard of `version`."""
    found: list[Source | _Here | None] = [
        _Here.HERE if version == one.first or version in one.own else None for one in held
    ]
    voted = {
        key: one.digest for key, one in zip(keys, held, strict=True) if one.known == version and one.digest
    }
    holders: dict[int, list[int]] = {}
    for place, source in enumerate(found):
        if source is not None:
            holders.setdefault(keys[place], []).append(place)
    for place, source in enumerate(found):
        alike = holders.get(keys[place])
        if source is None and alike is not None:  # several readers spread over the holders
            whose = alike[place % len(alike)]
            digest = voted.get(keys[place], NO_DIGEST)
            found[place] = Source(place=whose, slot=version % SLOTS, digest=digest, own=True)
    for place, one in enumerate(held):
        for slot, copy in enumerate(one.copies):
            if copy is None or copy.version != version:
                continue
            for reader, source in enumerate(found):  # the ward, and who holds the same as it
                if source is None and keys[reader] == keys[copy.ward]:
                    found[reader] = Source(place=place, slot=slot, digest=copy.digest)
    return found


# ---- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A new epoch: what all ranks hold, in the order of their places, and each one's host.

    place: this rank's. keys: of all ranks' shards; empty: all differ.
    """

    held: tuple[Held, ...]
    hosts: tuple[int, ...]
    place: int
    keys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The shard has been pulled; `digest` of what was received."""

    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllHold:
    """Every rank holds `version`, and none changes its shard before this one has voted."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """The running copy has ended: `digest` of what was written, None if it was interrupted."""

    digest: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Voted:
    """All ranks' votes, in the order of their places: (digest of its shard, digest of its ward's copy)."""

    votes: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """This rank's shard is at the next version or, among replicas, prepared for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOver:
    """A rank is lost, or has given up. Running work has been drained."""


Event = Entered | Restored | AllHold | Copied | Voted | Updated | EpochOver


# ---- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Pull the own shard of `version` from `source` into slot `version % SLOTS`; answer with `Restored`."""

    version: int
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAnew:
    """Reset the own shard to that of the first version, in slot `first % SLOTS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Continue from `version`, which this rank holds."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyWard:
    """Copy the shard of the rank at place `ward`, of `version`, into `slot`; answer with `Copied`."""

    ward: int
    version: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """`version` is committed: every shard of it is safe. digests: of the shards, by place."""

    version: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """The run cannot continue. `lost`: the committed state is lost; otherwise a copy differs."""

    lost: bool
    reason: str


Action = Restore | StartAnew | Resume | CopyWard | Commit | Fail


class State(Enum):
    """The state of the machine."""

    WAITING = "waiting"
    RESTORING = "restoring"
    HOLDING = "holding"
    COPYING = "copying"
    COPIED = "copied"
    PREPARED = "prepared"
    COMMITTED = "committed"
    FAILED = "failed"


class Mirror:
    """The machine of one rank. `place` of `ranks`; `known`: the version known to be committed, from a log.

    `first`: the version that it can begin with. `own`: the versions that it begins with, by slot. `outlives`:
    whether a replacement finds the rank's state. `replicas`: whether ranks with equal keys stand for each
    other, so that nothing is copied; only then may a group have another size than `ranks`. `beside`: whether
    replicas vote for a version during the step that follows it, and not before.
    """

    def __init__(
        self,
        *,
        place: int,
        ranks: int,
        known: int = 0,
        first: int = 0,
        own: tuple[int | None, int | None] = (None, None),
        outlives: bool = False,
        replicas: bool = False,
        beside: bool = False,
    ) -> None:
        if not 0 <= place < ranks or not 0 <= first <= known:
            raise LocalProtocolError(
                f"no mirror at place {place} of {ranks}, with first version {first} and {known} known"
            )
        self.keys = tuple(range(ranks))
        self.replicas, self.beside = replicas, beside
        self.applies_first = replicas and not beside
        """Whether the update comes before the vote."""
        self.place = place
        self.ranks = ranks
        self.state = State.WAITING
        self.first = self.version = first
        """`version`: the one that the next step begins with."""
        self.own: list[int | None] = list(own)
        self.copied = ranks > 1 and not outlives and not replicas
        self.known = known
        self.ward = place
        self.copies: list[Copy | None] = [None] * SLOTS
        self._buddies: tuple[int, ...] = ()
        self._voted_for = (0, NO_DIGEST)
        """The last version that was committed here, and the digest of this rank's shard of it."""
        self._target = 0
        self._expected = NO_DIGEST
        self._slot = 0

    @property
    def held(self) -> Held:
        """Return this rank's report at the start of an epoch, of what it knows by itself."""
        return self.report(0)

    def report(self, known: int) -> Held:
        """Return this rank's report at the start of an epoch.

        known: the highest version that is logged, or that another rank saw committed.
        """
        copies = (self.copies[0], self.copies[1])
        known = max(known, self.known)
        voted, digest = self._voted_for
        return Held(
            own=(self.own[0], self.own[1]),
            known=known,
            copies=copies,
            first=self.first,
            digest=digest if voted == known else NO_DIGEST,
        )

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take `event` and return the actions. Raises `LocalProtocolError` for one out of place."""
        if self.state is State.FAILED:
            return []
        match event:
            case Entered():
                actions = self._enter(event)
            case Restored(digest=digest):
                actions = self._restored(digest)
            case AllHold(version=version):
                actions = self._all_hold(version)
            case Copied(digest=digest):
                actions = self._copied(digest)
            case Voted(votes=votes):
                actions = self._voted(votes)
            case Updated():
                actions = self._updated()
            case EpochOver():
                if self.state is State.COPYING:
                    self._expect(event, State.COPIED)
                self.state, actions = State.WAITING, []
            case _:
                assert_never(event)
        self.check_invariants()
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        for slot, (own, copy) in enumerate(zip(self.own, self.copies, strict=True)):
            assert own is None or own % SLOTS == slot, f"version {own} lies in slot {slot}"
            assert copy is None or copy.version % SLOTS == slot, f"version {copy} lies in slot {slot}"
        if self.state in (State.COPIED, State.COMMITTED) and self.copied:
            copy = self.copies[self._slot]
            assert copy is not None and copy.ward == self.ward and copy.version == self.version
        if self.state not in (State.WAITING, State.RESTORING, State.FAILED):
            assert self.own[self.version % SLOTS] == self.version, "it goes on from what it does not hold"
        if self.state is State.COPYING:
            assert self.copies[self._slot] is None, "a slot that is written is taken for whole"

    def _expect(self, event: Event, *states: State) -> None:
        if self.state not in states:
            wanted = ", ".join(state.value for state in states)
            raise LocalProtocolError(
                f"place {self.place}: {event} came in state {self.state.value}, and belongs to {wanted}"
            )

    def _enter(self, event: Entered) -> list[Action]:
        self._expect(event, State.WAITING)
        ranks, keys = len(event.held), event.keys or tuple(range(len(event.held)))
        if len(event.hosts) != ranks or len(keys) != ranks or not 0 <= event.place < ranks:
            raise LocalProtocolError(f"{ranks} ranks, with hosts {event.hosts} and keys {event.keys}")
        if (ranks, event.place) != (self.ranks, self.place) and not self.replicas:
            raise LocalProtocolError(f"{ranks} ranks hold a state of {self.ranks}")
        if any(c is not None and not 0 <= c.ward < ranks for one in event.held for c in one.copies):
            raise RemoteProtocolError("a rank says that it has a copy of a rank that there is not")
        cause = LOST_WITH_BUDDY if self.copied else LOST_WITH_REPLICAS if self.replicas else LOST_WITH_FILE
        choice = choose(event.held, cause, keys, beyond=not self.applies_first)
        if isinstance(choice, Lost):
            return self.fail(choice.reason, lost=True)
        self.take_place(event.place, keys, event.hosts, known=max(one.known for one in event.held))
        return self.go_on_from(choice.version, choice.sources[self.place])

    def take_place(self, place: int, keys: tuple[int, ...], hosts: Sequence[int], *, known: int) -> None:
        """Be the rank at `place` in an epoch, with a ward."""
        self.ranks, self.place, self.keys, self.known = len(keys), place, keys, known
        self._buddies = buddies(hosts)
        self.ward = self._buddies.index(place)

    def go_on_from(self, version: int, source: Source | None) -> list[Action]:
        """Hold `version`, from `source`. None: it is here, or is the first one."""
        self._target, slot = version, version % SLOTS
        if source is None and self.own[slot] != version:
            return [StartAnew(), *self._resume()]
        if source is None:
            return self._resume()
        self.restore(version, source.digest)
        return [Restore(version=version, source=source)]

    def restore(self, version: int, digest: int = NO_DIGEST) -> None:
        """Have the own shard of `version` written, and wait for `Restored`. digest: the expected one."""
        self._target, self._expected = version, digest
        self.state, self.own[version % SLOTS] = State.RESTORING, None

    def forget(self) -> None:
        """Hold nothing."""
        self.own, self.copies = [None] * SLOTS, [None] * SLOTS
        self._voted_for = 0, NO_DIGEST

    def _resume(self) -> list[Action]:
        self.state, self.version = State.HOLDING, self._target
        self.own[self.version % SLOTS] = self.version
        if (self.own[1 - self.version % SLOTS] or 0) > self.version:  # the next step writes it again
            self.own[1 - self.version % SLOTS] = None
        return [Resume(version=self._target)]

    def _restored(self, digest: int) -> list[Action]:
        self._expect(Restored(digest=digest), State.RESTORING)
        if self._expected not in (NO_DIGEST, digest):
            return self.fail(
                f"the shard of version {self._target} that place {self.place} pulled has digest "
                f"{digest:016x}, and the original {self._expected:016x}: memory or a link has erred",
                lost=False,
            )
        if self._expected == digest:
            self._voted_for = self._target, digest  # others can compare what they pull from here
        return self._resume()

    def _updated(self) -> list[Action]:
        self._expect(Updated(), State.HOLDING if self.applies_first else State.COMMITTED)
        self.own[(self.version + 1) % SLOTS] = self.version + 1
        if self.applies_first:
            self.state = State.PREPARED
            return []
        self.state, self.version = State.HOLDING, self.version + 1
        return []

    def _all_hold(self, version: int) -> list[Action]:
        self._expect(AllHold(version=version), State.HOLDING, State.COMMITTED)
        if version != self.version:
            raise LocalProtocolError(f"place {self.place} holds version {self.version}, and not {version}")
        self._slot = version % SLOTS
        copy = self.copies[self._slot]
        if not self.copied or (copy is not None and (copy.ward, copy.version) == (self.ward, version)):
            self.state = State.COPIED
            return []
        self.state, self.copies[self._slot] = State.COPYING, None
        return [CopyWard(ward=self.ward, version=version, slot=self._slot)]

    def _copied(self, digest: int | None) -> list[Action]:
        self._expect(Copied(digest=digest), State.COPYING)
        self.state = State.WAITING if digest is None else State.COPIED
        if digest is not None:
            self.copies[self._slot] = Copy(ward=self.ward, version=self.version, digest=digest)
        return []

    def _voted(self, votes: tuple[tuple[int, int], ...]) -> list[Action]:
        self._expect(Voted(votes=votes), State.PREPARED if self.applies_first else State.COPIED)
        assert len(votes) == self.ranks
        version = self.version + self.applies_first
        first_of = {key: place for place, key in reversed(list(enumerate(self.keys)))}
        for place, (own, _) in enumerate(votes):
            first = first_of[self.keys[place]]
            if own != votes[first][0]:
                alike = [
                    votes[other][0] for other in range(self.ranks) if self.keys[other] == self.keys[place]
                ]
                odd = [other for other in (first, place) if alike.count(votes[other][0]) == 1]
                alone = f" at place {odd[0]}, which alone differs" if len(odd) == 1 else ""
                return self.fail(
                    f"places {first} and {place} hold the same state, and version {version} of it has "
                    f"digests {votes[first][0]:016x} and {own:016x}: memory or a processor has erred{alone}",
                    lost=False,
                )
        for place, (own, _) in enumerate(votes):
            keeper = votes[self._buddies[place]]
            if self.copied and keeper[1] != own:
                return self.fail(
                    f"the copy at place {self._buddies[place]} of version {self.version} of place {place} "
                    f"has digest {keeper[1]:016x}, and the original {own:016x}: memory or a link has erred",
                    lost=False,
                )
        self.state = State.HOLDING if self.applies_first else State.COMMITTED
        self.version = self.known = version
        self._voted_for = version, votes[self.place][0]
        return [Commit(version=version, digests=tuple(own for own, _ in votes))]

    def fail(self, reason: str, *, lost: bool) -> list[Action]:
        """Handle no event any more."""
        self.state = State.FAILED
        return [Fail(lost=lost, reason=reason)]


# ---- capture


def mirror_config(machine: Mirror, *, outlives: bool = False) -> dict[str, Any]:
    """Return the configuration from which a new `Mirror` like this one is built."""
    return {
        "place": machine.place,
        "ranks": machine.ranks,
        "known": machine.known,
        "first": machine.first,
        "own": list(machine.own),
        "outlives": outlives,
        "replicas": machine.replicas,
        "beside": machine.beside,
    }


def _build_mirror(config: Mapping[str, Any]) -> Mirror:
    first, second = config["own"]
    return Mirror(
        place=config["place"],
        ranks=config["ranks"],
        known=config["known"],
        first=config["first"],
        own=(first, second),
        outlives=config["outlives"],
        replicas=config["replicas"],
        beside=config.get("beside", False),
    )


MIRROR: MachineKind[Event, Action] = register(
    "mirror", 5, _build_mirror, events=Event, actions=Action, states=(Mirror,)
)
