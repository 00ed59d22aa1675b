"""Prove the programs of every algorithm for every number of ranks, 1 to 64, and many chunk counts.

    python -m zbmd.tools.lab.proofs.programs                               all: 20 minutes on one core
    python -m zbmd.tools.lab.proofs.programs --algorithm ring --ranks 1:16
    python -m zbmd.tools.lab.proofs.programs --kept proved.txt             resume an earlier sweep
    python -m zbmd.tools.lab.proofs.programs --kept proved.txt --part 2/3  one of three side by side; then
        without --part

`zbmd.collectives.execution.plan` takes what this goes through for proved, up to `SWEPT_RANKS_MAX` ranks,
and verifies other programs when a plan of them is made. So the file that `--kept` names is committed as
`tests/collectives/execution/proved_offline.txt`, and the tests compare its digests with the programs of
today. It holds a line for each operation, algorithm and span of ranks: a digest of all their programs and of
the verifier, how many sets were proved, and the seconds that took. A line for the sources from which all of
them follow saves the tests from building most of them again. Exits with 1 at the first program that is wrong,
and prints its request.
"""

from __future__ import annotations

import ast
import os
import sys
import time
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path

from zbmd.collectives.algorithms import catalogue
from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation, build_all, spec_of
from zbmd.collectives.errors import VerificationError
from zbmd.collectives.execution.plan import SWEPT_RANKS_MAX, swept_requests
from zbmd.collectives.programs import spec, verifier
from zbmd.collectives.programs.program import encode
from zbmd.collectives.programs.verifier import verify
from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.transport.errors import UserError

SPANS = ((1, 8), (9, 16), (17, 32), (33, 48), (49, 64))
"""Numbers of ranks that are proved, and kept, together."""
SOURCES = "sources"
SOURCE_ROOTS = ("build_all", "spec_of", "verify", "encode")
"""The functions that build and verify programs: proofs follow from the sources of all that these use."""
KEPT_FIELDS = 6
"""Of a line of `--kept`: digest, operation, algorithm, ranks, sets proved, seconds."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Unit of proof: what is proved, and kept, at a time."""

    operation: Operation
    algorithm: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.operation.name.lower()} {self.algorithm} {self.first}:{self.last}"

    def digest(self) -> str:
        """Return a digest of all its programs and of what verifies them."""
        digest = blake2b(_verifier_digest(), digest_size=8)
        for n in range(self.first, self.last + 1):
            for request in swept_requests(self.operation, self.algorithm, n):
                digest.update(str(request).encode())
                for program in build_all(request):
                    header = (program.blocks, program.chunks, program.scratch_slots, program.inbox_slots)
                    digest.update(repr(header).encode())
                    digest.update(encode(program).tobytes())
        return digest.hexdigest()

    def prove(self) -> int:
        """Return how many sets of programs were proved; raises `VerificationError` at one that is wrong."""
        proved = 0
        for n in range(self.first, self.last + 1):
            for request in swept_requests(self.operation, self.algorithm, n):
                programs = build_all(request)
                for in_place in (False, True):
                    try:
                        verify(programs, spec_of(request, in_place=in_place))
                    except VerificationError:
                        print(f"wrong: {request}{' in place' if in_place else ''}", file=sys.stderr)
                        raise
                    proved += 1
        return proved


@cache
def _verifier_digest() -> bytes:
    """Digest the code of the verifier and the specifications, without their strings and imports."""
    digest = blake2b(digest_size=16)
    for module in (verifier, spec, catalogue):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = ""
        tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
        digest.update(ast.dump(tree).encode())
    return digest.digest()


def sources_digest() -> str:
    """Return a digest of what counts as proved offline, and of the definitions that build and verify it."""
    digest = blake2b(digest_size=8)
    for definition in definitions([Path(module.__file__ or "").parent for module in (catalogue, verifier)]):
        digest.update(definition.encode())
    for unit in units_of(last=SWEPT_RANKS_MAX):
        for n in range(unit.first, unit.last + 1):
            for request in swept_requests(unit.operation, unit.algorithm, n):
                digest.update(str(request).encode())
    return digest.hexdigest()


def definitions(folders: list[Path]) -> list[str]:
    """Dump what SOURCE_ROOTS use of the modules in `folders`, directly or not: no docstrings, no messages.

    A name stands for every definition of that name, wherever it is: the result may hold too much and never
    lacks something. Statements that bind no name are always among it.
    """
    defined: dict[str, list[ast.stmt]] = {}
    found: list[ast.stmt] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        for statement in ast.parse(path.read_text()).body:
            _without_texts(statement)
            if not (names := _bound(statement)) and not isinstance(
                statement, ast.Import | ast.ImportFrom | ast.Expr
            ):
                found.append(statement)
            for name in names:
                defined.setdefault(name, []).append(statement)
    waiting = [*SOURCE_ROOTS, *(name for statement in found for name in _used(statement))]
    seen: set[str] = set()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            for statement in defined.get(name, []):
                found.append(statement)
                waiting += _used(statement)
    return sorted(map(ast.dump, found))


