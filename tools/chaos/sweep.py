"""Kill a rank of a small training job at every point that it passes: the weights must stay the same.

    python -m zbmd.tools.chaos.sweep                              three ranks, each with the whole state
    python -m zbmd.tools.chaos.sweep --second                     and a second kill in the recovery
    python -m zbmd.tools.chaos.sweep --zero 3                     the job with sharded state
    python -m zbmd.tools.chaos.sweep --mesh dp=2,pp=2             a run on a mesh, or with both
    python -m zbmd.tools.chaos.sweep --every --second --ledger FILE --minutes 60
                                                                 all of ZeRO and meshes, an hour of it; again,
                                                                 and it goes on from where it was
    python -m zbmd.tools.chaos.sweep --every --pairs 2000 --ledger FILE
                                                                 and two kills at a time, anywhere, drawn
    python -m zbmd.tools.chaos.sweep --list                       the points and their meaning

Each case is one run of the job under a host, with `ZBMD_FAULT` naming who dies where. Which points a rank
passes, and how often, is counted in a run that nothing disturbs. The points inside collectives are those of
the programs: `collective.point:N` is the N-th instruction boundary passed. A ledger keeps what was found;
cases are ordered so that whatever part of them was run is spread over all. `--table` prints a ledger.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Generic, Literal, Protocol, TypeVar

import msgspec

from zbmd.tools.chaos.job_worker import Case, CaseResult, JobCase, Worker
from zbmd.tools.chaos.kill_lines import KillLines
from zbmd.tools.chaos.small_job import RANKS_DEFAULT, Passes, read_passes, variables_for, write_text
from zbmd.tools.cli.options import script_parser
from zbmd.training.optim import OPTIMIZERS
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

# ---- the cases: which rank of which job dies where, and in which order that is tried

AnyT = TypeVar("AnyT")
COLLECTIVE: Final = "collective.point"
RECOVERY_BOUNDARIES: Final = 30
"""Instruction boundaries of a replacement that are tried: its first barrier and its first step."""
ZERO_STAGES: Final = (1, 2, 3)
MESHES: Final = ("pp=2", "tp=2", "dp=2,pp=2", "dp=2,tp=2", "pp=2,tp=2", "dp=2,pp=2,tp=2")
SHARDED_MESHES: Final = (
    *((3, "dp=2,tp=2"), (2, "dp=2,pp=2"), (3, "dp=2,pp=2"), (1, "dp=2,fsdp=2"), (3, "dp=2,fsdp=2")),
)
"""Those of which the state is sharded, by their stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A job: with sharded state (`zero`, its stage), on a `mesh`, both, or neither; on `ranks` ranks."""

    zero: int = 0
    mesh: str = ""
    ranks: int = RANKS_DEFAULT
    optimizer: str = "adamw"

    @classmethod
    def of(
        cls, *, zero: int = 0, mesh: str = "", ranks: int | None = None, optimizer: str = "adamw"
    ) -> Setting:
        """The ranks of a mesh are those that it has. Raises `UserError` for what is no job."""
        if mesh:
            sizes = [size for _, _, size in (axis.partition("=") for axis in mesh.split(","))]
            if not all(size.isdecimal() and int(size) for size in sizes):
                raise UserError(f"--mesh {mesh}: say the size of each axis, such as dp=2,pp=2.")
            ranks = math.prod(map(int, sizes)) if ranks is None else ranks
        ranks = RANKS_DEFAULT if ranks is None else ranks
        return cls(zero=zero, mesh=mesh, ranks=ranks, optimizer=optimizer)

    def __str__(self) -> str:
        kinds = (f"zero={self.zero}" if self.zero else "", self.mesh)
        what = " ".join(kind for kind in kinds if kind) or "replicas"
        return f"{what} n={self.ranks}{'' if self.optimizer == 'adamw' else f' {self.optimizer}'}"

    def case(self, *, out: Path, data: Path, fault: str, counts: Path | None) -> JobCase:
        """Return a run of it."""
        return JobCase(
            out=out,
            data=data,
            fault=fault,
            ranks=self.ranks,
            zero=self.zero,
            mesh=self.mesh,
            optimizer=self.optimizer,
            counts=counts,
            variables=variables_for(fault),
        )

    @property
    def recovery(self) -> tuple[str, ...]:
        """The points that a replacement passes until it trains. One that is alone pulls from nobody."""
        if self.ranks == 1:
            return ("job.meet", "job.met")
        return ("job.meet", "mirror.restore", "mirror.restore_middle", "mirror.restored", "job.met")


def every_setting() -> list[Setting]:
    """All that the sweep of training is about: one rank, replicas, ZeRO, meshes, and both."""
    kinds: list[tuple[int, str]] = [(stage, "") for stage in (0, *ZERO_STAGES)]
    kinds += [(0, mesh) for mesh in MESHES]
    found = [Setting.of(zero=stage, mesh=mesh) for stage, mesh in (*kinds, *SHARDED_MESHES)]
    return [Setting.of(ranks=1), *found]


def spread(count: int) -> list[int]:
    """1 to `count`, such that any beginning of it is spread over all: the first are far from each other."""
    bits = count.bit_length()
    return sorted(range(1, count + 1), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))


def single_kills(passes: Sequence[Passes]) -> list[list[str]]:
    """One kill, of each rank at each point that it passes: first passes, others, and inside collectives.

    Outside collectives a rank dies at its first, second and last pass; inside them at every one.
    """
    first: list[str] = []
    later: list[str] = []
    inside: list[list[str]] = []
    for rank, passed in enumerate(passes):
        for point, count in sorted(passed.items()):
            if point == COLLECTIVE:
                inside.append([f"rank{rank}:{point}:{number}" for number in spread(count)])
                continue
            first.append(f"rank{rank}:{point}:1")
            later += [
                f"rank{rank}:{point}:{number}" for number in sorted({2, count} - {1}) if number <= count
            ]
    return [first, later, merged(inside)]


def second_kills(setting: Setting) -> list[list[str]]:
    """A rank dies in its third step; then its replacement, or a survivor, dies in what follows.

    With state that one rank alone holds a survivor dies only where neither it nor the first one has the
    other's copy: else all copies of a shard may go, and the run ends. So it takes four ranks.
    """
    point = "zero.update:3" if setting.zero else "job.begin:3"
    named: list[str] = []
    inside: list[list[str]] = []
    for rank in sorted({0, 1, setting.ranks - 1}):
        before = f"rank{rank}:{point}"
        named += (f"{before},rank{rank}#2:{one}" for one in setting.recovery)
        inside.append(
            [f"{before},rank{rank}#2:{COLLECTIVE}:{number}" for number in spread(RECOVERY_BOUNDARIES)]
        )
    replicas = not setting.zero and not setting.mesh
    if setting.ranks >= 4 or (replicas and setting.ranks > 1):
        meet, *_, met = setting.recovery
        named += (f"rank1:{point},rank{setting.ranks - 1}:{one}:2" for one in (meet, met))
    for last in ("job.saved", "job.parted"):  # the last version is in files, and nobody who holds it is left
        named.append("+".join(f"rank{rank}:{last}" for rank in range(setting.ranks)))
    return [named, merged(inside)]


def sampled_pairs(passes: Sequence[Passes], count: int, seed: str) -> list[str]:
    """Draw `count` pairs of kills: of two ranks, or of one and of its replacement, at any of their points.

    Nothing is lost by them, since the memory of a rank outlives it. A replacement passes what it has left to
    do: the second kill of some pairs is not reached.
    """
    rng, drawn = random.Random(seed), dict[str, None]()
    while len(drawn) < count:
        first, second = rng.randrange(len(passes)), rng.randrange(len(passes))
        kills = drawn_kill(rng, passes, first), drawn_kill(rng, passes, second, again=second == first)
        drawn[",".join(kills)] = None
    return list(drawn)


def drawn_kill(rng: random.Random, passes: Sequence[Passes], rank: int, *, again: bool = False) -> str:
    """Draw a kill of a rank, or of its replacement, at any pass of any of its points."""
    point, most = rng.choice(sorted(passes[rank].items()))
    return f"rank{rank}{'#2' if again else ''}:{point}:{rng.randint(1, most)}"


def merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """The members of all lists, one of each in turn."""
    return [one for turn in itertools.zip_longest(*lists) for one in turn if one is not None]


def in_order(found: Sequence[tuple[AnyT, Sequence[Sequence[str]]]]) -> Iterator[tuple[AnyT, str]]:
    """All cases: first those of the first list of each setting, one of each in turn, and so on."""
    for rank_of_lists in itertools.zip_longest(*(lists for _, lists in found), fillvalue=()):
        for turn in itertools.zip_longest(*rank_of_lists):
            for (setting, _), fault in zip(found, turn, strict=True):
                if fault is not None:
                    yield setting, fault


def name_of(fault: str) -> str:
    """The point of a case, with a word if it is a second kill."""
    *before, last = faults.parse(fault)
    if not before:
        return last.point
    return f"{last.point} {'in a recovery' if last.incarnation > 1 else 'after another kill'}"


# ---- the ledger: a file that an interrupted sweep resumes from, and its table

Verdict = Literal["same bits", "lost, and said so", "late, and said so", "other bits", "failed"]
RIGHT: Final = ("same bits", "lost, and said so", "late, and said so")
"""The second where kills take a state and all of its copies, the third after the last step of all."""


class CaseVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a case. reached: whether every kill of it took place; told: why it is not as it should
    be, and the end of what ranks said."""

    setting: str
    fault: str
    verdict: Verdict
    reached: bool
    took_s: Annotated[float, msgspec.Meta(ge=0)]
    told: str = ""


