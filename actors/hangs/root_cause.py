"""Root causes of hangs: follow what is stuck to what it waits for, and report the roots as text. Sans-I/O.

The wait-for graph of Holt, "Some deadlock properties of computer systems" (1972), over ranks, their
operations and their actors: a node without an edge is a root, and a ring of edges is a deadlock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from zbmd.actors.hangs.wire import Frame, Place, PlaceKind, Position, Standing


def headline(frames: Iterable[Frame]) -> Frame | None:
    """The frame that tells most: the innermost of the user's own, else of a package, else the innermost."""
    chosen: Frame | None = None
    for frame in frames:
        if chosen is None or frame.weight >= chosen.weight:
            chosen = frame
    return chosen


def where(frames: Iterable[Frame]) -> str:
    """`data.py:88 in load_batch`; nothing if there is no frame."""
    frame = headline(frames)
    return "" if frame is None else f"{frame.file}:{frame.line} in {frame.function}"


def stack(frames: Iterable[Frame]) -> tuple[str, ...]:
    """Return a line a frame, outermost first."""
    return tuple(f"{frame.file}:{frame.line} in {frame.function}" for frame in frames)


def duration(ns: int) -> str:
    """`12 s`, or `0.4 s` below ten."""
    return f"{ns / 1e9:.0f} s" if ns >= 10_000_000_000 else f"{ns / 1e9:.1f} s"


