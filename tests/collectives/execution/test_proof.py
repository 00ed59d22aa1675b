"""Programs are proved before they run: offline, or when the first plan of them is made, once."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from zbmd.collectives.algorithms import catalogue
from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Algorithm, Operation, Request
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.communicator.planning import plan_call
from zbmd.collectives.errors import Flaw, ProgramError, VerificationError
from zbmd.collectives.execution import plan
from zbmd.collectives.execution.plan import (
    CHUNK_BYTES,
    EACH_RANKS_MAX,
    SWEPT_RANKS_MAX,
    ProofKind,
    plan_of,
    prove,
    swept_requests,
)
from zbmd.collectives.programs.program import Program, Wait
from zbmd.tools.lab.proofs.programs import SPANS, Kept, definitions, sources_digest, units_of

RunRanks = Callable[..., list[Any]]
KEPT = Path(__file__).with_name("proved_offline.txt")
DIRECT = (Operation.ALL_REDUCE, "direct")
UNSWEPT = 13
"""Chunks that are not swept."""


@pytest.fixture
def nothing_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "SWEPT_RANKS_MAX", 0)
    for cached in (plan._prove, plan_of, plan_call):
        cached.cache_clear()


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithms of what was verified, in order."""
    names: list[str] = []
    real = plan.verify

    def verify(programs: Any, spec: Any) -> None:
        names.append(programs[0].algorithm)
        real(programs, spec)

    monkeypatch.setattr(plan, "verify", verify)
    return names


def without_waits(build: Callable[[Request, int], Program]) -> Callable[[Request, int], Program]:
    def flawed(request: Request, rank: int) -> Program:
        program = build(request, rank)
        kept = tuple(i for i in program.instructions if not isinstance(i, Wait))
        return replace(program, instructions=kept)

    return flawed


def flawed_catalogue(kind: tuple[Operation, str]) -> Mapping[tuple[Operation, str], Algorithm]:
    entry = ALGORITHMS[kind]
    return MappingProxyType({**ALGORITHMS, kind: replace(entry, build=without_waits(entry.build))})


@pytest.mark.parametrize(("first", "last"), SPANS[:1])
def test_what_counts_as_proved_offline_was_proved_of_these_programs(first: int, last: int) -> None:
    check_kept(first, last)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "last"), SPANS[1:4])
def test_what_counts_as_proved_offline_was_proved_of_larger_groups(first: int, last: int) -> None:
    check_kept(first, last)


def check_kept(first: int, last: int) -> None:
    """If this fails, programs or verifier have changed: run `tools/lab/proofs/programs.py --kept` on it."""
    assert last <= SWEPT_RANKS_MAX
    kept, units = Kept(KEPT), units_of(first=first, last=last)
    known = kept.read()
    if kept.sources() == sources_digest():  # what follows from them was proved: a sample is built again
        units = random.sample(units, 2)
    for unit in units:
        digest, sets, _ = known[str(unit)]
        assert digest == unit.digest(), f"{unit} has changed since it was proved"
        assert sets > 0


@pytest.mark.parametrize(
    ("old", "new", "is_other"),
    [
        ("def check_assignment(", "def unused() -> None: ...\n\n\ndef check_assignment(", False),
        ("import annotations", "import annotations\n\nimport json", False),
        (' raise ProgramError(f"', ' raise ProgramError(f"another message: ', False),
        ("(rank + 1) * shards", "(rank + 2) * shards", False),
        ("if not 1 <= shards", "if not 2 <= shards", True),
    ],
)
def test_only_what_programs_follow_from_counts_as_their_sources(
    old: str, new: str, is_other: bool, tmp_path: Path
) -> None:
    folders = [tmp_path / "algorithms", tmp_path / "programs"]
    for folder in folders:
        shutil.copytree(Path(catalogue.__file__).parents[1] / folder.name, folder)
    before = definitions(folders)
    changed = folders[0] / "shard_tree.py"
    text = changed.read_text()
    assert old in text
    changed.write_text(text.replace(old, new, 1))
    assert (definitions(folders) != before) == is_other