class Calm(msgspec.Struct, frozen=True, kw_only=True, tag="calm"):
    """The weights of a setting that nothing disturbs."""

    setting: str
    digest: str


class _Found(CaseVerdict, frozen=True, kw_only=True, tag="found"):
    """A line of the file."""


_decoder: msgspec.json.Decoder[Calm | _Found] = msgspec.json.Decoder(Calm | _Found)


class Ledger:
    """Findings by setting and case, the last one of each; kept in the file at `path`, if there is one.

    Raises `UserError` if that is damaged, but for a last line that was cut off.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.found: dict[tuple[str, str], CaseVerdict] = {}
        self.calm: dict[str, str] = {}
        self._lines = KillLines(path, _decoder)
        for one in self._lines.found:
            self._take(one)

    def _take(self, one: Calm | CaseVerdict) -> None:
        if isinstance(one, Calm):
            self.calm[one.setting] = one.digest
        else:
            self.found[one.setting, one.fault] = one

    def _put(self, one: Calm | _Found) -> None:
        self._take(one)
        self._lines.add(one)

    def begin(self, setting: str, digest: str) -> None:
        """A setting's weights when nothing disturbs it. Raises `UserError` if they were others before."""
        before = self.calm.get(setting, digest)
        if before != digest:
            raise UserError(
                f"{setting} ends with {digest[:16]} here, and with {before[:16]} in {self._lines.path}: that "
                "was another version. Begin another ledger."
            )
        if setting not in self.calm:
            self._put(Calm(setting=setting, digest=digest))

    def add(self, finding: CaseVerdict) -> None:
        """Note a case that was run."""
        self._put(_Found(**msgspec.structs.asdict(finding)))

    def is_done(self, setting: str, fault: str) -> bool:
        """Whether a case has ended well, and need not be run again."""
        finding = self.found.get((setting, fault))
        return finding is not None and finding.verdict in RIGHT

    @property
    def wrong(self) -> list[CaseVerdict]:
        """Return the cases that did not end as they should."""
        return [one for one in self.found.values() if one.verdict not in RIGHT]