def ranks(numbers: Iterable[int]) -> str:
    """`rank 3`, `ranks 0-2`, `ranks 0, 2 and 5-7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"rank {text}" if len(runs) == 1 and len(runs[0]) == 1 else f"ranks {text}"


def name_operation(position: Position) -> str:
    """`all_reduce #17 of epoch 3`, with the channel where it is not the first."""
    channel = f" on channel {position.channel}" if position.channel else ""
    return f"{position.operation} #{position.sequence} of epoch {position.epoch}{channel}"


def describe_place(place: Place) -> str:
    """`rank2/trainer has made no progress for 12 s: handler Train.step, at data.py:88 in load_batch`."""
    at = where(place.frames)
    waits = f", waiting for {place.waits_for}" if place.waits_for else ""
    return (
        f"{place.who} has made no progress for {duration(place.still_ns)}: {place.what}"
        f"{f', at {at}' if at else ''}{waits}"
    )


def stands(place: Place) -> str:
    """`rank3 is at data.py:88 in load_batch (step 41: forward)`."""
    at = where(place.frames)
    what = "" if place.kind is PlaceKind.MAIN else f" ({place.what})"
    still = f", for {duration(place.still_ns)}" if place.still_ns else ""
    return f"{place.who} is at {at}{what}{still}" if at else f"{place.who} is in {place.what}{still}"


LAGGARDS_SHOWN_MAX = 4
WAITERS_SHOWN_MAX = 8
PATHS_MAX = 32
"""From one trouble; what members claim may branch at every step."""
FINDINGS_MAX = 32
"""Of one judgement."""

Trigger = tuple[int, int, str]
"""A rank, its incarnation, and what of it is in trouble."""
SILENT = "silent"


@dataclass(slots=True)
class RankFacts:
    """What is known of a rank. `outside`: how its process looks, if it was looked at; silent: for too long;
    host: which one it runs on, if there are several."""

    rank: int
    incarnation: int
    silent_ns: int = 0
    silent: bool = False
    outside: str = ""
    host: str = ""
    standing: Standing | None = None


@dataclass(slots=True)
class Finding:
    """One root: its key, its report, the ranks to blame, and the troubles that led to it.

    doing: see `Place`.
    """

    key: Hashable
    text: str
    culprits: tuple[tuple[int, int], ...]
    stack: tuple[str, ...]
    ring: bool = False
    evidence: set[Trigger] = field(default_factory=set[Trigger])
    doing: str = ""


@dataclass(frozen=True, slots=True)
class _Node:
    """Something that waits: a place or an operation of a rank, or the rank itself, of which nothing is
    heard."""

    facts: RankFacts = field(compare=False)
    rank: int
    what: str
    place: Place | None = field(default=None, compare=False)
    position: Position | None = field(default=None, compare=False)

    @property
    def culprit(self) -> tuple[int, int]:
        return (self.rank, self.facts.incarnation)


def triggers_of(facts: RankFacts) -> Iterable[Trigger]:
    """Return the standings of a rank that are in trouble."""
    if facts.silent:
        yield (facts.rank, facts.incarnation, SILENT)
        return  # what it said before it fell silent is old
    if facts.standing is None:
        return
    for place in facts.standing.places:
        if place.stuck and place.kind is not PlaceKind.OPERATION:
            yield (facts.rank, facts.incarnation, _place_name(place))
    for position in facts.standing.groups:
        if position.stuck and position.running:
            yield (facts.rank, facts.incarnation, _operation_name(position))


def find_roots(facts: Mapping[int, RankFacts], triggers: Iterable[Trigger]) -> list[Finding]:
    """The root of each trouble, operations first: what they tell is more than what their members tell."""
    graph = _Graph(facts)
    found: dict[Hashable, Finding] = {}
    nodes = [(trigger, graph.node(trigger)) for trigger in sorted(triggers)]
    for trigger, node in sorted(nodes, key=lambda pair: pair[1].position is None):
        for path in graph.paths(node):
            key = graph.key(path)
            if key not in found:
                if len(found) >= FINDINGS_MAX:
                    continue
                found[key] = graph.finding(path)
            found[key].evidence.add(trigger)
    return list(found.values())


def _place_name(place: Place) -> str:
    return f"{place.who}: {place.what}"


def _operation_name(position: Position) -> str:
    # Sub-groups that have no member in common may have a channel in common.
    first = position.members[0] if position.members else 0
    return f"operation {position.channel}/{position.epoch}/{first}/{position.sequence}"


class _Graph:
    def __init__(self, facts: Mapping[int, RankFacts]) -> None:
        self._facts = facts
        self._edges: dict[_Node, list[_Node]] = {}
        self._blocked_by: dict[str, list[int]] = {}
        self._actors: dict[str, _Node] = {}
        for known in facts.values():
            for place in self._places(known):
                if place.kind is PlaceKind.HANDLER:
                    self._actors[place.who] = self._at(known, place)

    def node(self, trigger: Trigger) -> _Node:
        """Return where the trouble of a trigger is."""
        facts, what = self._facts[trigger[0]], trigger[2]
        for place in self._places(facts):
            if _place_name(place) == what:
                return self._at(facts, place)
        for position in self._positions(facts):
            if _operation_name(position) == what:
                return _Node(facts, facts.rank, what, position=position)
        return _Node(facts, facts.rank, SILENT)

    def paths(self, start: _Node) -> list[list[_Node]]:
        """From `start` along all edges to each root; a path whose last node is in it twice is a ring."""
        found: list[list[_Node]] = []
        open_paths = [[start]]
        while open_paths and len(found) < PATHS_MAX:
            path = open_paths.pop(0)
            last = path[-1]
            if last not in self._edges:
                self._edges[last] = self._nexts(last)
            nexts = [] if last in path[:-1] else self._edges[last]
            if not nexts:
                found.append(path)
            open_paths += [[*path, node] for node in nexts[:LAGGARDS_SHOWN_MAX]]
            del open_paths[PATHS_MAX:]
        return found

    def key(self, path: list[_Node]) -> Hashable:
        """Return the key that identifies a root cause."""
        last = path[-1]
        if last in path[:-1]:
            ring = path[path.index(last) : -1]
            return frozenset((node.rank, node.facts.incarnation, node.what) for node in ring)
        return last.what if last.position is not None else (last.rank, last.facts.incarnation, last.what)

    def finding(self, path: list[_Node]) -> Finding:
        """Return the report of the root at the end of a path."""
        last = path[-1]
        if last in path[:-1]:
            return self._ring(self.key(path), path[path.index(last) : -1])
        blamed = last.position is None
        parts = self._held_up(last) if blamed else []
        parts.append(self._root(last, first=len(path) == 1))
        asking = self._asking(last)
        if asking:
            verb = "waits" if len(asking) == 1 else "wait"
            parts.append(f"{' and '.join(asking[:WAITERS_SHOWN_MAX])} {verb} for it")
        return Finding(
            key=self.key(path),
            text="; ".join(parts),
            culprits=(last.culprit,) if blamed else (),
            stack=stack(last.place.frames) if last.place is not None else (),
            doing="" if last.place is None else last.place.doing,
        )

    def _held_up(self, root: _Node) -> list[str]:
        """Return a description of each operation that waits for the rank of the root."""
        waiting = {
            _operation_name(position): position
            for facts in self._facts.values()
            for position in self._positions(facts)
            if position.running and position.still_ns > 0 and root.rank in self._blockers(position)
        }
        return [self._operation(position) for position in waiting.values()]

    def _asking(self, root: _Node) -> list[str]:
        """Return the askers that wait for a reply of the root, or of any actor of a silent rank."""
        if root.place is not None and root.place.kind is PlaceKind.HANDLER:
            wanted = {root.place.who}
        else:
            wanted = {f"rank{root.rank}"}
        return sorted(
            place.who
            for facts in self._facts.values()
            for place in self._places(facts)
            if {place.waits_for, place.waits_for.partition("/")[0]} & wanted
        )

    def _ring(self, key: Hashable, ring: list[_Node]) -> Finding:
        parts = [self._link(node, ring[(i + 1) % len(ring)]) for i, node in enumerate(ring)]
        still_ns = max((n.place.still_ns for n in ring if n.place is not None), default=0)
        first = next((n.place for n in ring if n.place is not None), None)
        return Finding(
            key=key,
            text=f"a deadlock for {duration(still_ns)}: {', '.join(parts)}",
            culprits=tuple(sorted({node.culprit for node in ring})),
            stack=() if first is None else stack(first.frames),
            ring=True,
        )

    def _link(self, node: _Node, following: _Node) -> str:
        target = f"rank {following.rank}" if following.place is None else following.place.who
        if node.place is not None:
            at = where(node.place.frames)
            return f"{node.place.who} ({node.place.what}{f', at {at}' if at else ''}) waits for {target}"
        what = node.what if node.position is None else name_operation(node.position)
        return f"rank {node.rank} ({what}) waits for {target}"

    def _nexts(self, node: _Node) -> list[_Node]:
        if node.position is not None:
            return [self._standing_of(self._facts[rank]) for rank in self._blockers(node.position)]
        if node.place is None:
            return []
        if not node.place.waits_for:
            return self._operations_of(node)
        target = self._actors.get(node.place.waits_for)
        if target is not None:
            return [target]
        # It handles nothing, so it has not got the message: what keeps its process from that?
        process = node.place.waits_for.partition("/")[0]
        facts = next((f for f in self._facts.values() if f"rank{f.rank}" == process), None)
        if facts is None:
            return []
        if facts.silent or facts.outside:
            return [_Node(facts, facts.rank, SILENT)]
        return [self._at(facts, p) for p in self._places(facts) if p.kind is PlaceKind.LOOP]

    def _operations_of(self, node: _Node) -> list[_Node]:
        """Return the stuck operation of the same rank for which its current work waits."""
        return [
            _Node(node.facts, node.rank, _operation_name(position), position=position)
            for position in self._positions(node.facts)
            if position.running and position.stuck
        ]

    def _standing_of(self, facts: RankFacts) -> _Node:
        """Return the standing that most likely keeps a rank from what the others wait for."""
        if facts.silent or facts.outside or facts.standing is None:
            return _Node(facts, facts.rank, SILENT)
        for position in facts.standing.groups:
            if position.running and position.still_ns > 0:
                return _Node(facts, facts.rank, _operation_name(position), position=position)
        order = (PlaceKind.LOOP, PlaceKind.ACTIVITY, PlaceKind.MAIN, PlaceKind.HANDLER)
        places = [p for p in facts.standing.places if p.kind in order]
        if not places:
            places = [Place(PlaceKind.MAIN, f"rank{facts.rank}", "nothing that waits", 0, stuck=False)]
        return self._at(facts, min(places, key=lambda place: order.index(place.kind)))

    def _blockers(self, position: Position) -> list[int]:
        """The members that keep an operation from going on: laggards, or those that have stopped inside."""
        name = _operation_name(position)
        if name not in self._blocked_by:
            known = [self._facts[rank] for rank in position.members if rank in self._facts]
            stopped = [facts.rank for facts in known if facts.silent or facts.outside]
            self._blocked_by[name] = self._laggards(position) or stopped
        return self._blocked_by[name]

    def _laggards(self, position: Position) -> list[int]:
        """Return the members, of those known here, that have not entered the operation."""
        return [
            rank
            for rank in position.members
            if rank in self._facts and not self._entered(self._facts[rank], position)
        ]

    def _entered(self, facts: RankFacts, position: Position) -> bool:
        return any(
            known.channel == position.channel
            and (known.epoch, known.sequence) >= (position.epoch, position.sequence)
            for known in self._positions(facts, even_if_silent=True)
        )

    def _operation(self, position: Position) -> str:
        """`rank 3 never entered all_reduce #17 of epoch 2; ranks 0-2 wait in it for 12 s`."""
        inside = [
            (facts.rank, known.still_ns)
            for facts in self._facts.values()
            for known in self._positions(facts)
            if known.running and _operation_name(known) == _operation_name(position)
        ]
        waiting = ranks(rank for rank, _ in inside)
        verb = "waits" if len(inside) == 1 else "wait"
        longest = duration(max(still_ns for _, still_ns in inside))
        laggards = self._laggards(position)
        if not laggards:
            return f"{waiting} {verb} in {name_operation(position)} for {longest}"
        return (
            f"{self._named(laggards)} never entered {name_operation(position)}; "
            f"{waiting} {verb} in it for {longest}"
        )

    def _named(self, numbers: Iterable[int]) -> str:
        """`rank 3 on host b`, or `ranks 0-1 on host a and rank 3 on host b`."""
        by_host: dict[str, list[int]] = {}
        for rank in sorted(numbers):
            known = self._facts.get(rank)
            by_host.setdefault("" if known is None else known.host, []).append(rank)
        parts = [f"{ranks(those)} on {host}" if host else ranks(those) for host, those in by_host.items()]
        return " and ".join(parts)

    def _root(self, node: _Node, *, first: bool) -> str:
        if node.position is not None:
            elsewhere = [rank for rank in node.position.members if rank not in self._facts]
            text = f"{name_operation(node.position)} makes no progress for {duration(node.position.still_ns)}"
            if elsewhere:
                return f"{text}: all members of this host are in it; {ranks(elsewhere)} cannot be seen here"
            return f"{text}, although all its members have entered it"
        if node.place is not None:
            text = describe_place(node.place) if first or node.place.stuck else stands(node.place)
            return f"{text}, on {node.facts.host}" if first and node.facts.host else text
        seen = node.facts.outside or "does not answer"
        return f"{self._named([node.rank])} {seen}, for {duration(node.facts.silent_ns)}"

    @staticmethod
    def _at(facts: RankFacts, place: Place) -> _Node:
        return _Node(facts, facts.rank, _place_name(place), place=place)

    @staticmethod
    def _places(facts: RankFacts) -> tuple[Place, ...]:
        return () if facts.standing is None or facts.silent else facts.standing.places

    @staticmethod
    def _positions(facts: RankFacts, *, even_if_silent: bool = False) -> tuple[Position, ...]:
        if facts.standing is None or (facts.silent and not even_if_silent):
            return ()
        return facts.standing.groups
