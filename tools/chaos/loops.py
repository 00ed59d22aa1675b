"""Kill ranks of resilient PyTorch loops at any point that they pass: losses, samples and state must stay.

    python -m zbmd.tools.chaos.loops --kills 1000 --ledger FILE      over DDP and FSDP2, drawn by --seed
    python -m zbmd.tools.chaos.loops --kills 1000 --ledger FILE      again: it goes on from where it was
    python -m zbmd.tools.chaos.loops --kills 50 --only ddp           over DDP alone
    python -m zbmd.tools.chaos.loops --ledger FILE --table           what a ledger holds

The loops are the programs of the tests, in each of their modes. A case is one run: a kill of any rank at any
pass of a point, inside collectives of the forward and backward pass and in a checkpoint too, or two kills, of
two ranks, of a rank and its replacement, or of one and of another in the recovery. What ranks report of
steps, and the final state, must be what an undisturbed run reports. Where two kills take a shard and its
copy, where one takes the shard of a loop that shrinks before its first step, when no copy was made, and where
all other ranks have ended as a replacement comes, the loop must end, and say so. Ranks of mirrored loops are
killed in the operations of their optimizers, too; loops that grow take in two ranks of a node that joins,
which are killed as they come.

A loop that shrinks must have each sample once in its log; all ranks that are left must end with the same
state, and its losses must be those of an undisturbed run: DDP's to the last bit. PyTorch is needed.
"""

from __future__ import annotations

import math
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zbmd.tools.chaos.job_worker import CaseResult
from zbmd.tools.chaos.loop_case import LOSSES, LoopCase, ends_in
from zbmd.tools.chaos.small_job import Passes
from zbmd.tools.chaos.sweep import (
    WORKERS_MAX,
    Ledger,
    Sweep,
    Verdict,
    add_ledger_options,
    drawn_kill,
    in_order,
    sampled_pairs,
    table,
)
from zbmd.tools.cli.options import script_parser
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

