"""Run PyTorch's own tests of distributed backends over gloo and over zbmd, and print a table.

The tests are those that torch installs (`torch.testing._internal.distributed.distributed_test`); they need
expecttest (`pip install expecttest`). Each runs on real processes that `zbmd-node run` starts. Results are
kept in a file: a second call goes on where the first one ended. Exits with 1 if a test passes on gloo alone,
and 2 for bad options.

examples:
  python -m zbmd.tools.lab.torch_suite                        all tests, 4 ranks
  python -m zbmd.tools.lab.torch_suite --only all_reduce      those whose names have this in them
  python -m zbmd.tools.lab.torch_suite --only ddp --again     forget what is known of them, and run them
  python -m zbmd.tools.lab.torch_suite --backends zbmd --failures     and print why tests fail
  python -m zbmd.tools.lab.torch_suite --list                 the names
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from zbmd.tools.cli.options import add_ranks, exit_code_of, listed, script_parser
from zbmd.tools.lab.torch_suite.cases import RANKS, load, names_of
from zbmd.tools.lab.torch_suite.jobs import BACKENDS, Result, run_all
from zbmd.transport.errors import UserError

LIMIT_S: Final = 150.0
RESULTS: Final = Path("torch_suite.jsonl")
LINES_OF_A_FAILURE: Final = 25
Known = dict[tuple[str, str], Result]
"""Results by backend and test."""


def read_results(path: Path) -> Known:
    """Return what earlier calls found. Raises `UserError` if the file is not one of theirs."""
    if not path.exists():
        return {}
    try:
        rows = [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is not a file of results ({error}): move it, or use --results") from None
    return {(row.backend, row.test): row for row in rows}


def passing_on_gloo_alone(known: Known, tests: Sequence[str]) -> list[str]:
    """Return the tests that pass on gloo and fail, or are skipped, on zbmd."""
    return [
        test for test in tests if _verdict(known, "gloo", test) == "passed" != _verdict(known, "zbmd", test)
    ]


def table(known: Known, tests: Sequence[str]) -> Table:
    """Return a row for each test that ran on a backend."""
    made = Table(title="PyTorch's tests of distributed backends")
    for heading in ("test", *BACKENDS):
        made.add_column(heading, overflow="fold")
    for test in tests:
        verdicts = [_verdict(known, backend, test) for backend in BACKENDS]
        if set(verdicts) - {"skipped", "–"}:
            made.add_row(test, *verdicts)
    return made


def summary(known: Known, tests: Sequence[str]) -> str:
    """Return how many tests passed, failed and were skipped, by backend."""
    lines: list[str] = []
    for backend in BACKENDS:
        verdicts = [_verdict(known, backend, test) for test in tests]
        counts = [f"{verdicts.count(each)} {each}" for each in ("passed", "failed", "skipped")]
        lines.append(f"{backend}: {', '.join(counts)}")
    return "\n".join(lines)


def _verdict(known: Mapping[tuple[str, str], Result], backend: str, test: str) -> str:
    result = known.get((backend, test))
    return "–" if result is None else result.verdict


class Report:
    """Adds the results of a backend to what is known and to the file, and prints them as they come."""

    def __init__(self, known: Known, backend: str, count: int, options: argparse.Namespace) -> None:
        self._known, self._options = known, options
        self._backend, self._count, self._done = backend, count, 0
        self._began = time.monotonic()

    def __call__(self, result: Result) -> None:
        """Add a result."""
        self._done += 1
        self._known[result.backend, result.test] = result
        with self._options.results.open("ab") as out:
            out.write(msgspec.json.encode(result) + b"\n")
        spent, place = time.monotonic() - self._began, f"{self._done}/{self._count}"
        print(f"{spent:6.0f} s  {self._backend} {place}  {result.test}: {result.verdict}", flush=True)
        if self._options.failures and result.verdict == "failed":
            print("\n".join(result.detail.splitlines()[-LINES_OF_A_FAILURE:]), flush=True)


def run(tests: Sequence[str], backends: Sequence[str], known: Known, options: argparse.Namespace) -> None:
    """Run what is not known yet."""
    log = options.results.with_suffix(".log")
    for backend in backends:
        left = [test for test in tests if (backend, test) not in known]
        report = Report(known, backend, len(left), options)
        run_all(backend, left, ranks=options.ranks, limit_s=options.limit, log=log, report=report)


@exit_code_of
def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = script_parser("lab.torch_suite", __doc__)
    add_ranks(parser, RANKS)
    parser.add_argument("--only", default="", metavar="TEXT", help="tests with this in their names")
    parser.add_argument(
        "--backends", action="append", default=[], metavar="A,B", help=f"some of {', '.join(BACKENDS)}"
    )
    help_text = "seconds for one test (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help=help_text)
    help_text = "file of results; what ranks print is beside it, in .log (default: %(default)s)"
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help=help_text)
    parser.add_argument("--again", action="store_true", help="run tests whose results are known, too")
    parser.add_argument("--failures", action="store_true", help="print the ends of tracebacks")
    parser.add_argument("--list", action="store_true", help="print the names, and run none")
    options = parser.parse_args(arguments)
    backends = listed("--backends", options.backends, BACKENDS) or BACKENDS
    tests = [name for name in names_of(load("gloo")) if options.only in name]
    if not tests:
        raise UserError(f"--only: no test has {options.only!r} in its name; --list prints the names")
    if options.list:
        print("\n".join(tests))
        return 0
    known = read_results(options.results)
    if options.again:
        known = {key: row for key, row in known.items() if key[0] not in backends or key[1] not in tests}
    run(tests, backends, known, options)
    Console().print(table(known, tests))
    print(summary(known, tests))
    alone = passing_on_gloo_alone(known, tests)
    for test in alone:
        print(f"passes on gloo alone: {test}")
    return 1 if alone and set(backends) == set(BACKENDS) else 0


if __name__ == "__main__":
    sys.exit(main())
