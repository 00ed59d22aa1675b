"""Invariants of actors on simulated nodes: ledgers that the participants write into.

Each is a checker of what may never be (`check`), and says what is `missing` once all is healed. A fault is
kept, not raised: an exception would only end the actor that sees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.ref import Down, ReasonKind, Ref
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.local import CodeBook
from zbmd.transport.sim import SimProcess, World

FAULTS_MAX: Final = 16

Key: TypeAlias = tuple[str, int, str, int]
"""One incarnation of an actor: as `Ref.key`."""
ProcessKey: TypeAlias = tuple[str, int]
"""One incarnation of a process."""


class Ledger:
    """The base of all."""

    name = "ledger"
    stride = 1

    def __init__(self) -> None:
        self.faults: list[str] = []

    def rule(self, holds: bool, what: str) -> None:
        """Keep what must not be, if it is."""
        if not holds and len(self.faults) < FAULTS_MAX:
            self.faults.append(what)

    def check(self) -> None:
        """Raise `AssertionError` at the first fault."""
        assert not self.faults, self.faults[0]


class Nodes:
    """The incarnations of nodes, and the systems that run in them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._systems: dict[str, tuple[SimProcess, ActorSystem]] = {}
        self._over: set[ProcessKey] = set()

    def began(self, process: SimProcess, system: ActorSystem) -> None:
        """A node has become a member."""
        self._systems[process.name] = (process, system)

    def ended(self, process: SimProcess) -> None:
        """All that the node ran has been ended."""
        self._over.add((process.name, process.incarnation))

    def lives(self, incarnation: ProcessKey) -> bool:
        """Whether anything may still run there."""
        process = self.world.process(incarnation[0])
        return process is not None and process.incarnation == incarnation[1] and incarnation not in self._over

    def living(self) -> Iterator[tuple[SimProcess, ActorSystem]]:
        """All members' systems."""
        for process, system in self._systems.values():
            if self.lives((process.name, process.incarnation)):
                yield process, system

    def system(self, incarnation: ProcessKey) -> ActorSystem | None:
        """That of one incarnation."""
        process, system = self._systems.get(incarnation[0], (None, None))
        is_it = process is not None and process.incarnation == incarnation[1] and self.lives(incarnation)
        return system if is_it else None


class Incarnations(Ledger):
    """Of one name in a process one actor lives at a time, each under a higher incarnation."""

    name = "one life at a time"

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self._nodes = nodes
        self._last: dict[tuple[str, int, str], int] = {}
        self._ended: dict[Key, ReasonKind] = {}

    def born(self, ref: Ref) -> None:
        """An actor runs its first line."""
        key = ref.key()
        before = self._last.get(key[:3], 0)
        self.rule(before < key[3], f"{ref!r} comes after incarnation {before}")
        self.rule(not before or (*key[:3], before) in self._ended, f"{ref!r} has a brother, {before}")
        self._last[key[:3]] = key[3]

    def ended(self, down: Down) -> None:
        """An actor has ended."""
        self._ended[down.ref.key()] = down.reason.kind

    def lives(self, key: Key) -> bool:
        """Whether an actor that was born may handle anything."""
        return key not in self._ended and self._nodes.lives(key[:2])

    def end_of(self, key: Key) -> ReasonKind | None:
        """Return how it ended, if it has; with its process, it was lost."""
        return self._ended.get(key) or (None if self._nodes.lives(key[:2]) else ReasonKind.LOST)


@dataclass(slots=True)
class Conversation:
    """Numbered messages of one sender to one incarnation of an actor, over one link. last: handled."""

    target: Key
    last: int = 0


class Talks(Ledger):
    """Numbers arrive in order, none twice or missing, at the incarnation they were sent to, while it lives.

    An actor remembers what it has handled, over changes of its code: no message is handled by two versions or
    by none. An answer is to what was asked, and to what was handled.
    """

    name = "order, at most once, by one version of one living actor"

    def __init__(self, lives: Incarnations) -> None:
        super().__init__()
        self._lives = lives
        self._sessions: list[Conversation] = []
        self._news: dict[tuple[int, Key], int] = {}

    def begin(self, target: Ref) -> int:
        """A session's number."""
        self._sessions.append(Conversation(target.key()))
        return len(self._sessions) - 1

    def handled(self, ref: Ref, session: int, number: int, sure: int, remembered: int) -> None:
        """An actor is about to be done with a message; until now it remembers to have handled `remembered`.

        sure: the last one before it that was sent for certain.
        """
        talk, what = self._sessions[session], f"{ref!r} at {number} of session {session}"
        self.rule(talk.target == ref.key(), f"{what}: sent to {talk.target}")
        self.rule(self._lives.lives(ref.key()), f"{what}: it had ended")
        self.rule(remembered == talk.last, f"{what}: remembers {remembered}, had handled {talk.last}")
        self.rule(sure <= talk.last < number, f"{what}: comes after {talk.last}, {sure} was sent")
        talk.last = max(number, talk.last)

    def answered(self, session: int, number: int, answer: tuple[int, int], certain: int) -> None:
        """An ask was answered; so many messages before it were handled for certain."""
        last, count = self._sessions[session].last, answer[1]
        what = f"session {session} with {self._sessions[session].target}: {number} was answered with {answer}"
        self.rule(answer[0] == number, what)
        self.rule(last >= number, f"{what}, and was not handled: {last} was")
        self.rule(certain < count <= number, f"{what}, and {certain} were handled before")

    def heard_news(self, ref: Ref, source: int, number: int) -> None:
        """A broadcast has come."""
        before = self._news.get((source, ref.key()), 0)
        self.rule(self._lives.lives(ref.key()), f"{ref!r} gets news, and had ended")
        self.rule(before < number, f"{ref!r} gets the {number}-th news of {source} after the {before}-th")
        self._news[source, ref.key()] = number