def table(findings: Iterable[CaseVerdict], planned: Sequence[tuple[str, str]]) -> str:
    """A row for each setting and point, as a table in Markdown: kills, cases run and planned, and faults."""
    run: Counter[tuple[str, str]] = Counter()
    reached: Counter[tuple[str, str]] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    cases = Counter((setting, name_of(fault)) for setting, fault in set(planned))
    for one in findings:
        key = one.setting, name_of(one.fault)
        run[key] += 1
        reached[key] += one.reached
        wrong[key] += one.verdict not in RIGHT
    lines = ["| setting | point | killed | run | cases | wrong |", "|---|---|---|---|---|---|"]
    for key in sorted(cases | run):
        setting, name = key
        lines.append(f"| {setting} | `{name}` | {reached[key]} | {run[key]} | {cases[key]} | {wrong[key]} |")
    total = f"{reached.total()} | {run.total()} | {cases.total()} | {wrong.total()}"
    return "\n".join([*lines, f"| all | | {total} |"])


# ---- the sweep

WORKERS_MAX: Final = 16


class Swept(Protocol):
    """A job of which cases are run."""

    @property
    def ranks(self) -> int:
        """Return the number of its ranks."""
        ...

    def case(self, *, out: Path, data: Path, fault: str, counts: Path | None) -> Case:
        """Return a run of it; see `JobCase`."""
        ...


