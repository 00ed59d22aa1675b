"""Sans-I/O: a sharded state that goes on with more ranks, or with fewer. It is recut for each number.

Each member of an epoch holds one part of the state, and a copy of its ward's, as `Mirror` has it. A cut has
the number of the epoch in which it was made. When the members of a new epoch are others, they continue from
the highest version that is whole in any cut (`choose_cut`):

- in a cut of as many parts, if each is held at its place or can be pulled there: as ever;
- in any other cut: the state is recut. Each member makes memory for its new part (`Divide`) and reads what
  it needs of it from those who hold the old parts, or copies of them (`Reshard`).

What is recut has no copies yet. So the old parts and their copies stay where they are, and count in
further epochs, until all members have voted for a version in the new cut: then it is committed there, each
part has a copy, and the old one is given back (`Forget`). If another rank is lost before that, the members
choose again, between both. At most two cuts are kept: the one that is continued from, and the new one.

If all members can begin with the version that was committed, from the seed or a checkpoint, they do.

On a mesh with other axes than `dp`, a member that is lost leaves others without a place: they wait for an
epoch that needs them. What they hold counts as well, and others read it there (`Lend`): a replica that
lost one member still has the parts of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.cut_events import (
    Cut,
    CutSource,
    Divide,
    EnteredCut,
    Forget,
    HeldCut,
    Keeps,
    Lend,
    Lent,
    Reshard,
    Resharded,
)
from zbmd.training.redundancy.holdings import NO_DIGEST, SLOTS, Held, Source
from zbmd.training.redundancy.machine import LOST_WITH_BUDDY, LOST_WITH_FILE, Lost, Mirror, State
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

NEVER = 0
"""The epoch of a cut that nobody holds anything of."""

Event = (
    EnteredCut
    | Resharded
    | Lent
    | zm.Restored
    | zm.AllHold
    | zm.Copied
    | zm.Voted
    | zm.Updated
    | zm.EpochOver
)
Action = zm.Action | Divide | Reshard | Lend | Forget


@dataclass(frozen=True, slots=True, kw_only=True)
class CutChoice:
    """The version to continue from, in the cut of epoch `made`.

    sources: for each place the location of its part, None: its own slot, or its beginning. parts: if not
    empty, the locations of all parts of the cut of epoch `old`, from which the state is recut.
    """

    version: int
    made: int
    sources: tuple[Source | None, ...]
    parts: tuple[CutSource, ...] = ()
    old: int = NEVER


def choose_cut(
    held: Sequence[HeldCut],
    *,
    epoch: int,
    beside: Sequence[HeldCut] = (),
    cause: str = LOST_WITH_BUDDY,
) -> CutChoice | Lost:
    """Return what a group continues from in `epoch`, given what its ranks hold: the same on all of them.

    beside: what others hold, which have no place in the group. cause: how a part can have been lost.
    """
    everyone, nowhere = (*held, *beside), (None,) * len(held)
    known = max(one.held.known for one in everyone)
    banks = [bank for one in everyone for bank in (one, one.older) if bank is not None]
    versions = {one.held.first for one in held}
    versions |= {version for bank in banks for version in bank.held.own if version is not None}
    versions |= {copy.version for bank in banks for copy in bank.held.copies if copy is not None}
    cuts = sorted({(bank.cut.made, bank.cut.parts) for bank in banks if bank.cut.made != NEVER})
    fewest: tuple[int, ...] | None = None
    for version in sorted((one for one in versions if one >= known), reverse=True):
        for made, _ in reversed(cuts):
            sources = _in_place(held, made, version)
            if sources is not None:
                return CutChoice(version=version, made=made, sources=sources)
        if all(one.held.first == version for one in held):
            return CutChoice(version=version, made=epoch, sources=nowhere)
        for made, count in cuts:
            parts = _parts_of(everyone, made, count, version)
            found = tuple(part for part in parts if part is not None)
            if len(found) == len(parts):
                return CutChoice(version=version, made=epoch, sources=nowhere, parts=found, old=made)
            gone = tuple(number for number, part in enumerate(parts) if part is None)
            fewest = gone if fewest is None or len(gone) < len(fewest) else fewest
    gone = fewest or ()
    which = f"parts {', '.join(map(str, gone))}" if gone else "the parts"
    return Lost(
        places=gone,
        reason=f"version {known} was committed, and of {which} of its state neither originals nor copies are "
        f"left: {cause}",
    )


def _in_place(held: Sequence[HeldCut], made: int, version: int) -> tuple[Source | None, ...] | None:
    """Return the sources for each place if all can go on in the cut of epoch `made`; None if they cannot."""
    seen: list[Held] = []
    for place, one in enumerate(held):
        if one.older is not None and one.older.cut.made == made:
            return None
        if one.cut.made == made and (one.cut.parts, one.cut.part) != (len(held), place):
            return None
        nothing = Held(own=(None, None), known=one.held.known, copies=(None, None), first=one.held.first)
        seen.append(one.held if one.cut.made == made else nothing)
    found = zm.sources_of(seen, range(len(held)), version)
    if None in found:
        return None
    return tuple(source if isinstance(source, Source) else None for source in found)


def _parts_of(held: Sequence[HeldCut], made: int, parts: int, version: int) -> list[CutSource | None]:
    """Return the location of each part of the cut of epoch `made`: originals rather than copies."""
    slot = version % SLOTS
    originals, copies = dict[int, CutSource](), dict[int, CutSource]()
    for place, one in enumerate(held):
        for bank in (one, one.older):
            if bank is None or (bank.cut.made, bank.cut.parts) != (made, parts):
                continue
            older, copy = bank is one.older, bank.held.copies[slot]
            if bank.held.own[slot] == version:
                digest = bank.held.digest if bank.held.known == version else NO_DIGEST
                source = Source(place=place, slot=slot, digest=digest, own=True)
                originals.setdefault(bank.cut.part, CutSource(source=source, older=older))
            if copy is not None and copy.version == version:
                source = Source(place=place, slot=slot, digest=copy.digest)
                copies.setdefault(copy.ward, CutSource(source=source, older=older))
    return [originals.get(part, copies.get(part)) for part in range(parts)]


def number_of_cut(everyone: Sequence[HeldCut], epoch: int) -> int:
    """Return the number of a cut that is made in `epoch`, above those of all that is reported.

    It is the epoch's own, but for what ranks of a launcher before this one have left.
    """
    banks = [bank for one in everyone for bank in (one, one.older) if bank is not None]
    return max(epoch, 1 + max(bank.cut.made for bank in banks))


class ResizingMirror:
    """The machine of one rank whose state is recut for each number of ranks.

    Within an epoch it is `mirror`, the machine of a state that is cut for good. Arguments as of `Mirror`. The
    parts of ranks that have ended may be reported beside the members', from files or memory that outlive
    them. If the state `outlives` its ranks for certain, there are no copies. made: the number of the cut of
    which this rank has found `own`, as its predecessor left it.
    """

    def __init__(
        self,
        *,
        place: int,
        ranks: int,
        known: int = 0,
        first: int = 0,
        own: tuple[int | None, int | None] = (None, None),
        made: int = NEVER,
        outlives: bool = False,
    ) -> None:
        if made == NEVER and own != (None, None):
            raise LocalProtocolError(f"versions {own} were found, of a cut that was never made")
        self.mirror = Mirror(place=place, ranks=ranks, known=known, first=first, own=own, outlives=outlives)
        self.outlives = outlives
        self.cut = Cut(made=made, parts=ranks, part=place)
        self.older: HeldCut | None = None
        """The holdings of the cut before, while they count."""
        self._given: tuple[tuple[int, int], ...] = ()
        """The parts that others read here while the state is recut, and their digests."""
        self._epoch = NEVER
        """The last one that was entered."""
        self._at = place
        """The place in the last epoch, behind those of its members if this rank had none among them."""
        self.chosen = first
        """The version that the members of the last epoch went on from, whether or not this rank was one."""

    def report(self, known: int) -> HeldCut:
        """Return this rank's report at the start of an epoch; see `Mirror`."""
        return HeldCut(held=self.mirror.report(known), cut=self.cut, older=self.older)

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Take `event` and return the actions. Raises `LocalProtocolError` for one out of place."""
        if self.mirror.state is State.FAILED:
            return []
        actions: list[Action]
        match event:
            case EnteredCut():
                actions = self._enter(event)
            case Resharded():
                actions = self._resharded(event, now_ns)
            case Lent(given=given):
                actions = self._compared(given)
            case _:
                actions = [*self.mirror.handle(event, now_ns=now_ns)]
                if self.older is not None and self.mirror.state is State.COMMITTED:
                    self.older = None
                    actions.append(Forget())
        self.check_invariants()
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of events may reach."""
        self.mirror.check_invariants()
        assert self.older is None or self.older.cut.made < self.cut.made, "what is kept is no older cut"
        if self.mirror.state in (State.HOLDING, State.COPYING, State.COPIED, State.COMMITTED):
            assert (self.cut.parts, self.cut.part) == (self.mirror.ranks, self.mirror.place), "another's part"

    def _enter(self, event: EnteredCut) -> list[Action]:
        ranks, mirror, everyone = len(event.held), self.mirror, (*event.held, *event.beside)
        if mirror.state is not State.WAITING:
            raise LocalProtocolError(f"an epoch was entered in state {mirror.state.value}")
        before, self._epoch = self._epoch, event.epoch
        if len(event.hosts) != ranks or not 0 <= event.place < len(everyone) or event.epoch <= before:
            raise LocalProtocolError(f"{ranks} ranks, with hosts {event.hosts}, in epoch {event.epoch}")
        for one in everyone:
            _require_possible(one)
        number = number_of_cut(everyone, event.epoch)
        cause = LOST_WITH_FILE if self.outlives else LOST_WITH_BUDDY
        choice = choose_cut(event.held, epoch=number, beside=event.beside, cause=cause)
        if isinstance(choice, Lost):
            return [*mirror.fail(choice.reason, lost=True)]
        self.chosen, self._at, every = choice.version, event.place, enumerate(choice.parts)
        here = [(part, found) for part, found in every if found.source.place == event.place]
        self._given = tuple((part, found.source.digest) for part, found in here)
        if event.place >= ranks:  # it has no place, and keeps what it holds: others may need it again
            return [Lend(sources=tuple(found for _, found in here))] if here else []
        actions = self._divide(Cut(made=choice.made, parts=ranks, part=event.place), choice.old)
        mirror.copied = ranks > 1 and not self.outlives
        known = max(one.held.known for one in everyone)
        mirror.take_place(event.place, tuple(range(ranks)), event.hosts, known=known)
        if not choice.parts:
            return [*actions, *mirror.go_on_from(choice.version, choice.sources[event.place])]
        mirror.restore(choice.version)
        return [*actions, Reshard(version=choice.version, sources=choice.parts)]

    def _divide(self, cut: Cut, old: int) -> list[Action]:
        """Hold a part of another cut from now on, and keep what is held of that of epoch `old`, if any."""
        before, older, mirror = self.cut, self.older, self.mirror
        if cut == before:
            return []
        kept, keeps = None, Keeps.NOTHING
        if old == before.made != NEVER:
            kept, keeps = HeldCut(held=mirror.report(0), cut=before), Keeps.OWN
        elif older is not None and older.cut.made == old:
            kept, keeps = older, Keeps.OLDER
        self.cut, self.older = cut, kept
        is_empty = all(one is None for one in (*mirror.own, *mirror.copies))
        mirror.forget()
        if is_empty and keeps is not Keeps.OWN and (cut.parts, cut.part) == (before.parts, before.part):
            return [Forget()] if older is not None and kept is None else []  # the memory there will do
        return [Divide(parts=cut.parts, part=cut.part, keeps=keeps)]

    def _resharded(self, event: Resharded, now_ns: int) -> list[Action]:
        failed = self._compared(event.given)
        return failed or [*self.mirror.handle(zm.Restored(digest=event.digest), now_ns=now_ns)]

    def _compared(self, digests: Sequence[int]) -> list[Action]:
        """Fail if what others read here has not the digests that were voted for."""
        given, self._given = self._given, ()
        if len(given) != len(digests):
            raise LocalProtocolError(f"{len(digests)} digests came, and of {len(given)} sources are wanted")
        for (part, wanted), found in zip(given, digests, strict=True):
            if wanted not in (NO_DIGEST, found):
                reason = (
                    f"part {part} of the state that is recut, which others read at place "
                    f"{self._at}, has digest {found:016x}, and the one voted for {wanted:016x}: "
                    "memory has erred"
                )
                return [*self.mirror.fail(reason, lost=False)]
        return []


