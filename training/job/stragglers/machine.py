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

from zbmd.training.job.stragglers.samples import SAMPLE_NUMBERS, Field
from zbmd.training.job.stragglers.scores import (
    PAST,
    PAST_MIN,
    PEERS,
    QUIET,
    SHIFT,
    STEPS_MIN,
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
RECENT: Final = 1 / STEPS_MIN
KNOWN: Final = 1 / 64
"""The weight of the last step in the means of evidence: of late, and while no rank is suspected."""
FAR: Final = 2.0
"""A round trip that is so many times that of other ranks, and more than this in us, blames the link."""
ROUND_TRIP_MIN_US: Final = 200.0
SHARED_MIN_US: Final = 500.0
"""The least usual round trip that all links together are compared with: load of the hosts alone lengthens
one."""


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
TIMES: Final = [Field.PASSES, Field.UPDATE, Field.DATA, Field.CHECKPOINT, Field.WAIT]
"""Together the time of a step."""
_LOST: Final = (Field.DELAY, Field.STEAL, Field.THROTTLED)
_UNREST: Final = {Cause.COMPUTE: 2.0, Cause.RUNTIME: 2.0, Cause.DATA: 1.0, Cause.CHECKPOINT: 1.0}
_BY_UNREST: Final = np.array([[_UNREST.get(cause, 0.0)] for cause in _ROWS])
"""Where even the half of the ranks that lose least lose time to others, chance decides who loses more of it
for some seconds: the noise of what needs a processor is taken for so many times what they lose, at least."""
_EVIDENCE: Final = (Field.STEAL, Field.THROTTLED, Field.OTHERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A view begins. ranks: its members; shards: the logical shards of each; alike: equal where work is."""

    ranks: tuple[int, ...]
    shards: tuple[int, ...]
    alike: tuple[int, ...]


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
    the other. Empty of a rank that is slow by itself.
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

    @property
    def text(self) -> str:
        """Return the report for people."""
        if self.together:
            return (
                f"{_links_of(self.together)} slow: a step takes {self.factor:.2f} times as long as before; "
                f"cause {self.cause.value}: {self.evidence}"
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
    """As of `Named`."""

    @property
    def text(self) -> str:
        """Return the report for people."""
        if self.together:
            return f"{_links_of(self.together)} no longer slow (cause {self.cause.value})"
        return f"rank {self.rank} is no longer slow (cause {self.cause.value})"


StragglerAction: TypeAlias = Named | Cleared


def _links_of(ranks: Sequence[int]) -> str:
    few, more = ", ".join(map(str, ranks[:8])), len(ranks) - 8
    return f"all links between hosts (of ranks {few}{f' and {more} more' if more > 0 else ''}) are"


class _SharedLinks:
    """Finds links that are slow at both ends, so that no rank is slower than its peers.

    All round trips between hosts are far above what they were, and the last rank to come waits longer than it
    did. Either alone blames nothing: a busy host answers late, and waits have other causes.
    """

    def __init__(self, ranks: int) -> None:
        self._trips: Floats = np.zeros(ranks)
        self._wait_ns = 0.0
        self._judged = 0
        self.score = 0.0
        """Up to `THRESHOLD`."""
        self.excess_ns = self.usual_us = 0.0
        """Of late: the time of a judged step beyond the usual one; and the usual round trip."""

    def take(self, trips: Floats, wait_ns: float, step_ns: float) -> None:
        """Take a judged step. trips: us, 0 of a rank without links; wait_ns: of whoever waited least."""
        self._judged += 1
        linked = (trips > 0) & (self._trips > 0)
        usual = np.maximum(self._trips[linked], SHARED_MIN_US)
        far = float(np.clip((trips[linked] / usual - FAR) / FAR, 0.0, 1.0).min(initial=1.0))
        cost_ns = (wait_ns - self._wait_ns) * (far if linked.sum() > 1 else 0.0)
        if self._judged > PAST_MIN:
            more = THRESHOLD / STEPS_MIN * (1.0 if cost_ns > SHIFT * step_ns else -1.0)
            self.score = min(max(self.score + more, 0.0), THRESHOLD)
        self.excess_ns += (cost_ns - self.excess_ns) * RECENT
        if self.score < QUIET:
            weight = max(KNOWN, 1 / self._judged)
            known = np.where(self._trips > 0, self._trips + (trips - self._trips) * weight, trips)
            self._trips = np.where(trips > 0, known, self._trips)
            self._wait_ns += (wait_ns - self._wait_ns) * weight
            self.usual_us = float(np.median(self._trips[self._trips > 0])) if self._trips.any() else 0.0


class StragglerMachine:
    """Names stragglers, each once for a cause, and clears them."""

    def __init__(self) -> None:
        self._entered = Entered(ranks=(), shards=(), alike=())
        self._scores: Scores | None = None
        self._links, self._together = _SharedLinks(0), tuple[int, ...]()
        """Finds links that are slow at both ends; and the ranks that are named for them."""
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
        assert 0.0 <= self._links.score <= THRESHOLD
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
        self._links, self._together = _SharedLinks(ranks), ()
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
        found[:, Field.ROUND_TRIP] /= self._at_once
        found[:, Field.INCARNATION] = samples[:, Field.INCARNATION]
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
        sums = scores.take(self._costs(samples), unrest_ns).max(axis=0)
        self._weigh(samples[list(_EVIDENCE)], calm=not self._named and bool(sums.max() < THRESHOLD / 3))
        actions: list[StragglerAction] = []
        for row, place in np.argwhere(sums >= THRESHOLD).tolist():
            if (place, row) not in self._named:
                actions.append(self._name(event, scores, row, place))
        for place, row in [key for key in self._named if not sums[key[1], key[0]]]:
            cause = self._named.pop((place, row))
            actions.append(Cleared(step=event.step, rank=self._entered.ranks[place], cause=cause))
        return actions + self._judge_links(event, samples, scores)

    def _judge_links(self, event: Stepped, samples: Floats, scores: Scores) -> list[StragglerAction]:
        """Name all links between hosts together, or clear them."""
        links, trips = self._links, samples[Field.ROUND_TRIP]
        links.take(trips, float(samples[Field.WAIT].min()), float(lower_median(scores.step_ns[0])[0]))
        if links.score >= THRESHOLD and not self._together:
            places = np.flatnonzero(trips > 0).tolist()
            self._together = tuple(self._entered.ranks[place] for place in places)
            whole_ns = float(samples[TIMES].sum(axis=0).max())
            named = Named(
                step=event.step,
                rank=self._together[0],
                incarnation=int(samples[Field.INCARNATION, places[0]]),
                cause=Cause.LINK,
                factor=whole_ns / max(whole_ns - links.excess_ns, 1.0),
                evidence=f"round trips take {np.median(trips[places]):.0f} us, where they took "
                f"{links.usual_us:.0f} us, and a step {links.excess_ns / 1e6 / self._at_once:.1f} ms more",
                past=True,
                peers=False,
                together=self._together,
            )
            return [named]
        if not links.score and self._together:
            together, self._together = self._together, ()
            return [Cleared(step=event.step, rank=together[0], cause=Cause.LINK, together=together)]
        return []

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