SweptT = TypeVar("SweptT", bound=Swept)


class Sweep(Generic[SweptT]):
    """Runs cases in `workers` processes at a time, and keeps what became of them in `ledger`."""

    def __init__(self, ledger: Ledger, scratch: Path, *, workers: int, until_s: float) -> None:
        self.ledger = ledger
        self._scratch, self._until_s = scratch, until_s
        self._data = write_text(scratch / "text")
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._idle: deque[Worker] = deque()
        self._pool = ThreadPoolExecutor(workers)
        self._names = iter(range(sys.maxsize))
        self.calm_told: dict[str, str] = {}
        """The output of settings that nothing disturbs."""

    def close(self) -> None:
        """End the workers; each is done with its case."""
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def calm(self, settings: Sequence[SweptT]) -> list[list[Passes]]:
        """Run each setting undisturbed: how often each rank passes each point. Raises `UserError`."""

        def count(setting: SweptT) -> list[Passes]:
            counts = self._scratch / f"counts-{setting}"
            counts.mkdir()
            ended = self._run(setting, counts=counts)
            if ended.outcome is None:
                raise UserError(f"{setting} does not end without a fault either: {ended.error}")
            with self._lock:
                self.ledger.begin(str(setting), ended.outcome.digest)
                self.calm_told[str(setting)] = ended.outcome.told
            return read_passes(counts, setting.ranks)

        return list(self._pool.map(count, settings))

    def run(self, cases: Sequence[tuple[SweptT, str]]) -> None:
        """Run those that have not ended well before, until the time is up; a line for each."""
        left = [case for case in cases if not self.ledger.is_done(str(case[0]), case[1])]
        print(f"{len(cases)} cases, {len(cases) - len(left)} of them done before", flush=True)
        for _ in self._pool.map(lambda case: self._case(*case), left):
            pass

    def _case(self, setting: SweptT, fault: str) -> None:
        began_s = time.monotonic()
        if began_s > self._until_s:
            return
        ended = self._run(setting, fault)
        verdict, why = self.judged(setting, fault, ended)
        finding = CaseVerdict(
            setting=str(setting),
            fault=fault,
            verdict=verdict,
            reached=ended.outcome is None or ended.outcome.deaths >= len(faults.parse(fault)),
            took_s=time.monotonic() - began_s,
            told=why,
        )
        with self._lock:
            self.ledger.add(finding)
        reached = "" if finding.reached else ", NOT REACHED"
        told = "" if finding.verdict in RIGHT else f"\n{finding.told}"
        print(f"{setting} {fault}: {finding.verdict}{reached}, {finding.took_s:.1f} s{told}", flush=True)

    def _run(self, setting: SweptT, fault: str = "", *, counts: Path | None = None) -> CaseResult:
        with self._lock:
            name = str(next(self._names))
            worker = self._idle.pop() if self._idle else self._start()
        out = self._scratch / name
        ended = worker.run(setting.case(out=out, data=self._data, fault=fault, counts=counts))
        shutil.rmtree(out, ignore_errors=True)
        with self._lock:
            self._idle.append(worker)
        return ended

    def judged(self, setting: SweptT, fault: str, ended: CaseResult) -> tuple[Verdict, str]:
        """Return the verdict on a case, and why."""
        if ended.outcome is None:
            return "failed", ended.error
        same = ended.outcome.digest == self.ledger.calm[str(setting)]
        return ("same bits", "") if same else ("other bits", ended.outcome.told)

    def _start(self) -> Worker:
        worker = Worker()
        self._workers.append(worker)
        return worker