def nothing_held(known: int) -> HeldCut:
    """Return the report of a rank that waits, and has not held anything yet."""
    held = Held(own=(None, None), known=known, copies=(None, None))
    return HeldCut(held=held, cut=Cut(made=NEVER, parts=1, part=0))


def _require_possible(one: HeldCut) -> None:
    """Raise `RemoteProtocolError` for a report that no rank can make."""
    if one.older is not None and one.older.cut.made >= one.cut.made:
        raise RemoteProtocolError(f"a rank says that it keeps {one.older.cut} beside an older {one.cut}")
    for bank in (one, one.older):
        if bank is None:
            continue
        cut = bank.cut
        if not 0 <= cut.part < cut.parts or cut.made < NEVER:
            raise RemoteProtocolError(f"a rank says that its state is cut as {cut}")
        if any(copy is not None and not 0 <= copy.ward < cut.parts for copy in bank.held.copies):
            raise RemoteProtocolError("a rank says that it has a copy of a part that there is not")


# ---- capture


def resizing_config(machine: ResizingMirror) -> dict[str, Any]:
    """Return the configuration from which a new `ResizingMirror` like this one is built."""
    mirror = machine.mirror
    return {
        "place": mirror.place,
        "ranks": mirror.ranks,
        "known": mirror.known,
        "first": mirror.first,
        "own": list(mirror.own),
        "made": machine.cut.made,
        "outlives": machine.outlives,
    }


def _build(config: Mapping[str, Any]) -> ResizingMirror:
    first, second = config["own"]
    return ResizingMirror(
        place=config["place"],
        ranks=config["ranks"],
        known=config["known"],
        first=config["first"],
        own=(first, second),
        made=config["made"],
        outlives=config["outlives"],
    )


RESIZING_MIRROR: MachineKind[Event, Action] = register(
    "resizing-mirror", 3, _build, events=Event, actions=Action, states=(ResizingMirror, Mirror)
)