PROGRAMS: Final = Path(__file__).resolve().parents[2] / "tests" / "programs"
KINDS: Final = {
    "ddp": PROGRAMS / "training/resilient_ddp.py",
    "fsdp": PROGRAMS / "torch/resilient_fsdp.py",
    "mirrored": PROGRAMS / "torch/mirrored.py",
}
GROWING: Final = PROGRAMS / "torch/growing.py"
SHRINKING: Final = {"ddp": PROGRAMS / "torch/recorded_loop.py", "fsdp": KINDS["fsdp"]}
"""Programs whose loops go on with fewer ranks."""
PAIRS_SHARE: Final = 0.25
"""Of all cases: two kills at points that an undisturbed run passes."""
RECOVERIES_SHARE: Final = 0.2
"""Of all cases: a kill, and another in the recovery from it."""
AT_ONCE_SHARE: Final = 0.15
"""Of the cases of mirrored loops and of those that grow: two ranks at the same pass of a point."""
OWN_POINTS: Final = {
    "normed": {"test.before_reduce": 8, "test.after_reduce": 8},
    "muon": {"test.before_reduce": 12, "test.after_reduce": 12},
}
"""Points that a program declares itself, by its mode, and how often each rank passes them at least."""
OF_LOOPS: Final = ("loop.", "collective.")
"""The points of newcomers that are in the view: before, their node would start without them."""
LIKE: Final = 1e-4
"""The difference, as a share, of losses of FSDP2 over other numbers of ranks; of 16 bits: `LIKE_16`."""
LIKE_16: Final = 0.02
UNCOPIED: Final = re.compile(r"is lost before rank \d+ had a copy")
"""The words of a loop that ends since a shard is gone of which no copy was made yet."""
LOST: Final = re.compile(rf"are lost together|{UNCOPIED.pattern}")
"""Those, and the words of one that ends since a shard and its copy are gone."""
ALL_LOST: Final = re.compile(r"all ranks that had the state|commits.zlog belongs to another run")
"""The words of newcomers that find nobody with the state: they do not write on in its log."""
LATE: Final = re.compile(r"finished (?:its|their) script: no process group")
"""The words of a replacement that finds the others gone."""
OUTSIDE: Final = re.compile(r"in tell_whole\n.*MembersLost", re.DOTALL)
"""Of a script that has met a loss in its own operations, before or after the loop: nothing repeats those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetting:
    """A loop of a kind, in a mode of its program, on `ranks` ranks. saves: it has a log and checkpoints.

    shrinks: lost ranks are not replaced; it has a log. newcomers: so many of the ranks come
    later, to a loop that shrinks, too. held: each step is kept in memory that outlives the ranks, so
    that no two kills take a shard.
    """

    kind: str
    mode: str
    ranks: int = 3
    saves: bool = False
    shrinks: bool = False
    newcomers: int = 0
    held: bool = False

    def __str__(self) -> str:
        kind = f"{' saved' if self.saves else ''}{' shrinks' if self.shrinks and not self.newcomers else ''}"
        return f"{self.kind} {self.mode}{kind}{' held' if self.held else ''} n={self.ranks}"

    def case(self, *, out: Path, data: Path, fault: str, counts: Path | None) -> LoopCase:
        """Return a run of it."""
        if self.newcomers:
            return LoopCase(
                program=GROWING,
                mode=self.mode,
                fault=fault,
                ranks=self.ranks,
                counts=counts,
                out=out,
                shrinks=True,
                newcomers=self.newcomers,
            )
        more = {"WHOLE": "1", "EXACT": str(self.ranks)} if self.shrinks else {}
        return LoopCase(
            program=(SHRINKING if self.shrinks else KINDS)[self.kind],
            mode=self.mode,
            fault=fault,
            ranks=self.ranks,
            counts=counts,
            out=out if self.saves or self.shrinks else None,
            shrinks=self.shrinks,
            held=self.held,
            environment=more if self.saves or not self.shrinks else {**more, "EVERY": "0"},
        )

    @property
    def is_sharded(self) -> bool:
        """Whether each rank has a part of the state."""
        return self.kind in ("fsdp", "mirrored") or self.mode == "fsdp"

    @property
    def own_points(self) -> Passes:
        """Return the points that its program declares itself."""
        if self.kind != "mirrored":
            return {}
        return next(points for mode, points in OWN_POINTS.items() if mode in self.mode)

    @property
    def recovery(self) -> tuple[str, ...]:
        """The points of a recovery that survivors pass, and those of a replacement with `#2`."""
        if self.shrinks:
            return ("loop.meet", *(("loop.divided", "loop.agreed") if self.is_sharded else ()))
        return ("loop.meet", "#2:loop.meet", "#2:loop.take", *(("loop.give",) if self.kind == "ddp" else ()))


SETTINGS: Final = (
    *(
        LoopSetting(kind="ddp", mode=mode)
        for mode in ("plain", "static", "unused", "views", "scaler", "workers", "momentum")
    ),
    *(
        LoopSetting(kind="fsdp", mode=mode)
        for mode in ("plain", "fused", "momentum", "mixed+every", "kept+every", "scaler+fused")
    ),
    LoopSetting(kind="fsdp", mode="hybrid", ranks=4),
    *(LoopSetting(kind="fsdp", mode=mode, held=True) for mode in ("plain", "kept+every", "scaler+fused")),
    *(LoopSetting(kind=kind, mode="plain", saves=True) for kind in SHRINKING),
    *(LoopSetting(kind=kind, mode="plain", ranks=4, shrinks=True) for kind in SHRINKING),
    LoopSetting(kind="fsdp", mode="mixed+kept+fused", shrinks=True),
    *(LoopSetting(kind=kind, mode="plain", saves=True, shrinks=True) for kind in SHRINKING),
    *(LoopSetting(kind="mirrored", mode=mode) for mode in ("fsdp+normed", "fsdp+muon", "ddp+normed")),
    *(LoopSetting(kind="mirrored", mode=f"hybrid+{mode}", ranks=4) for mode in ("normed", "muon")),
    *(LoopSetting(kind="grows", mode=mode, ranks=4, shrinks=True, newcomers=2) for mode in ("ddp", "fsdp")),
)


def reports_in(lines: Sequence[str]) -> list[str]:
    """Return what ranks report of steps and of their final state."""
    return [found[0] for line in lines if (found := re.findall(r"(?:step|final) \d*.*rank.*", line))]


def difference(told: Collection[str], wanted: Collection[str], fault: str) -> str:
    """Return what is wrong with the reports of a run beside those of an undisturbed one; empty: nothing.

    Each is there once, and none is another; those of ranks that live are all there, and so are the last ones.
    """
    others = sorted(set(told) - set(wanted))
    whole = of_living(wanted, fault) | {line for line in wanted if line.startswith("final")}
    twice = sorted(line for line, times in Counter(told).items() if times > 1)
    missing = sorted(whole - set(told))
    found = {"reported differently": others, "reported twice": twice, "not reported": missing}
    return "; ".join(f"{what}: {', '.join(lines[:3])}" for what, lines in found.items() if lines)


def difference_of_fewer(setting: LoopSetting, told: str, wanted: str, left: int) -> str:
    """Return what is wrong with a loop that has ended with `left` ranks, beside one with all.

    Empty: nothing.
    """
    (losses, calm), ends = (_losses_in(text) for text in (told, wanted)), ends_in(told.splitlines())
    if len(ends) != left or len(set(ends)) != 1:
        return f"{left} ranks are left, and these are their ends: {ends}"
    if not setting.is_sharded:
        same = losses == calm and set(ends) == set(ends_in(wanted.splitlines()))
        return "" if same else f"it ends with {ends[0]}, and losses {losses}, not {calm}"
    like = LIKE_16 if "mixed" in setting.mode else LIKE
    are_like = len(losses) == len(calm) and all(
        math.isclose(one, other, rel_tol=like) for one, other in zip(losses, calm, strict=True)
    )
    return "" if are_like else f"losses {losses} are not like {calm}"


def _losses_in(told: str) -> list[float]:
    return [float(each) for each in told.rpartition(LOSSES)[2].split()]


def of_living(wanted: Collection[str], fault: str) -> set[str]:
    """Return the reports of ranks that no kill is for."""
    killed = {int(one.process.removeprefix("rank")) for one in faults.parse(fault) if not one.lives}
    return {line for line in wanted if int(line.rpartition("rank ")[2].split(":")[0]) not in killed}


def verdict_on_end(setting: LoopSetting, fault: str, error: str, wanted: Collection[str]) -> Verdict:
    """Return what to think of a run that did not succeed. error: why, and what its ranks said."""
    if setting.newcomers and _takes_all_with_state(setting, fault) and ALL_LOST.search(error):
        return "lost, and said so"
    if setting.is_sharded and not setting.held and LOST.search(error):
        is_early = setting.shrinks and UNCOPIED.search(error) and not reports_in(error.splitlines())
        if len(faults.parse(fault)) > 1 or is_early:
            return "lost, and said so"
    if setting.shrinks and OUTSIDE.search(error):
        return "late, and said so"
    told, living = set(reports_in(error.splitlines())), of_living(wanted, fault)
    return "late, and said so" if LATE.search(error) and living and living <= told else "failed"


def _takes_all_with_state(setting: LoopSetting, fault: str) -> bool:
    """Whether all ranks that a loop begins with are killed: those that come may not have the state yet."""
    killed = {one.process for one in faults.parse(fault)}
    return {f"rank{rank}" for rank in range(setting.ranks - setting.newcomers)} <= killed


def drawn(setting: LoopSetting, passes: Sequence[Passes], count: int, seed: int) -> list[str]:
    """Draw `count` cases of a loop: one kill, or two."""
    rng, found = random.Random(f"{setting}/{seed}"), dict[str, None]()
    passes = [_of_setting(setting, rank, each) for rank, each in enumerate(passes)]
    pairs, again = round(PAIRS_SHARE * count), round(RECOVERIES_SHARE * count)
    at_once = round(AT_ONCE_SHARE * count) if setting.newcomers or setting.kind == "mirrored" else 0
    while len(found) < count - pairs - again - at_once:
        found[drawn_kill(rng, passes, rng.randrange(setting.ranks))] = None
    while len(found) < count - pairs - at_once:
        found[_in_recovery(setting, rng, passes)] = None
    while len(found) < count - pairs:
        found[_at_once(setting, rng, passes)] = None
    both = sampled_pairs(passes, 3 * pairs, f"{setting}/{seed}/pairs")
    every = [*found, *[each for each in both if not (setting.shrinks and "#2" in each)][:pairs]]
    rng.shuffle(every)
    return every


def _of_setting(setting: LoopSetting, rank: int, passes: Passes) -> Passes:
    """Return the points at which a rank of a loop may be killed, and how often it passes them."""
    if rank < setting.ranks - setting.newcomers:
        return {**setting.own_points, **passes}
    return {point: times for point, times in passes.items() if point.startswith(OF_LOOPS)}


def _at_once(setting: LoopSetting, rng: random.Random, passes: Sequence[Passes]) -> str:
    """Draw a kill of two ranks at the same pass of a point that both have."""
    one, other = rng.sample(range(setting.ranks), 2)
    common = sorted(passes[one].keys() & passes[other].keys())
    point = rng.choice([each for each in common if each.startswith(("loop.", "test."))])
    count = rng.randint(1, min(passes[one][point], passes[other][point]))
    return f"rank{one}:{point}:{count},rank{other}:{point}:{count}"


def _in_recovery(setting: LoopSetting, rng: random.Random, passes: Sequence[Passes]) -> str:
    """Draw a kill of a rank, and one of another, or of its replacement, in the recovery from that."""
    rank, point = rng.randrange(setting.ranks), rng.choice(setting.recovery)
    other = rng.choice([each for each in range(setting.ranks) if each != rank])
    then = f"rank{rank}{point}:1" if point.startswith("#") else f"rank{other}:{point}:1"
    return f"{drawn_kill(rng, passes, rank)},{then}"


class LoopSweep(Sweep[LoopSetting]):
    """A sweep of loops: what counts is what ranks report."""

    def judged(self, setting: LoopSetting, fault: str, ended: CaseResult) -> tuple[Verdict, str]:
        """See `Sweep`."""
        outcome, wanted = ended.outcome, reports_in(self.calm_told[str(setting)].splitlines())
        if outcome is None:
            return verdict_on_end(setting, fault, ended.error, wanted), ended.error
        if setting.shrinks:
            left = setting.ranks - outcome.deaths
            wrong = difference_of_fewer(setting, outcome.told, self.calm_told[str(setting)], left)
            return ("other bits" if wrong else "same bits"), f"{wrong}\n{outcome.told}" if wrong else ""
        wrong = difference(reports_in(outcome.told.splitlines()), wanted, fault)
        return ("other bits" if wrong else "same bits"), f"{wrong}\n{outcome.told}" if wrong else ""


def _cases(
    settings: Sequence[LoopSetting], passed: Sequence[list[Passes]], kills: int, seed: int
) -> Iterator[tuple[LoopSetting, str]]:
    each = -(-kills // len(settings))
    found = [(one, [drawn(one, passes, each, seed)]) for one, passes in zip(settings, passed, strict=True)]
    return in_order(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kills. Exit code 1: a run reported anything else, or did not end."""
    parser = script_parser("chaos.loops", __doc__)
    parser.add_argument("--kills", type=int, default=1000, metavar="K", help="cases (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="that draws them (%(default)s)")
    parser.add_argument("--only", default="", help="only loops whose name has this")
    add_ledger_options(parser)
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.workers <= WORKERS_MAX:
        parser.error(f"--workers is 1 to {WORKERS_MAX}")
    settings = [one for one in SETTINGS if arguments.only in str(one)]
    try:
        ledger = Ledger(arguments.ledger)
        if arguments.table:
            print(table(ledger.found.values(), []))
            return 1 if ledger.wrong else 0
        until_s = time.monotonic() + 60.0 * arguments.minutes
        with tempfile.TemporaryDirectory(prefix="zbmd-loops-") as scratch:
            sweep = LoopSweep(ledger, Path(scratch), workers=arguments.workers, until_s=until_s)
            try:
                passed = sweep.calm(settings)
                cases = list(_cases(settings, passed, arguments.kills, arguments.seed))
                sweep.run(cases)
            finally:
                sweep.close()
        print(table(ledger.found.values(), [(str(setting), fault) for setting, fault in cases]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if ledger.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
