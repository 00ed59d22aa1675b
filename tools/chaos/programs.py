"""Kill a rank at every instruction of every program, in real processes, with 2 to 5 ranks.

    python -m zbmd.tools.chaos.programs                            every operation and algorithm, n = 2…5
    python -m zbmd.tools.chaos.programs --ranks 3 --only ring      the rings of three
    python -m zbmd.tools.chaos.programs --stride 5                 every fifth point
    python -m zbmd.tools.chaos.programs --ledger kills.jsonl       go on where such a run was ended

A pool of processes runs an operation, and one of them is killed at a point of the program that it runs
(before it enters, as it tells each peer, between any two instructions, at its end): every rank at every point
of its own program, in a call that goes the general way and in one that takes the native fast path. Survivors
end with the right result or with an error that names the dead; then they run the same operation among
themselves, which must be right; then a new process takes the dead one's place, and the next kill follows. A
wrong result is a fault, as is a silent rank, an end that nobody asked for, a descriptor or a thread too many,
and a death behind the last point of a program, which is tried too: it would show points that were not tried.

Printed: of each operation and algorithm at how many points a rank died, of how many, and how the operation
ended on the others. Exit code 1 at a fault.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from zbmd.tools.chaos.kill_lines import KillLines
from zbmd.tools.chaos.kill_pool import (
    RANKS,
    RUNS,
    Family,
    Kill,
    KillOutcome,
    KillPool,
    PoolBroken,
    families,
    judge,
    kills_of,
)
from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.transport.errors import UserError

# ---- the ledger: a line a kill, so that a sweep goes on where an earlier one was ended


class KillRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line: a kill, and what became of it. `again` is of the operation that the living then ran."""

    key: str
    died: bool
    ends: dict[str, int]
    again: dict[str, int]
    faults: list[str] = []


def entry_of(kill: Kill, outcome: KillOutcome, faults: list[str]) -> KillRecord:
    """The line of a kill."""
    return KillRecord(
        key=kill.key,
        died=outcome.died,
        ends=dict(Counter(_kind(end) for end in outcome.ends.values())),
        again=dict(Counter(_kind(end) for end in outcome.again.values())),
        faults=faults,
    )


def _kind(end: str) -> str:
    return end.partition(" [")[0]


_decoder: msgspec.json.Decoder[KillRecord] = msgspec.json.Decoder(KillRecord)


class Ledger:
    """The kills that have been tried, in memory and, with a path, in a file that grows with each.

    The latest line of a kill counts. Raises `UserError` if the file is not a ledger.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._lines = KillLines(path, _decoder)
        self.entries = {entry.key: entry for entry in self._lines.found}

    def add(self, entry: KillRecord) -> None:
        """Note a kill."""
        self.entries[entry.key] = entry
        self._lines.add(entry)

    def has(self, kill: Kill) -> bool:
        """Whether this kill was tried and nothing was wrong."""
        entry = self.entries.get(kill.key)
        return entry is not None and not entry.faults

    def of(self, kills: Iterable[Kill]) -> list[KillRecord]:
        """Return the records of those of these kills that have been tried."""
        return [entry for kill in kills if (entry := self.entries.get(kill.key)) is not None]


def sweep(chosen: Sequence[Family], stride: int, ledger: Ledger) -> int:
    """Try all kills that the ledger has not, print a row a family. Returns how many had a fault."""
    faulty = 0
    for n in sorted({family.n for family in chosen}):
        pool: KillPool | None = None
        try:
            for family in (family for family in chosen if family.n == n):
                kills, began_s = kills_of(family, stride, RUNS), time.monotonic()
                left = [kill for kill in kills if not ledger.has(kill)]
                for kill in left:
                    pool = pool or KillPool(n)
                    entry = attempt(pool, kill)
                    ledger.add(entry)
                    if entry.faults:
                        pool.close()
                        pool = None
                faulty += print_family(family, ledger.of(kills), len(left), time.monotonic() - began_s)
        finally:
            if pool is not None:
                pool.close()
    return faulty


def attempt(pool: KillPool, kill: Kill) -> KillRecord:
    """One kill."""
    try:
        outcome = pool.kill(kill)
    except PoolBroken as error:
        return entry_of(kill, KillOutcome(died=False, ends={}, again={}), [str(error)])
    return entry_of(kill, outcome, judge(kill, outcome))


def print_family(family: Family, entries: Sequence[KillRecord], tried: int, took_s: float) -> bool:
    """A row, and its faults. Returns whether there are any."""
    ends = sum((Counter(entry.ends) for entry in entries), Counter[str]())
    said = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    died = sum(entry.died for entry in entries)
    speed = f"{tried} tried now, {tried / took_s:.1f}/s" if tried else "all from the ledger"
    print(f"{family!s:36} {died:4} deaths in {len(entries):4} runs: {said}; {speed}", flush=True)
    faults = [(entry.key, fault) for entry in entries for fault in entry.faults]
    for key, fault in faults:
        print(f"    {key}: {fault}", flush=True)
    return bool(faults)


def coverage(chosen: Sequence[Family], ledger: Ledger) -> list[str]:
    """A table: deaths of points, over all ranks' programs and both ways of a call; a column a group size."""
    sizes = sorted({family.n for family in chosen})
    lines = [f"{'operation/algorithm':34}" + "".join(f"{f'n={n}':>12}" for n in sizes)]
    sums: Counter[tuple[int, str]] = Counter()
    for name in dict.fromkeys(str(family).partition(" ")[0] for family in chosen):
        cells: list[str] = []
        for n in sizes:
            found = [family for family in chosen if str(family) == f"{name} n={n}"]
            kills = [kill for family in found for kill in kills_of(family, 1, RUNS) if not kill.beyond]
            died = sum(entry.died for entry in ledger.of(kills))
            sums += Counter({(n, "died"): died, (n, "points"): len(kills)})
            cells.append(f"{f'{died}/{len(kills)}':>12}")
        lines.append(f"{name:34}" + "".join(cells))
    cells = [f"{sums[n, 'died']}/{sums[n, 'points']}" for n in sizes]
    return [*lines, f"{'all':34}" + "".join(f"{cell:>12}" for cell in cells)]


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep."""
    parser = script_parser("chaos.programs", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, choices=RANKS, help="(2 3 4 5)")
    parser.add_argument("--only", default="", help="only programs whose name contains this")
    parser.add_argument("--stride", type=int, default=1, help="every so many-th point (%(default)s)")
    parser.add_argument("--ledger", type=Path, help="file that has, and gets, a line a kill")
    arguments = parser.parse_args(argv)
    if arguments.stride < 1:
        raise UserError(f"--stride {arguments.stride} is not at least 1")
    chosen = list(families(arguments.ranks, arguments.only))
    if not chosen:
        raise UserError(f"no program's name contains {arguments.only!r}")
    ledger = Ledger(arguments.ledger)
    faulty = sweep(chosen, arguments.stride, ledger)
    print("\n".join(coverage(chosen, ledger)))
    print(f"{len(chosen)} programs of {len(ledger.entries)} runs, {faulty} faulty")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
