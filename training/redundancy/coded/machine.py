"""Sans-I/O: parities of what each rank alone holds, and the version that a group rebuilds after a loss.

As in `zbmd.training.redundancy.machine`, but for what protects a version. Every rank keeps parities of blocks
of others (`placement`) in the place of a copy of its ward:

 hold v ──first operation of the next step──▶ all ranks hold v: encode the parities of v (during the passes)
        ──the norm is shared, with votes────▶ all parities of v are whole: v is committed

After a loss all ranks go on from the highest version of which each lost shard is held, or can be rebuilt from
the data and parity shards that are left. Parities count for the failure domains for which they were encoded:
if a replacement came elsewhere, the next step encodes them again. Each rank knows the digests that all voted
for, of shards and of parities: what is rebuilt is compared with what was committed, and parities that are not
what was voted for any more are not used, and encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zbmd.training.redundancy.coded.placement import CodedGroup, fitted, grouped
from zbmd.training.redundancy.holdings import NO_DIGEST, SLOTS, Held
from zbmd.training.redundancy.machine import Action, Event, Lost, Mirror, State
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

Domains = tuple[int, ...]
"""The failure domain of each rank, by place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code of a job: shards of a group, the bytes of the largest state, and of the room for parities."""

    data: int
    parity: int
    nbytes: int
    room: int

    def groups(self, domains: Sequence[int]) -> tuple[CodedGroup, ...]:
        """Return the groups of ranks in these domains."""
        return fitted(
            grouped(domains, data=self.data, parity=self.parity), nbytes=self.nbytes, room=self.room
        )

    def __str__(self) -> str:
        return f"{self.data}+{self.parity}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedHeld:
    """The report of a rank. `held`: its own versions, and those of its parities as copies.

    domains: for which each slot's parities were encoded. digests: of all ranks' shards of the version that is
    known to be committed, if this rank voted then, and voted: of their parities. The copies in `held` have
    the digests of what this rank's parities are now.
    """

    held: Held
    domains: tuple[Domains, Domains] = ((), ())
    digests: tuple[int, ...] = ()
    voted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilding:
    """The version to continue from. lost: places that rebuild their shard; parities: places that have some.

    groups: for which these were encoded. digests: of the shards, `NO_DIGEST` where nobody voted.
    """

    version: int
    lost: tuple[int, ...]
    parities: tuple[int, ...]
    groups: tuple[CodedGroup, ...]
    digests: tuple[int, ...]


def choose(held: Sequence[CodedHeld], code: Code) -> Rebuilding | Lost:
    """Return what all ranks go on from, given their reports, by place: the same on all of them."""
    known = max(one.held.known for one in held)
    versions = {one.held.first for one in held}
    versions |= {version for one in held for version in one.held.own if version is not None}
    fewest: tuple[int, ...] | None = None
    for version in sorted(versions, reverse=True):
        if version < known:
            break
        lost = [place for place, one in enumerate(held) if version not in (one.held.first, *one.held.own)]
        layouts = {()} if not lost else _layouts(held, version)
        for domains in sorted(layouts):
            groups = code.groups(domains)
            voted = next((one.voted for one in held if one.held.known == version and one.voted), ())
            parities = [
                place
                for place, one in enumerate(held)
                if _has(one, version, domains, voted[place] if voted else NO_DIGEST)
            ]
            if all(_is_rebuilt(group, lost, parities) for group in groups if set(group.members) & set(lost)):
                digests = next((one.digests for one in held if one.held.known == version and one.digests), ())
                return Rebuilding(
                    version=version,
                    lost=tuple(lost),
                    parities=tuple(parities),
                    groups=groups,
                    digests=digests or (NO_DIGEST,) * len(held),
                )
        fewest = tuple(lost) if fewest is None or len(lost) < len(fewest) else fewest
    gone = tuple(range(len(held))) if fewest is None else fewest
    return Lost(
        places=gone,
        reason=f"version {known} was committed, and the shards of places {', '.join(map(str, gone))} are "
        f"gone: more than the {code.parity} of {code.data} + {code.parity} that may be lost at once",
    )


def _layouts(held: Sequence[CodedHeld], version: int) -> set[Domains]:
    found = {one.domains[version % SLOTS] for one in held if one.held.copies[version % SLOTS] is not None}
    return {domains for domains in found if len(domains) == len(held)}


def _has(one: CodedHeld, version: int, domains: Domains, voted: int) -> bool:
    """Whether a rank has parities of a version, and those of digest `voted`, if that is known."""
    copy = one.held.copies[version % SLOTS]
    if copy is None or copy.version != version or one.domains[version % SLOTS] != domains:
        return False
    return voted in (NO_DIGEST, copy.digest)


def _is_rebuilt(group: CodedGroup, lost: Sequence[int], parities: Sequence[int]) -> bool:
    """Whether enough shards are left of each stripe that has lost data."""
    for number in range(len(group.members)):
        stripe = group.stripe(number)
        left = sum(place not in lost for place, _ in stripe.data)
        if left < group.data and left + sum(place in parities for place in stripe.parity) < group.data:
            return False
    return True


# ---- an event and an action beside those of `Mirror`


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredCoded:
    """A new epoch: what all ranks hold, by place, and each one's failure domain."""

    held: tuple[CodedHeld, ...]
    domains: Domains


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuild:
    """Rebuild the own shard of `chosen.version`, into slot `version % SLOTS`; answer with `Restored`."""

    chosen: Rebuilding


