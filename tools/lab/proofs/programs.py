"""Prove the programs of every algorithm for every number of ranks, 1 to 64, and many chunk counts.

    python -m zbmd.tools.lab.proofs.programs                               all: 15 minutes on one core
    python -m zbmd.tools.lab.proofs.programs --algorithm ring --ranks 1:16
    python -m zbmd.tools.lab.proofs.programs --kept proved.txt             resume an earlier sweep
    python -m zbmd.tools.lab.proofs.programs --kept proved.txt --part 2/3  one of three side by side

`tests/collectives/programs/test_verifier.py` samples what this goes through. Exits with 1 at the first
program that is wrong, and prints its request. The file that `--kept` names holds a line for each operation,
algorithm and number of ranks, with a digest of the sources of programs and verifier: what was proved of other
sources is proved again.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from zbmd.collectives import algorithms
from zbmd.collectives.algorithms import ALGORITHMS, ROOTED, Operation, Request, build_all, spec_of
from zbmd.collectives.algorithms.shard_tree import assign_shards
from zbmd.collectives.errors import VerificationError
from zbmd.collectives.programs import program, spec, verifier
from zbmd.collectives.programs.verifier import verify
from zbmd.transport.errors import UserError

CHUNKS_ODD = (1, 2, 3, 7)
SHARDS = (1, 13, 64)
SWEPT_MAX = 64  # ranks; larger groups are looked into by `tests/collectives` here and there
KEPT_FIELDS = 6
"""Of a line of `--kept`: digest, operation, algorithm, ranks, sets proved, seconds."""


def requests(operation: Operation, algorithm: str, n: int) -> Iterator[Request]:
    """Few and many chunks, odd numbers, the first, a middle and the last root, hosts of several sizes.

    An eager operation that is not blocked always runs as one chunk (`plan.chunks_for`).
    """
    base = Request(operation=operation, algorithm=algorithm, n=n)
    entry = ALGORITHMS[operation, algorithm]
    if operation is Operation.BARRIER:
        counts: tuple[int, ...] = (1,)
    elif entry.blocked:
        counts = (base.blocks, 3 * base.blocks) if n <= SWEPT_MAX // 4 else (base.blocks,)
    elif entry.eager:
        counts = CHUNKS_ODD[:3]
    else:
        counts = (*CHUNKS_ODD, n, 2 * n + 1)
    for chunks in dict.fromkeys(counts):
        request = replace(base, chunks=chunks)
        if operation is Operation.ALL_REDUCE_SHARDS:
            for shards in SHARDS:
                yield replace(request, shards=shards, assignment=assign_shards(shards, n))
        elif ALGORITHMS[operation, algorithm].over_hosts:
            for ranks_a_host in (1, 3, 8):
                yield replace(request, hosts=tuple(r // ranks_a_host for r in range(n)))
        elif operation in ROOTED:
            for root in {0, n // 2, n - 1}:
                yield replace(request, root=root)
        else:
            yield request


def sweep(operation: Operation, algorithm: str, ranks: range) -> int:
    """How many sets of programs were proved. Raises `VerificationError` at the first that is wrong."""
    proved = 0
    for n in ranks:
        for request in requests(operation, algorithm, n):
            programs = build_all(request)
            for in_place in (False, True):
                try:
                    verify(programs, spec_of(request, in_place=in_place))
                except VerificationError:
                    print(f"wrong: {request}{' in place' if in_place else ''}", file=sys.stderr)
                    raise
                proved += 1
    return proved


@dataclass(frozen=True, slots=True)
class Unit:
    """What is proved, and kept, at a time."""

    operation: Operation
    algorithm: str
    n: int

    def __str__(self) -> str:
        return f"{self.operation.name.lower()} {self.algorithm} {self.n}"


def sources_digest() -> str:
    """Of all that decides what a proof says: programs, specifications, the verifier and this sweep."""
    paths = [Path(module.__file__ or "") for module in (program, spec, verifier)]
    paths += sorted(Path(algorithms.__file__).parent.glob("*.py"))
    digest = blake2b(digest_size=8)
    for path in paths:
        digest.update(path.read_bytes())
    for function in (requests, sweep):
        digest.update(inspect.getsource(function).encode())
    return digest.hexdigest()


class Kept:
    """What has been proved, in a file that several processes may append to."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._digest = sources_digest()

    def read(self) -> dict[str, tuple[int, float]]:
        """Of each unit proved with these sources: how many sets, in how many seconds. A torn line is none."""
        if self._path is None or not self._path.exists():
            return {}
        found: dict[str, tuple[int, float]] = {}
        for line in self._path.read_text().split("\n")[:-1]:
            fields = line.split(" ")
            if len(fields) == KEPT_FIELDS and fields[0] == self._digest:
                found[" ".join(fields[1:4])] = (int(fields[4]), float(fields[5]))
        return found

    def add(self, unit: Unit, proved: int, took_s: float) -> None:
        """Keep a unit. One write: lines of processes side by side do not mix."""
        if self._path is not None:
            line = f"{self._digest} {unit} {proved} {took_s:.3f}\n".encode()
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)


def units_of(algorithm: str | None, ranks: range) -> list[Unit]:
    """What there is to prove, small groups first."""
    kinds = sorted((kind for kind in ALGORITHMS if algorithm in (None, kind[1])), key=str)
    return [Unit(operation, name, n) for n in ranks for operation, name in kinds]


def prove(units: list[Unit], kept: Kept) -> None:
    """Prove all that is not kept. Raises `VerificationError` at the first that is wrong."""
    known = kept.read()
    for unit in units:
        if str(unit) not in known:
            began_s = time.process_time()
            proved = sweep(unit.operation, unit.algorithm, range(unit.n, unit.n + 1))
            took_s = time.process_time() - began_s
            kept.add(unit, proved, took_s)
            print(f"{unit}: {proved} proved in {took_s:.2f} s", flush=True)


def _bounds(text: str, separator: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(separator))
    except ValueError:
        raise UserError(f"{text!r} is not two numbers with a {separator!r} between them") from None
    return first, last


def main() -> int:
    """Sweep, one line an operation, algorithm and number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--algorithm", help="only algorithms of this name")
    parser.add_argument("--ranks", default=f"1:{SWEPT_MAX}", metavar="FIRST:LAST", help="(%(default)s)")
    parser.add_argument("--kept", type=Path, help="file of what has been proved")
    parser.add_argument(
        "--part", default="1/1", metavar="K/M", help="the K-th of M parts of about the same work"
    )
    arguments = parser.parse_args()
    try:
        first, last = _bounds(arguments.ranks, ":")
        part, parts = _bounds(arguments.part, "/")
        if not 1 <= part <= parts:
            raise UserError(f"--part {part}/{parts}: the first number is 1..{parts}")
        units, kept = units_of(arguments.algorithm, range(first, last + 1)), Kept(arguments.kept)
        prove([unit for i, unit in enumerate(units) if (i + unit.n) % parts == part - 1], kept)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except VerificationError as error:
        print(error, file=sys.stderr)
        return 1
    known = kept.read()
    done = [known[str(unit)] for unit in units if str(unit) in known]
    if arguments.kept is not None:
        seconds = sum(took_s for _, took_s in done)
        print(
            f"{len(done)} of {len(units)} kept: {sum(n for n, _ in done)} sets proved, {seconds:.0f} s of CPU"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