def _without_texts(statement: ast.stmt) -> None:
    """Empty the docstrings in it and the messages of the exceptions that it raises."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""
        elif isinstance(node, ast.Raise):
            for text in ast.walk(node):
                if isinstance(text, ast.Constant):
                    text.value = ""


def _bound(statement: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines; of an import, those that it renames."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname for alias in names if alias.asname is not None]
        case ast.Assign() | ast.AnnAssign():
            found = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            return [node.id for node in found if isinstance(node.ctx, ast.Store)]
    return []


def _used(statement: ast.stmt) -> list[str]:
    """Return all identifiers in a statement."""
    used: list[str] = []
    for node in ast.walk(statement):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                used.append(name)
    return used


class Kept:
    """Ledger of proofs, in a file that several processes may append to."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self) -> dict[str, tuple[str, int, float]]:
        """Return of each unit its digest, the sets proved and the seconds taken; torn lines are skipped."""
        if self._path is None or not self._path.exists():
            return {}
        found: dict[str, tuple[str, int, float]] = {}
        for line in self._path.read_text().split("\n")[:-1]:
            fields = line.split(" ")
            if len(fields) == KEPT_FIELDS:
                found[" ".join(fields[1:4])] = (fields[0], int(fields[4]), float(fields[5]))
        return found

    def sources(self) -> str:
        """Return the digest of the sources of which everything was proved; "" if there is none."""
        lines = [] if self._path is None else self._path.read_text().split("\n")[:-1]
        return next((line.split(" ")[1] for line in reversed(lines) if line.startswith(f"{SOURCES} ")), "")

    def add_sources(self) -> None:
        """Keep that everything has been proved of the sources of now."""
        self._append(f"{SOURCES} {sources_digest()}")

    def add(self, unit: Unit, digest: str, proved: int, took_s: float) -> None:
        """Keep a unit."""
        self._append(f"{digest} {unit} {proved} {took_s:.3f}")

    def _append(self, text: str) -> None:
        """One write: lines of processes side by side do not mix."""
        if self._path is not None:
            line = f"{text}\n".encode()
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)


def units_of(algorithm: str | None = None, first: int = 1, last: int = 64) -> list[Unit]:
    """Return what there is to prove, small groups first."""
    kinds = sorted((kind for kind in ALGORITHMS if algorithm in (None, kind[1])), key=str)
    spans = [(max(low, first), min(high, last)) for low, high in SPANS]
    return [
        Unit(operation, name, low, high) for low, high in spans if low <= high for operation, name in kinds
    ]


def prove(units: list[Unit], kept: Kept) -> None:
    """Prove all that is not kept. Raises `VerificationError` at the first that is wrong."""
    known = kept.read()
    for unit in units:
        digest = unit.digest()
        if known.get(str(unit), ("",))[0] != digest:
            began_s = time.process_time()
            proved = unit.prove()
            took_s = time.process_time() - began_s
            kept.add(unit, digest, proved, took_s)
            print(f"{unit}: {proved} proved in {took_s:.2f} s", flush=True)


def _bounds(text: str, separator: str) -> tuple[int, int]:
    try:
        first, last = map(int, text.split(separator))
    except ValueError:
        raise UserError(f"{text!r} is not two numbers with a {separator!r} between them") from None
    return first, last


@exit_code_of
def main() -> int:
    """Sweep, one line an operation, algorithm and number of ranks."""
    parser = script_parser("lab.proofs.programs", __doc__)
    parser.add_argument("--algorithm", help="only algorithms of this name")
    parser.add_argument("--ranks", default="1:64", metavar="FIRST:LAST", help="(%(default)s)")
    parser.add_argument("--kept", type=Path, help="file of what has been proved")
    parser.add_argument(
        "--part", default="1/1", metavar="K/M", help="the K-th of M parts of about the same work"
    )
    arguments = parser.parse_args()
    first, last = _bounds(arguments.ranks, ":")
    part, parts = _bounds(arguments.part, "/")
    if not 1 <= part <= parts:
        raise UserError(f"--part {part}/{parts}: the first number is 1..{parts}")
    units, kept = units_of(arguments.algorithm, first, last), Kept(arguments.kept)
    prove([unit for i, unit in enumerate(units) if i % parts == part - 1], kept)
    known = kept.read()
    done = [known[str(unit)] for unit in units if str(unit) in known]
    if arguments.kept is not None:
        if parts == 1 and set(units_of(last=SWEPT_RANKS_MAX)) <= set(units):
            kept.add_sources()
        seconds = sum(took_s for _, _, took_s in done)
        sets = sum(n for _, n, _ in done)
        print(f"{len(done)} of {len(units)} kept: {sets} sets proved, {seconds:.0f} s of CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