CodedEvent = Event | EnteredCoded
CodedAction = Action | Rebuild


class CodedMirror(Mirror):
    """The machine of one rank, at `place` of `ranks`. Arguments as of `Mirror`."""

    def __init__(
        self,
        *,
        place: int,
        ranks: int,
        code: Code,
        known: int = 0,
        first: int = 0,
        own: tuple[int | None, int | None] = (None, None),
    ) -> None:
        super().__init__(place=place, ranks=ranks, known=known, first=first, own=own)
        self.code = code
        self.domains: Domains = ()
        """Of this epoch."""
        self.encoded_for: list[Domains] = [(), ()]
        """The domains for which the parities of each slot were encoded."""
        self._digests: tuple[int, tuple[int, ...], tuple[int, ...]] = (0, (), ())
        """The last version that was committed here, and the digests of all shards and parities of it."""

    def handle(self, event: CodedEvent, *, now_ns: int) -> list[Any]:
        """See `Mirror`."""
        if not isinstance(event, EnteredCoded):
            return super().handle(event, now_ns=now_ns)
        if self.state is State.FAILED:
            return []
        actions = self._enter_coded(event)
        self.check_invariants()
        return actions

    def coded_report(self, known: int, found: tuple[int, int] | None = None) -> CodedHeld:
        """Return this rank's report; see `Mirror.report`. found: the digests of its parities now, by slot."""
        held = self.report(known)
        version, digests, voted = self._digests
        if found is not None:
            first, second = (
                None if copy is None else replace(copy, digest=digest)
                for copy, digest in zip(held.copies, found, strict=True)
            )
            held = replace(held, copies=(first, second))
        return CodedHeld(
            held=held,
            domains=(self.encoded_for[0], self.encoded_for[1]),
            digests=digests if version == held.known else (),
            voted=voted if version == held.known else (),
        )

    @property
    def group(self) -> CodedGroup:
        """The group of this rank in this epoch."""
        return next(one for one in self.code.groups(self.domains) if self.place in one.members)

    def _enter_coded(self, event: EnteredCoded) -> list[CodedAction]:
        self._expect(event, State.WAITING)  # type: ignore[arg-type]
        if len(event.held) != self.ranks or len(event.domains) != self.ranks:
            raise LocalProtocolError(f"{len(event.held)} ranks hold a state of {self.ranks}")
        if any(len(each) not in (0, self.ranks) for one in event.held for each in (one.digests, one.voted)):
            raise RemoteProtocolError("a rank reports digests of another number of ranks")
        chosen = choose(event.held, self.code)
        if isinstance(chosen, Lost):
            return [*self.fail(chosen.reason, lost=True)]
        self.known = max(one.held.known for one in event.held)
        self.domains, self._buddies, self.ward = event.domains, tuple(range(self.ranks)), self.place
        slot, now = chosen.version % SLOTS, event.held[self.place].held.copies
        if self.encoded_for[slot] != event.domains or self.copies[slot] != now[slot]:
            self.copies[slot] = None  # to be encoded again, for these domains, or because memory has erred
        if self.place not in chosen.lost:
            return [*self.go_on_from(chosen.version, None)]
        self.restore(chosen.version, chosen.digests[self.place])
        return [Rebuild(chosen=chosen)]

    def _copied(self, digest: int | None) -> list[Action]:
        actions = super()._copied(digest)
        if digest is not None:
            self.encoded_for[self._slot] = self.domains
        return actions

    def _voted(self, votes: tuple[tuple[int, int], ...]) -> list[Action]:
        shards, parities = tuple(own for own, _ in votes), tuple(parity for _, parity in votes)
        actions = super()._voted(tuple((own, own) for own in shards))
        if self.state is not State.FAILED:
            self._digests = self.version, shards, parities
        return actions


def coded_config(machine: CodedMirror) -> dict[str, Any]:
    """Return the configuration from which a new `CodedMirror` like this one is built."""
    code = machine.code
    return {
        "place": machine.place,
        "ranks": machine.ranks,
        "known": machine.known,
        "first": machine.first,
        "own": list(machine.own),
        "code": [code.data, code.parity, code.nbytes, code.room],
    }


def _build(config: Mapping[str, Any]) -> CodedMirror:
    first, second = config["own"]
    data, parity, nbytes, room = config["code"]
    return CodedMirror(
        place=config["place"],
        ranks=config["ranks"],
        known=config["known"],
        first=config["first"],
        own=(first, second),
        code=Code(data=data, parity=parity, nbytes=nbytes, room=room),
    )


CODED_MIRROR: MachineKind[CodedEvent, CodedAction] = register(
    "coded-mirror", 2, _build, events=CodedEvent, actions=CodedAction, states=(CodedMirror,)
)