class Names(Ledger):
    """In one view a name is one living actor's."""

    name = "a name has one holder in a view"
    stride = 16

    def __init__(self, nodes: Nodes, lives: Incarnations) -> None:
        super().__init__()
        self._nodes, self._lives = nodes, lives
        self._holders: dict[str, dict[Key, None]] = {}
        self._taking: dict[str, dict[ProcessKey, None]] = {}
        """Processes that are about to take a name away."""
        self._taken: dict[str, int] = {}
        self._ever: dict[str, set[Key]] = {}
        """Actors that may have had the name at any time."""
        self._unsure: dict[str, set[Key]] = {}
        """Of these, who may lose it, or have it, without anybody who could tell."""
        self.found: dict[str, dict[ProcessKey, Key | None]] = {}
        """The holder that each process found last."""

    def takes(self, name: str, incarnation: ProcessKey) -> None:
        """Somebody is about to take the name away from whoever has it then."""
        self._taking.setdefault(name, {})[incarnation] = None
        self._taken[name] = self._taken.get(name, 0) + 1
        self._unsure.setdefault(name, set()).update(self._holders.pop(name, ()))

    def took(self, name: str, incarnation: ProcessKey, *, certain: bool) -> None:
        """It has, or will: its word to a holder may still be under way."""
        self._taking.get(name, {}).pop(incarnation, None)
        if not certain:
            self._unsure.setdefault(name, set()).update(self._ever.get(name, ()))

    def asked(self, name: str, ref: Ref) -> int:
        """An actor is about to ask for the name; for `granted`."""
        self._ever.setdefault(name, set()).add(ref.key())
        return self._taken.get(name, 0)

    def granted(self, name: str, ref: Ref, asked: int) -> None:
        """It was given it."""
        for incarnation in [
            incarnation for incarnation in self._taking.get(name, {}) if not self._nodes.lives(incarnation)
        ]:
            self.took(name, incarnation, certain=False)
        safe = not self._taking.get(name) and self._taken.get(name, 0) == asked
        if safe and ref.key() not in self._unsure.get(name, ()):
            self._holders.setdefault(name, {})[ref.key()] = None
        else:
            self.unsure(name, ref)

    def unsure(self, name: str, ref: Ref) -> None:
        """It may have it, or not."""
        self._unsure.setdefault(name, set()).add(ref.key())

    def holders(self, name: str) -> list[Key]:
        """Those who live."""
        return [key for key in self._holders.get(name, ()) if self._lives.lives(key)]

    def check(self) -> None:
        """Look at the holders of each view."""
        super().check()
        for name in self._holders:
            seen: dict[int, Key] = {}
            for key in self.holders(name):
                system = self._nodes.system(key[:2])
                epoch = -1 if system is None else system.open_directory(alone=False).epoch
                other = seen.setdefault(epoch, key)
                assert other == key, f"{name!r} is the name of {key} and of {other}, both in view {epoch}"

    def missing(self) -> str:
        """A name that is not found by all to be its holder's."""
        lives = [(process.name, process.incarnation) for process, _ in self._nodes.living()]
        for name, found in self.found.items():
            if any(incarnation not in found for incarnation in lives):
                return f"not all have looked for {name!r}"
            answers = {found[incarnation] for incarnation in lives}
            holders = self.holders(name)
            if len(answers) > 1 or len(holders) > 1:
                return f"{name!r} is found to be {answers}"
            answer = answers.pop()
            may: set[Key | None] = {*filter(self._lives.lives, self._unsure.get(name, ())), None}
            may = {*holders} or may
            if answer not in may:
                return f"{name!r} is {answer}, and should be of {may}"
        return ""