def add_ledger_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every sweep has."""
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="keep what was found, and go on from it")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="cases at a time (%(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, metavar="M", help="begin no case after that")
    parser.add_argument("--table", action="store_true", help="print what the ledger holds, as a table")


def _parser() -> argparse.ArgumentParser:
    parser = script_parser("chaos.sweep", __doc__)
    parser.add_argument("--second", action="store_true", help="also a second kill during the recovery")
    parser.add_argument("--pairs", type=int, default=0, metavar="K", help="also K pairs of kills, drawn")
    parser.add_argument("--seed", type=int, default=0, help="of the pairs (%(default)s)")
    parser.add_argument("--only", default="", help="only cases that contain this text")
    parser.add_argument("--list", action="store_true", help="print the points and end")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="stage; 0: none")
    parser.add_argument("--mesh", default="", help="of a run of zbmd train, such as dp=2,pp=2")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="(%(default)s)")
    parser.add_argument(
        "--every", action="store_true", help="one rank, replicas, every stage of ZeRO, meshes, and both"
    )
    parser.add_argument("-n", type=int, help=f"ranks ({RANKS_DEFAULT}, or those of the mesh)")
    add_ledger_options(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep. Exit code 1: a run ended with other weights, or not at all."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.workers <= WORKERS_MAX:
        parser.error(f"--workers is 1 to {WORKERS_MAX}")
    if arguments.list:
        for point, description in sorted(faults.declared().items()):
            print(f"{point:20} {description}")
        return 0
    try:
        ledger = Ledger(arguments.ledger)
        if arguments.table:
            print(table(ledger.found.values(), []))
        else:
            _sweep(arguments, ledger)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 1 if ledger.wrong else 0


def _sweep(arguments: argparse.Namespace, ledger: Ledger) -> None:
    one = Setting.of(
        zero=arguments.zero, mesh=arguments.mesh, ranks=arguments.n, optimizer=arguments.optimizer
    )
    settings = every_setting() if arguments.every else [one]
    until_s = time.monotonic() + 60.0 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="zbmd-sweep-") as scratch:
        sweep = Sweep[Setting](ledger, Path(scratch), workers=arguments.workers, until_s=until_s)
        try:
            passed = sweep.calm(settings)
            cases = [
                case
                for case in _cases(
                    settings, passed, second=arguments.second, pairs=arguments.pairs, seed=arguments.seed
                )
                if arguments.only in case[1]
            ]
            sweep.run(cases)
        finally:
            sweep.close()
    print(table(ledger.found.values(), [(str(setting), fault) for setting, fault in cases]))
    missed = sorted(
        faults.declared().keys() - {one.point for _, fault in cases for one in faults.parse(fault)}
    )
    print(f"declared, and passed by none of these: {', '.join(missed) or 'none'}")


def _cases(
    settings: Sequence[Setting], passed: Sequence[list[Passes]], *, second: bool, pairs: int, seed: int
) -> list[tuple[Setting, str]]:
    """First passes of named points first, then pairs, second kills at points, and the rest in turn."""
    each = -(-pairs // len(settings))
    found: list[tuple[Setting, list[list[str]]]] = []
    for setting, passes in zip(settings, passed, strict=True):
        first, later, inside = single_kills(passes)
        again, again_inside = second_kills(setting) if second else ([], [])
        drawn = sampled_pairs(passes, each, f"{setting}/{seed}")
        found.append((setting, [first, drawn, again, merged([later, inside, again_inside])]))
        boundaries = [passed.get(COLLECTIVE, 0) for passed in passes]
        print(f"{setting}: {boundaries} instruction boundaries in collectives, by rank", flush=True)
    return list(in_order(found))


if __name__ == "__main__":
    sys.exit(main())