def test_what_was_swept_is_not_verified_again(verified: list[str]) -> None:
    for n in (2, 3, SWEPT_RANKS_MAX):
        for operation, algorithm in ALGORITHMS:
            for request in swept_requests(operation, algorithm, n):
                assert prove(request).kind is ProofKind.OFFLINE
    assert verified == []


@pytest.mark.parametrize("n", [1, 2, 5, 8])
@pytest.mark.parametrize(("operation", "algorithm"), sorted(ALGORITHMS, key=str))
def test_what_was_not_swept_is_verified_once(
    operation: Operation, algorithm: str, n: int, verified: list[str]
) -> None:
    blank = Request(operation=operation, algorithm=algorithm, n=n)
    (request, *_) = swept_requests(operation, algorithm, n)
    chunks = 1 if operation is Operation.BARRIER else blank.blocks * UNSWEPT
    request = replace(request, chunks=chunks)
    first, second = (plan_of(request, rank).proof for rank in (0, n - 1))
    assert first == second == prove(request)
    if operation is Operation.BARRIER:
        assert first.kind is ProofKind.OFFLINE and verified == []
    else:
        assert first.kind is ProofKind.NOW and first.took_ms > 0
        assert len(verified) == 2, "in place and out of place, once for all ranks"


def test_too_much_work_is_not_proved_and_a_warning_says_so(
    verified: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for n, chunks in ((128, 512), (1022, 1)):
        request = Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=n, chunks=chunks)
        assert prove(request).kind is ProofKind.NOT_PROVED
        assert prove(request).kind is ProofKind.NOT_PROVED
    assert capsys.readouterr().out.count("plan not proved") == 2
    assert verified == []


def test_rank_0_proves_for_all_of_a_large_group(verified: list[str]) -> None:
    request = Request(operation=Operation.ALL_GATHER, algorithm="direct", n=EACH_RANKS_MAX + 1)
    request = replace(request, chunks=request.blocks)
    assert plan_of(request, 1).proof.kind is ProofKind.BY_RANK_0
    assert verified == []
    assert plan_of(request, 0).proof.kind is ProofKind.NOW
    assert len(verified) == 2, "in place and out of place"


def test_a_bad_request_is_refused_as_such() -> None:
    with pytest.raises(ProgramError):
        prove(Request(operation=Operation.ALL_REDUCE, algorithm="magic", n=2))


def test_a_flawed_program_is_refused_before_any_byte_moves(
    run_ranks: RunRanks, nothing_swept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "ALGORITHMS", flawed_catalogue(DIRECT))

    def body(p: Any) -> list[Any]:
        c: Communicator = p.communicator()
        x = np.full(3 * CHUNK_BYTES, p.rank, np.float32)
        flaws: list[str] = []
        for _ in range(2):
            with pytest.raises(VerificationError) as refused:
                c.all_reduce(x, algorithm="direct", deadline_ns=p.soon())
            assert (x == p.rank).all()
            flaws.append(refused.value.flaw.name)
        assert c.sequence == 0, "nothing has begun"
        c.all_reduce(x, algorithm="ring", deadline_ns=p.soon())
        return [*flaws, float(x[0])]

    assert run_ranks(2, body) == [[Flaw.UNINITIALISED.name] * 2 + [1.0]] * 2


def test_a_call_of_a_known_shape_verifies_nothing(
    run_ranks: RunRanks, nothing_swept: None, verified: list[str]
) -> None:
    def body(p: Any) -> list[int]:
        c: Communicator = p.communicator()
        x = p.segment.arena.empty(3 * CHUNK_BYTES, np.float32)
        x[:] = 1
        counts: list[int] = []
        for _ in range(3):
            c.all_reduce(x, algorithm="direct", deadline_ns=p.soon())
            counts.append(len(verified))
        return [*counts, c.fast_path.taken]

    assert run_ranks(3, body) == [[2, 2, 2, 2]] * 3, "the latter two calls took the fast path"
