"""The machine that names stragglers and causes, pure, over the samples of all ranks of each step.

Every rank runs it over the same numbers, which travel with the losses of a step, so all come to the same
decision at the same step, without a message more. It begins again in each view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final, TypeAlias, assert_never

import numpy as np

from zbmd.training.job.stragglers.links import FAR, KNOWN, RECENT, Pair, SlowLinks, Trips
from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS, Field
from zbmd.training.job.stragglers.scores import (
    PAST,
    PEERS,
    THRESHOLD,
    Floats,
    Scores,
    lower_median,
)
from zbmd.transport.errors import LocalProtocolError

WARM_UP_STEPS: Final = 3
"""Of each view: plans, files and memory are made in them."""
GATHER_NS: Final = 60e6
"""Shorter steps are judged several at a time, as one: a judgement costs 0.12 ms."""
PART_MIN: Final = 0.4
"""Evidence that is at least so much of an excess is its explanation."""
ROUND_TRIP_MIN_US: Final = 200.0


class Cause(Enum):
    """The cause of a rank's slowness."""

    COMPUTE = "compute"
    DATA = "data"
    RUNTIME = "runtime"
    """Garbage collection, the event loop, or other threads of the rank."""
    CHECKPOINT = "checkpoint"
    LINK = "link"


_ROWS: Final = (
    Cause.COMPUTE,
    Cause.COMPUTE,
    Cause.DATA,
    Cause.RUNTIME,
    Cause.CHECKPOINT,
    Cause.LINK,
)
"""Of the scores. The first is what its own work takes, the second what it waits for a processor meanwhile: on
a machine with much other load the second varies more, and hides nothing of the first."""
_CONTENDED: Final = 1
_BY_LINK: Final = _ROWS.index(Cause.LINK)
TIMES: Final = [Field.PASSES, Field.UPDATE, Field.DATA, Field.CHECKPOINT, Field.WAIT]
"""Together the time of a step."""
_LOST: Final = (Field.DELAY, Field.STEAL, Field.THROTTLED)
_UNREST: Final = {Cause.COMPUTE: 2.0, Cause.RUNTIME: 2.0, Cause.DATA: 1.0, Cause.CHECKPOINT: 1.0}
_BY_UNREST: Final = np.array([[_UNREST.get(cause, 0.0)] for cause in _ROWS])
"""Where even the half of the ranks that lose least lose time to others, chance decides who loses more of it
for some seconds: the noise of what needs a processor is taken for so many times what they lose, at least."""
_LAST: Final = [Field.INCARNATION, Field.OWN_END, Field.PEER_END]
"""Numbers that are no sums over steps."""
_EVIDENCE: Final = (Field.STEAL, Field.THROTTLED, Field.OTHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A view begins. ranks: its members; shards: the logical shards of each; alike: equal where work is.

    hosts: the name or address of each rank's host; empty: they have none.
    """

    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    alike: tuple[int, ...]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step has ended. samples: (ranks, `SAMPLE_NUMBERS`) of the step before, in the order of members."""

    step: int
    samples: Floats


@dataclass(frozen=True, slots=True)
class Moved:
    """Logical shards have moved between ranks. shards: of each member."""

    shards: tuple[int, ...]


StragglerEvent: TypeAlias = Entered | Stepped | Moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A rank is slow. factor: its working time of late, beside what is usual; incarnation: of the rank.

    past: whether it is slow beside its own past; peers: beside ranks with equal work. together: all ranks
    whose links are slow at once, of which `rank` is the first: between two hosts neither end differs from
    the other. Empty of a rank that is slow by itself. link: the text that names one link between two of many
    hosts, whose ends are `together`; empty otherwise.
    """

    step: int
    rank: int
    incarnation: int
    cause: Cause
    factor: float
    evidence: str
    past: bool
    peers: bool
    together: tuple[int, ...] = ()
    link: str = ""

    @property
    def text(self) -> str:
        """Return the report for people."""
        if self.together:
            return (
                f"{_links_of(self.together, self.link)} slow: a step takes {self.factor:.2f} times as long "
                f"as before; cause {self.cause.value}: {self.evidence}"
            )
        usual = {(True, False): "its own past", (False, True): "its peers"}.get(
            (self.past, self.peers), "its own past and its peers"
        )
        return (
            f"rank {self.rank} is slow: it works {self.factor:.2f} times as long as {usual}; cause "
            f"{self.cause.value}: {self.evidence}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """A rank that was named is no longer slow for this cause."""

    step: int
    rank: int
    cause: Cause
    together: tuple[int, ...] = ()
    link: str = ""
    """As of `Named`."""

    @property
    def text(self) -> str:
        """Return the report for people."""
        if self.together:
            return f"{_links_of(self.together, self.link)} no longer slow (cause {self.cause.value})"
        return f"rank {self.rank} is no longer slow (cause {self.cause.value})"


StragglerAction: TypeAlias = Named | Cleared


def _links_of(ranks: Sequence[int], link: str) -> str:
    if link:
        return f"{link} is"
    few, more = ", ".join(map(str, ranks[:8])), len(ranks) - 8
    return f"all links between hosts (of ranks {few}{f' and {more} more' if more > 0 else ''}) are"


class StragglerMachine:
    """Names stragglers, each once for a cause, and clears them."""

    def __init__(self) -> None:
        self._entered = Entered(ranks=(), shards=(), alike=())
        self._scores: Scores | None = None
        self._links, self._together = SlowLinks(0), tuple[int, ...]()
        """Finds links that are slow at both ends; and the ranks that are named for all of them."""
        self._pairs: dict[Pair, Named] = {}
        """Links between two of many hosts that are named."""
        self._seen = self._judged = 0
        self._named: dict[tuple[int, int], Cause] = {}
        """By place and row."""
        self._usual: Floats = np.zeros((0, 0))
        self._late: Floats = np.zeros((0, 0))
        self._lost: Floats = np.zeros(0)
        """Time of a step that each rank lost of late to other processes, the hypervisor and quotas."""
        self._gathered: list[Floats] = []
        """Samples of steps that are not judged yet."""
        self._gathered_ns = 0.0
        self._at_once = 1
        """Steps that were judged last."""

    def handle(self, event: StragglerEvent) -> list[StragglerAction]:
        """Take an event; return what is to be reported. Raises `LocalProtocolError` for one out of order."""
        match event:
            case Entered():
                self._enter(event)
                return []
            case Moved():
                if len(event.shards) != len(self._entered.ranks):
                    raise LocalProtocolError("expected the shards of each member of the view")
                self._entered = replace(self._entered, shards=event.shards)
                self._forget_gathered()
                return []
            case Stepped():
                return self._step(event)
            case _:
                assert_never(event)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a state contradicts itself."""
        ranks = len(self._entered.ranks)
        assert len(self._entered.shards) == len(self._entered.alike) == ranks
        assert all(0.0 <= score <= THRESHOLD for score in (self._links.score, *self._links.pairs.values()))
        assert self._pairs.keys() <= self._links.pairs.keys()
        assert all(place < ranks and row < len(_ROWS) for place, row in self._named)
        if self._scores is not None:
            sums = self._scores.sums
            assert np.isfinite(sums).all() and (sums >= 0).all() and (sums <= THRESHOLD).all()

    @property
    def scores(self) -> Floats:
        """Return (2, causes, ranks): beside its past and its peers, from 0 to 1, which is an alarm."""
        ranks = len(self._entered.ranks)
        return np.zeros((2, len(_ROWS), ranks)) if self._scores is None else self._scores.sums / THRESHOLD

    def _enter(self, event: Entered) -> None:
        self._entered, self._seen, self._judged, self._named = event, 0, 0, {}
        by_work: dict[tuple[int, ...], list[int]] = {}
        for place, key in enumerate(event.alike):
            by_work.setdefault((key,), []).append(place)
        ranks = len(event.ranks)
        alone = ranks < 2  # nobody waits for it
        self._scores = None if alone else Scores((len(_ROWS), ranks), tuple(map(tuple, by_work.values())))
        self._links, self._together, self._pairs = SlowLinks(ranks), (), {}
        self._usual = np.zeros((len(_EVIDENCE), ranks))
        self._late = np.zeros((len(_EVIDENCE), ranks))
        self._lost = np.zeros(ranks)
        self._forget_gathered()

    def _forget_gathered(self) -> None:
        self._gathered, self._gathered_ns = [], 0.0

    def _gather(self, samples: Floats) -> Floats | None:
        """Take the samples of a step; return the sum of those that are to be judged, None if too few."""
        self._gathered.append(samples)
        self._gathered_ns += float(samples[:, TIMES].sum(axis=1).max())
        if self._gathered_ns < GATHER_NS:
            return None
        found: Floats = np.sum(self._gathered, axis=0)
        self._at_once = len(self._gathered)
        found[:, [Field.ROUND_TRIP, Field.LONGEST_TRIP]] /= self._at_once
        found[:, _LAST] = samples[:, _LAST]
        self._forget_gathered()
        return found

    def _step(self, event: Stepped) -> list[StragglerAction]:
        scores, ranks = self._scores, len(self._entered.ranks)
        if event.samples.shape != (ranks, SAMPLE_NUMBERS):
            raise LocalProtocolError(f"expected samples of {ranks} ranks, got {event.samples.shape}")
        if scores is None or not event.samples[:, Field.KNOWN].all() or not np.isfinite(event.samples).all():
            return []
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return []
        judged = self._gather(event.samples)
        if judged is None:
            return []
        event, samples = Stepped(event.step, judged), judged.T
        self._lost += (samples[list(_LOST)].sum(axis=0) - self._lost) * RECENT
        unrest_ns = _BY_UNREST * float(lower_median(self._lost)[0])
        trips = Trips(*samples[[Field.ROUND_TRIP, Field.LONGEST_TRIP, Field.OWN_END, Field.PEER_END]])
        slow = self._links.slow_pairs(trips)
        costs = self._costs(samples)
        # A slow link may have been the only fast one of its ends: that is no slow cable.
        costs[_BY_LINK, np.isin(trips.own, [end for pair in slow for end in pair])] = 0.0
        sums = scores.take(costs, unrest_ns).max(axis=0)
        self._weigh(samples[list(_EVIDENCE)], calm=not self._named and bool(sums.max() < THRESHOLD / 3))
        actions: list[StragglerAction] = []
        for row, place in np.argwhere(sums >= THRESHOLD).tolist():
            if (place, row) not in self._named:
                actions.append(self._name(event, scores, row, place))
        for place, row in [key for key in self._named if not sums[key[1], key[0]]]:
            cause = self._named.pop((place, row))
            actions.append(Cleared(step=event.step, rank=self._entered.ranks[place], cause=cause))
        step_ns = float(lower_median(scores.step_ns[0])[0])
        self._links.take(trips, slow, float(samples[Field.WAIT].min()), step_ns)
        return actions + self._judge_links(event, trips)

    def _judge_links(self, event: Stepped, trips: Trips) -> list[StragglerAction]:
        """Name all links between hosts together, or one between two of many hosts, or clear them."""
        links = self._links
        actions: list[StragglerAction] = []
        if links.score >= THRESHOLD and not self._together:
            places = np.flatnonzero(trips.least > 0).tolist()
            self._together = tuple(self._entered.ranks[place] for place in places)
            evidence = (
                f"round trips take {np.median(trips.least[places]):.0f} us, where they took "
                f"{links.usual_us:.0f} us"
            )
            actions.append(self._name_links(event, places, links.excess_ns, evidence))
        elif not links.score and self._together:
            together, self._together = self._together, ()
            actions.append(Cleared(step=event.step, rank=together[0], cause=Cause.LINK, together=together))
        for pair, score in links.pairs.items():
            if score >= THRESHOLD and pair not in self._pairs:
                named = self._pairs[pair] = self._name_pair(event, pair, trips)
                actions.append(named)
        for pair in [pair for pair in self._pairs if pair not in links.pairs]:
            was = self._pairs.pop(pair)
            actions.append(
                Cleared(
                    step=event.step, rank=was.rank, cause=Cause.LINK, together=was.together, link=was.link
                )
            )
        return actions

    def _name_pair(self, event: Stepped, pair: Pair, trips: Trips) -> Named:
        ends = sorted(self._links.ends_of(pair, trips))
        ranks, hosts = self._entered.ranks, self._entered.hosts
        first, other = (f"{hosts[end] if hosts else 'a host'} (rank {ranks[end]})" for end in ends)
        others = trips.least[trips.least > 0]
        evidence = (
            f"{trips.most[ends].min() / 1e3:.1f} ms for a round trip, where others take "
            f"{np.median(others) / 1e3:.1f} ms"
        )
        link = f"the link between {first} and {other}"
        return self._name_links(event, ends, self._links.excess_of_pairs_ns, evidence, link)

    def _name_links(
        self, event: Stepped, places: Sequence[int], more_ns: float, evidence: str, link: str = ""
    ) -> Named:
        whole_ns = float(event.samples[:, TIMES].sum(axis=1).max())
        return Named(
            step=event.step,
            rank=self._entered.ranks[places[0]],
            incarnation=int(event.samples[places[0], Field.INCARNATION]),
            cause=Cause.LINK,
            factor=whole_ns / max(whole_ns - more_ns, 1.0),
            evidence=f"{evidence}, and a step {more_ns / 1e6 / self._at_once:.1f} ms more",
            past=True,
            peers=False,
            together=tuple(self._entered.ranks[place] for place in places),
            link=link,
        )

    def _costs(self, samples: Floats) -> Floats:
        """Return what each cause took each rank, (causes, ranks), in ns, for the same number of shards."""
        shards = np.array(self._entered.shards, float)
        even = np.where(shards > 0, shards.mean() / np.maximum(shards, 1), 1.0)
        both, delay = samples[Field.PASSES] + samples[Field.UPDATE], samples[Field.DELAY]
        of_passes = samples[Field.PASSES] / np.maximum(both, 1.0)
        passes = (samples[Field.PASSES] - np.minimum(delay * of_passes, samples[Field.PASSES])) * even
        update = samples[Field.UPDATE] - np.minimum(delay * (1 - of_passes), samples[Field.UPDATE])
        trips = samples[Field.ROUND_TRIP]
        linked = trips[trips > 0]  # of a rank without links it is 0, which is no short one
        usual = float(lower_median(linked)[0]) if len(linked) else 0.0
        ratio = trips / max(usual, ROUND_TRIP_MIN_US)
        blame = np.clip((ratio - FAR) / FAR, 0.0, 1.0)
        return np.stack(
            [
                passes + update,
                np.minimum(delay, both) * even,
                samples[Field.DATA],
                samples[Field.COLLECTOR],
                samples[Field.CHECKPOINT],
                samples[Field.WAIT].min() * blame,  # what even the last rank to come waits for
            ]
        )

    def _weigh(self, found: Floats, *, calm: bool) -> None:
        self._judged += 1
        first = self._judged == 1
        self._late += (found - self._late) * (1.0 if first else RECENT)
        if first or calm:
            weight = max(KNOWN, 1 / self._judged)
            self._usual += (found - self._usual) * weight

    def _name(self, event: Stepped, scores: Scores, row: int, place: int) -> Named:
        both = scores.sums[:, row, place] >= THRESHOLD
        excess = float(scores.excess[:, row, place][both].max())
        more_ns = excess * float(scores.step_ns[0, place])
        cause, evidence = self._explained(row, more_ns, event, place)
        self._named[place, row] = cause
        return Named(
            step=event.step,
            rank=self._entered.ranks[place],
            incarnation=int(event.samples[place, Field.INCARNATION]),
            cause=cause,
            factor=1.0 + more_ns / float(scores.own_ns[0, place]),
            evidence=evidence,
            past=bool(both[PAST]),
            peers=bool(both[PEERS]),
        )

    def _explained(self, row: int, more_ns: float, event: Stepped, place: int) -> tuple[Cause, str]:
        cause, per_ms = _ROWS[row], 1e6 * self._at_once
        more_ms = more_ns / per_ms
        if cause is not Cause.COMPUTE:
            return cause, self._plain_words(cause, more_ms, event, place)
        usual = np.minimum(self._usual[:, place], np.delete(self._late, place, axis=1).min(axis=1))
        grown = self._late[:, place] - usual
        steal_ns, throttled_ns, others_ns = grown.tolist()
        least_ns = PART_MIN * more_ns
        if throttled_ns >= least_ns:
            return cause, f"the quota of its cgroup is used up for {throttled_ns / per_ms:.1f} ms a step more"
        if row == _CONTENDED:
            return cause, f"another process has its processor for {more_ms:.1f} ms a step more"
        if steal_ns >= least_ns:
            return (
                cause,
                f"the hypervisor takes its processor (steal) for {steal_ns / per_ms:.1f} ms a step more",
            )
        if others_ns >= least_ns:
            took = f"{others_ns / per_ms:.1f} ms a step more"
            return Cause.RUNTIME, f"its event loop or other threads of its own compute for {took}"
        return cause, (
            f"its passes and updates take {more_ms:.1f} ms a step more, and no other process, quota or "
            "hypervisor took that: its processor or memory is slower, or it is stopped now and then"
        )

    def _plain_words(self, cause: Cause, more_ms: float, event: Stepped, place: int) -> str:
        if cause is Cause.LINK:
            trips: Sequence[float] = event.samples[:, Field.ROUND_TRIP].tolist()
            usual = float(np.median(trips))
            return (
                f"its connections' round trips take {trips[place]:.0f} us, where others' take {usual:.0f} us"
            )
        words = {
            Cause.DATA: "it waits for its batches",
            Cause.RUNTIME: "garbage collection takes",
            Cause.CHECKPOINT: "checkpoints hold it up for",
        }[cause]
        return f"{words} {more_ms:.1f} ms a step more"