class Groups(Ledger):
    """Each change of a group is reported once; in the end all know the same members, which all live."""

    name = "each change of a group is reported once"

    def __init__(self, nodes: Nodes, lives: Incarnations) -> None:
        super().__init__()
        self._nodes, self._lives = nodes, lives
        self._joined: dict[str, dict[Key, bool]] = {}
        self.seen: dict[tuple[ProcessKey, str, str], set[Key]] = {}
        """By who watches, group, and how it does."""

    def joined(self, group: str, ref: Ref, is_in: bool | None) -> None:
        """An actor has joined or left; None: one of these."""
        keys = self._joined.setdefault(group, {})
        if is_in is None:
            keys.pop(ref.key(), None)
        else:
            keys[ref.key()] = is_in

    def changed(
        self, incarnation: ProcessKey, group: str, how: str, joined: tuple[Ref, ...], left: tuple[Ref, ...]
    ) -> None:
        """A watcher receives a change."""
        seen = self.seen.setdefault((incarnation, group, how), set())
        for ref in left:
            self.rule(
                ref.key() in seen, f"{incarnation} hears by {how} that {ref!r} left {group}: it was not in"
            )
            seen.discard(ref.key())
        for ref in joined:
            self.rule(
                ref.key() not in seen, f"{incarnation} hears by {how} that {ref!r} joined {group}: it is in"
            )
            seen.add(ref.key())

    def missing(self) -> str:
        """A group that is not known to all as it is."""
        for group, joined in self._joined.items():
            surely = {key for key, is_in in joined.items() if is_in and self._lives.lives(key)}
            left = {key for key, is_in in joined.items() if not is_in}
            for process, system in self._nodes.living():
                incarnation = (process.name, process.incarnation)
                known = {ref.key() for ref in system.open_directory(alone=False).group(group)}
                if not surely <= known or known & left or not all(map(self._lives.lives, known)):
                    return f"{incarnation} knows {known} to be in {group}; {surely} have joined"
                for (watcher, name, how), seen in self.seen.items():
                    if (watcher, name) == (incarnation, group) and seen != known:
                        return f"{incarnation} heard by {how} that {seen} are in {group}, and knows {known}"
        return ""


class Ties(Ledger):
    """An actor that is linked with one that ends, other than normally, ends too."""

    name = "links"

    def __init__(self, lives: Incarnations) -> None:
        super().__init__()
        self._lives = lives
        self._pairs: list[tuple[Key, Key]] = []

    def tie(self, one: Ref, other: Ref) -> None:
        """Two actors are linked."""
        self._pairs.append((one.key(), other.key()))

    def missing(self) -> str:
        """One that lives on alone."""
        for pair in self._pairs:
            for one, other in (pair, pair[::-1]):
                end = self._lives.end_of(one)
                if end not in (None, ReasonKind.NORMAL) and self._lives.lives(other):
                    return f"{other} lives on, linked with {one}, which has ended: {end}"
        return ""


@dataclass(slots=True)
class CodeTrial:
    """One change of code. kept: the answer to its leader; None if there was none. silent: not of all."""

    leader: ProcessKey
    old: type[ActorBase]
    new: type[ActorBase]
    lives: tuple[ProcessKey, ...]
    kept: bool | None = None
    silent: bool = False


class Upgrades(Ledger):
    """A change of code is kept by all that took part and live, or by none; as was answered, if it was."""

    name = "one version"

    def __init__(self, nodes: Nodes) -> None:
        super().__init__()
        self._nodes = nodes
        self.changes: list[CodeTrial] = []
        self.under_way: ProcessKey | None = None

    def missing(self) -> str:
        """Return the first breach."""
        for process, living in self._nodes.living():
            if CodeBook.of(living).on_trial:
                return f"{process}: a version is on probation still"
        last = {incarnation: change for change in self.changes for incarnation in change.lives}
        for change in self.changes:
            runs = {
                incarnation: CodeBook.of(system).newer.get(change.old) is change.new
                for incarnation in change.lives
                if last[incarnation] is change and (system := self._nodes.system(incarnation)) is not None
            }
            if change.kept is False and self._kept_elsewhere(change):
                continue  # who was not in that one has it from the ledger: the trees tell whether all run one
            what = f"{change.old.__name__} to {change.new.__name__} (kept: {change.kept}): {runs}"
            told = change.kept is not None and (not change.silent or self._nodes.lives(change.leader))
            if (told and any(new is not change.kept for new in runs.values())) or len({*runs.values()}) > 1:
                return what
        return ""

    def _kept_elsewhere(self, change: CodeTrial) -> bool:
        """Whether another change from and to the same versions was kept, or may have been."""
        return any(
            other is not change
            and (other.old, other.new) == (change.old, change.new)
            and other.kept is not False
            for other in self.changes
        )
