"""The verifier accepts every algorithm of the catalogue and rejects planted wrong programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from zbmd.collectives.algorithms.catalogue import (
    ALGORITHMS,
    ROOTED,
    Operation,
    Request,
    algorithm_of,
    build,
    build_all,
    spec_of,
)
from zbmd.collectives.algorithms.shard_tree import Assignment, assign_shards
from zbmd.collectives.algorithms.trees import two_trees
from zbmd.collectives.errors import Flaw, ProgramError, VerificationError
from zbmd.collectives.programs.program import (
    MAX_RANKS,
    PUB,
    Copy,
    Program,
    Reduce,
    Wait,
    format_program,
    parse_program,
)
from zbmd.collectives.programs.verifier import verify

KINDS = sorted(ALGORITHMS, key=str)
SAMPLED = (14, 15, 16, 17, 19, 22, 24, 29, 31, 32, 33, 47)


def requests_for(operation: Operation, algorithm: str, n: int) -> Iterator[Request]:
    """A spread of requests: few and many chunks, odd numbers, several roots and assignments."""
    base = Request(operation=operation, algorithm=algorithm, n=n)
    if operation is Operation.BARRIER:
        yield base
        return
    counts = (1, 3) if ALGORITHMS[operation, algorithm].eager else (1, n, 2 * n + 1)
    if operation.blocked:
        counts = (base.blocks, 3 * base.blocks)
    for chunks in counts:
        if operation in ROOTED:
            for root in {0, n // 2, n - 1}:
                yield replace(base, chunks=chunks, root=root)
        elif ALGORITHMS[operation, algorithm].over_hosts:
            for hosts in ((), tuple(r // 4 for r in range(n)), tuple(r % 3 for r in range(n))):
                yield replace(base, chunks=chunks, hosts=hosts)
        elif operation is Operation.ALL_REDUCE_SHARDS:
            for shards in (1, 12, 13):
                yield replace(base, chunks=chunks, shards=shards, assignment=assign_shards(shards, n))
        else:
            yield replace(base, chunks=chunks)


def programs_of(request: Request) -> list[Program]:
    return build_all(request)


def check(request: Request) -> None:
    programs = programs_of(request)
    for program in programs[:3]:
        assert parse_program(format_program(program)) == program
    for in_place in (False, True):
        verify(programs, spec_of(request, in_place=in_place))


@pytest.mark.parametrize("n", range(1, 14))
@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
def test_every_algorithm_is_right(operation: Operation, algorithm: str, n: int) -> None:
    for request in requests_for(operation, algorithm, n):
        check(request)


@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
def test_every_algorithm_is_right_for_more_ranks(operation: Operation, algorithm: str) -> None:
    """Some numbers of ranks up to 64, some chunk counts: `tools/lab/proofs/programs.py` goes through all."""
    for n in SAMPLED[len(algorithm) % 3 :: 3]:
        requests = list(requests_for(operation, algorithm, n))
        request = requests[n % len(requests)]
        verify(programs_of(request), spec_of(request, in_place=n % 2 == 0))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_short_rings_need_no_credits(n: int) -> None:
    for chunks in range(1, 40):
        check(Request(operation=Operation.ALL_REDUCE, algorithm="ring", n=n, chunks=chunks))


@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
def test_every_algorithm_is_right_for_64_ranks(operation: Operation, algorithm: str) -> None:
    eager = ALGORITHMS[operation, algorithm].eager
    request = Request(operation=operation, algorithm=algorithm, n=64, root=37)
    chunks = request.blocks if operation.blocked else (1 if eager else 5)
    request = replace(request, chunks=chunks)
    if operation is Operation.ALL_REDUCE_SHARDS:
        request = replace(request, shards=100, assignment=assign_shards(100, 64))
    verify(programs_of(request), spec_of(request))


@pytest.mark.parametrize(
    "assignment",
    [
        ((0, 12), (12, 12), (12, 12)),
        ((0, 0), (0, 12), (12, 12)),
        ((0, 1), (1, 11), (11, 12)),
        ((5, 12), (0, 3), (3, 5)),
        ((7, 12), (0, 0), (0, 7)),
    ],
)
def test_the_shard_tree_is_right_for_uneven_assignments(assignment: Assignment) -> None:
    check(
        Request(
            operation=Operation.ALL_REDUCE_SHARDS,
            algorithm="shard_tree",
            n=3,
            chunks=7,
            shards=12,
            assignment=assignment,
        )
    )


@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_peers_read_only_what_an_algorithm_exposes(operation: Operation, algorithm: str, n: int) -> None:
    for request in requests_for(operation, algorithm, n):
        for program in programs_of(request):
            for instruction in program.instructions:
                if isinstance(instruction, Reduce | Copy):
                    sources = (
                        (instruction.a, instruction.b)
                        if isinstance(instruction, Reduce)
                        else (instruction.src,)
                    )
                    for source in sources:
                        if source.rank != program.rank and source.buffer != PUB:
                            exposed = algorithm_of(request).exposes(request, source.rank)
                            assert source.buffer in exposed, f"{program.rank}: {instruction}"


@pytest.mark.parametrize("operation", [of for of, name in KINDS if name == "eager"])
def test_nothing_that_is_sent_can_be_left_out(operation: Operation) -> None:
    for request in requests_for(operation, "eager", 3):
        programs, spec = programs_of(request), spec_of(request)
        sends = spec.sent
        assert sends is not None
        for pair in itertools.permutations(range(3), 2):
            chunks = sends(*pair)
            for fewer in (chunks[1:], chunks[:-1]) if chunks else ():
                less = partial(but_for, sends, pair, fewer)
                with pytest.raises(VerificationError) as caught:
                    verify(programs, replace(spec, sent=less))
                assert caught.value.flaw is Flaw.NOT_ACCESSIBLE


def but_for(
    sends: Callable[[int, int], range], pair: tuple[int, int], fewer: range, rank: int, reader: int
) -> range:
    return fewer if (rank, reader) == pair else sends(rank, reader)


@pytest.mark.parametrize(("operation", "algorithm"), KINDS)
def test_no_instruction_can_be_left_out(operation: Operation, algorithm: str) -> None:
    """But for waits, which another order of events may imply."""
    for request in requests_for(operation, algorithm, 3):
        programs = programs_of(request)
        for program in programs:
            for index, left_out in enumerate(program.instructions):
                if isinstance(left_out, Wait):
                    continue
                kept = program.instructions[:index] + program.instructions[index + 1 :]
                broken = [replace(p, instructions=kept) if p is program else p for p in programs]
                with pytest.raises(VerificationError):
                    verify(broken, spec_of(request))


@pytest.mark.parametrize(
    "request_",
    [
        Request(operation=Operation.ALL_REDUCE, algorithm="magic", n=2),
        Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=0),
        Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=MAX_RANKS + 1),
        Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=2, chunks=0),
        Request(operation=Operation.ALL_GATHER, algorithm="direct", n=2, chunks=3),
        Request(operation=Operation.BROADCAST, algorithm="tree", n=2, root=2),
        Request(operation=Operation.ALL_REDUCE_SHARDS, algorithm="shard_tree", n=2, shards=0),
        Request(
            operation=Operation.ALL_REDUCE_SHARDS, algorithm="shard_tree", n=2, shards=2, assignment=((0, 2),)
        ),
        Request(
            operation=Operation.ALL_REDUCE_SHARDS,
            algorithm="shard_tree",
            n=2,
            shards=4,
            assignment=((0, 2), (1, 4)),
        ),
        Request(
            operation=Operation.ALL_REDUCE_SHARDS,
            algorithm="shard_tree",
            n=2,
            shards=4,
            assignment=((0, 2), (2, 3)),
        ),
    ],
)
def test_a_bad_request_is_refused(request_: Request) -> None:
    with pytest.raises(ProgramError):
        build(request_, 0)


def test_nobody_has_two_children_in_both_of_two_trees() -> None:
    for n in range(1, 65):
        first, second = two_trees(n)
        for tree in (first, second):
            assert sorted(r for of in tree.children for r in of) == [r for r in range(n) if r != tree.root]
            assert tree.height <= max(1, n.bit_length())
        inner = [{r for r in range(n) if len(tree.children[r]) == 2} for tree in (first, second)]
        assert not inner[0] & inner[1]
