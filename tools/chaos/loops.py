"""Kill ranks of resilient PyTorch loops at any point that they pass: losses, samples and state must stay.

    python -m zbmd.tools.chaos.loops --kills 1000 --ledger FILE      over DDP and FSDP2, drawn by --seed
    python -m zbmd.tools.chaos.loops --kills 1000 --ledger FILE      again: it goes on from where it was
    python -m zbmd.tools.chaos.loops --kills 50 --only ddp           over DDP alone
    python -m zbmd.tools.chaos.loops --ledger FILE --table           what a ledger holds

The loops are the programs of the tests, in each of their modes. A case is one run: a kill of any rank at any
pass of a point, inside collectives of the forward and backward pass and in a checkpoint too, or two kills, of
two ranks or of a rank and its replacement. What ranks report of steps, and the final state, must be what an
undisturbed run reports. Where two kills take a shard and its copy, and where all other ranks have ended as a
replacement comes, the loop must end, and say so. PyTorch is needed.
"""

from __future__ import annotations

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
from zbmd.tools.chaos.loop_case import LoopCase
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
KINDS: Final = {"ddp": PROGRAMS / "training/resilient_ddp.py", "fsdp": PROGRAMS / "torch/resilient_fsdp.py"}
PAIRS_SHARE: Final = 0.3
"""Of all cases: two kills."""
LOST: Final = re.compile(r"are lost together|is lost before rank \d+ had a copy")
"""The words of a loop that ends since a shard and its copy are gone."""
LATE: Final = re.compile(r"finished (?:its|their) script: no process group")
"""The words of a replacement that finds the others gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSetting:
    """A loop of a kind, in a mode of its program, on `ranks` ranks. saves: it has a log and checkpoints."""

    kind: str
    mode: str
    ranks: int = 3
    saves: bool = False

    def __str__(self) -> str:
        return f"{self.kind} {self.mode}{' saved' if self.saves else ''} n={self.ranks}"

    def case(self, *, out: Path, data: Path, fault: str, counts: Path | None) -> LoopCase:
        """Return a run of it."""
        return LoopCase(
            program=KINDS[self.kind],
            mode=self.mode,
            fault=fault,
            ranks=self.ranks,
            counts=counts,
            out=out if self.saves else None,
        )


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
    *(LoopSetting(kind=kind, mode="plain", saves=True) for kind in KINDS),
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


def of_living(wanted: Collection[str], fault: str) -> set[str]:
    """Return the reports of ranks that no kill is for."""
    killed = {int(one.process.removeprefix("rank")) for one in faults.parse(fault)}
    return {line for line in wanted if int(line.rpartition("rank ")[2].split(":")[0]) not in killed}


def verdict_on_end(setting: LoopSetting, fault: str, error: str, wanted: Collection[str]) -> Verdict:
    """Return what to think of a run that did not succeed. error: why, and what its ranks said."""
    if setting.kind == "fsdp" and len(faults.parse(fault)) > 1 and LOST.search(error):
        return "lost, and said so"
    told, living = set(reports_in(error.splitlines())), of_living(wanted, fault)
    return "late, and said so" if LATE.search(error) and living and living <= told else "failed"


def drawn(setting: LoopSetting, passes: Sequence[Passes], count: int, seed: int) -> list[str]:
    """Draw `count` cases of a loop: one kill, or two."""
    rng, found = random.Random(f"{setting}/{seed}"), dict[str, None]()
    pairs = round(PAIRS_SHARE * count)
    while len(found) < count - pairs:
        found[drawn_kill(rng, passes, rng.randrange(setting.ranks))] = None
    both = [*found, *sampled_pairs(passes, pairs, f"{setting}/{seed}/pairs")]
    rng.shuffle(both)
    return both


class LoopSweep(Sweep[LoopSetting]):
    """A sweep of loops: what counts is what ranks report."""

    def judged(self, setting: LoopSetting, fault: str, ended: CaseResult) -> tuple[Verdict, str]:
        """See `Sweep`."""
        outcome, wanted = ended.outcome, reports_in(self.calm_told[str(setting)].splitlines())
        if outcome is None:
            return verdict_on_end(setting, fault, ended.error, wanted), ended.error
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
