"""Run cases of faults, diagnose each, and note whether the root cause was right: a line of JSON a case."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from zbmd.tools.lab.faults.kinds import KINDS, Drawn, Kind, drawn, marked_lines
from zbmd.tools.lab.faults.launch import can_limit_memory
from zbmd.tools.telemetry.diagnosis.evidence import place_of
from zbmd.tools.telemetry.diagnosis.findings import Diagnosis
from zbmd.tools.telemetry.diagnosis.readers import evidence_of
from zbmd.tools.telemetry.diagnosis.rules import diagnose
from zbmd.transport.errors import ZbmdError
from zbmd.transport.host.files import write_atomically

HEALTHY = "none"
"""In the place of a cause, where there is none."""


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case: what was injected, what was found. rank_right, line_right: None where none is to be named.

    place: that was named; empty where the rank was ended before it could raise.
    """

    kind: str
    seed: int
    ranks: int
    who: int
    step: int
    expected: str
    found: str
    right: bool
    rank_right: bool | None
    line_right: bool | None
    confidence: float
    seconds: float
    summary: str
    place: str = ""


def run_case(kind: Kind, seed: int, out: Path) -> CaseResult:
    """Run one case in a directory of its own in `out`, and diagnose it."""
    directory = out / f"{kind.name}-{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    case = drawn(kind, seed, directory.absolute())
    began = time.monotonic()
    try:
        kind.inject(case)
        found = diagnose(evidence_of(str(directory / kind.target)))
        error = ""
    except (ZbmdError, TimeoutError, AssertionError) as problem:
        found, error = Diagnosis(state="unknown"), f"{type(problem).__name__}: {problem}"
    return _judged(kind, case, found, error, time.monotonic() - began)


def _judged(kind: Kind, case: Drawn, found: Diagnosis, error: str, seconds: float) -> CaseResult:
    root = found.root
    cause = error.split(":")[0] or (HEALTHY if root is None else root.cause.value)
    expected = HEALTHY if kind.cause is None else kind.cause.value
    rank_right = line_right = None
    if kind.names:
        rank_right = (
            root is not None and case.who in root.ranks and len(root.ranks) <= 1 + (kind.name == "bits")
        )
    if kind.line:
        place = None if root is None else place_of(root.place)
        lines = marked_lines(kind.program, kind.line)
        line_right = place is not None and place.line in lines and place.file.endswith(case.script)
    return CaseResult(
        kind=kind.name,
        seed=case.seed,
        ranks=case.ranks,
        who=case.who,
        step=case.step,
        expected=expected,
        found=cause,
        right=cause == expected and rank_right is not False,
        rank_right=rank_right,
        line_right=line_right,
        confidence=0.0 if root is None else root.confidence,
        seconds=round(seconds, 2),
        summary=error[:300] if error else "" if root is None else root.summary[:300],
        place="" if root is None else root.place,
    )


def kinds_here(names: Sequence[str] = ()) -> list[Kind]:
    """Return the kinds of these names, or all that this machine can have."""
    return [
        kind
        for kind in KINDS.values()
        if (not names or kind.name in names) and (kind.name != "oom" or can_limit_memory())
    ]


def read_results(path: Path) -> list[CaseResult]:
    """Return the results in a file; none if there is no file."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=CaseResult) for line in path.read_bytes().splitlines() if line]


def run_corpus(out: Path, kinds: Sequence[Kind], seeds: Iterable[int], *, jobs: int, keep: bool) -> Path:
    """Run the cases that `out` has no result of, `jobs` at a time, in forks; return the file of results."""
    path = out / "results.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    known = {(one.kind, one.seed) for one in read_results(path)}
    left = [(kind, seed) for seed in seeds for kind in kinds if (kind.name, seed) not in known]
    workers = list[int]()
    for number in range(jobs):
        pid = os.fork()
        if not pid:
            _work(left[number::jobs], out, path, keep=keep)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)
    return path


def judge_again(out: Path) -> Path:
    """Diagnose each case again whose directory is kept, and replace the results; return their file."""
    path = out / "results.jsonl"
    results = list[CaseResult]()
    for one in read_results(path):
        kind, directory = KINDS.get(one.kind), out / f"{one.kind}-{one.seed}"
        if kind is None or not (directory / kind.target).exists():
            results.append(one)
            continue
        found = diagnose(evidence_of(str(directory / kind.target)))
        results.append(_judged(kind, drawn(kind, one.seed, directory), found, "", one.seconds))
    write_atomically(path, lambda file: file.writelines(msgspec.json.encode(one) + b"\n" for one in results))
    return path


def _work(cases: Sequence[tuple[Kind, int]], out: Path, path: Path, *, keep: bool) -> None:
    """Run cases in this fork; never returns."""
    try:
        for kind, seed in cases:
            result = run_case(kind, seed, out)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
            mark = "ok " if result.right else "NOT"
            print(
                f"{mark} {kind.name}-{seed}: {result.found}: {result.summary[:120]}",
                file=sys.stderr,
                flush=True,
            )
            if result.right and not keep:
                shutil.rmtree(out / f"{kind.name}-{seed}", ignore_errors=True)
    finally:
        os._exit(0)


def table(results: Sequence[CaseResult]) -> list[str]:
    """Return the confusion table in Markdown: a line a kind, what was found, and how often it was right."""
    lines = [
        "| fault | cases | right | rank right | line right | found |",
        "|---|---|---|---|---|---|",
    ]
    for name in KINDS:
        of_kind = [one for one in results if one.kind == name]
        if not of_kind:
            continue
        found = Counter(one.found for one in of_kind)
        words = ", ".join(f"`{cause}` {count}" for cause, count in found.most_common())
        ranks, places = _share(of_kind, "rank_right"), _share(of_kind, "line_right")
        right = sum(one.right for one in of_kind)
        lines.append(f"| {name} | {len(of_kind)} | {right} | {ranks} | {places} | {words} |")
    right = sum(one.right for one in results)
    share = f"{right / max(1, len(results)):.1%}"
    ranks, places = _share(results, "rank_right"), _share(results, "line_right")
    lines.append(f"| all | {len(results)} | {right} ({share}) | {ranks} | {places} | |")
    return lines


def _share(results: Sequence[CaseResult], name: str) -> str:
    judged = [getattr(one, name) for one in results if getattr(one, name) is not None]
    return f"{sum(judged)} of {len(judged)}" if judged else ""
