"""The verifier rejects planted wrong programs, of each family of algorithms, wrong in one way each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from zbmd.collectives.algorithms.catalogue import Operation, Request, build, build_all, spec_of
from zbmd.collectives.errors import Flaw, VerificationError
from zbmd.collectives.programs.program import (
    IN,
    INBOX,
    OUT,
    SCRATCH,
    Copy,
    Finish,
    Instruction,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    Wait,
)
from zbmd.collectives.programs.verifier import verify


def programs_of(request: Request) -> list[Program]:
    return build_all(request)


# Each takes right programs and breaks them in one way.

Programs = list[Program]
DIRECT = Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=3, chunks=6)
RING = Request(operation=Operation.ALL_REDUCE, algorithm="ring", n=6, chunks=18)
TREE = Request(operation=Operation.BROADCAST, algorithm="tree", n=4, chunks=2, root=1)
GATHER = Request(operation=Operation.ALL_GATHER, algorithm="direct", n=3, chunks=6)
TO_ROOT = Request(operation=Operation.GATHER, algorithm="direct", n=3, chunks=6, root=1)
FROM_ROOT = Request(operation=Operation.SCATTER, algorithm="direct", n=3, chunks=3, root=1)
REDUCE = Request(operation=Operation.REDUCE, algorithm="direct", n=3, chunks=2, root=1)
EXCHANGE = Request(operation=Operation.ALL_TO_ALL, algorithm="direct", n=3, chunks=9)
BOTH_WAYS = Request(operation=Operation.ALL_REDUCE, algorithm="bidirectional_ring", n=5, chunks=20)
HALVING = Request(operation=Operation.ALL_REDUCE, algorithm="halving_doubling", n=6, chunks=12)
UP_AND_DOWN = Request(operation=Operation.ALL_REDUCE, algorithm="tree", n=7, chunks=5)
TWO_TREES = Request(operation=Operation.ALL_REDUCE, algorithm="double_tree", n=6, chunks=6)
BRUCK = Request(operation=Operation.ALL_TO_ALL, algorithm="bruck", n=5, chunks=25)
HOSTS = Request(
    operation=Operation.ALL_REDUCE, algorithm="hierarchical", n=5, chunks=8, hosts=(0, 0, 1, 1, 1)
)
SHARED = Request(operation=Operation.REDUCE, algorithm="shared", n=3, chunks=30)
SWAP = Request(operation=Operation.ALL_REDUCE, algorithm="swap", n=2, chunks=20)
BARRIER = Request(operation=Operation.BARRIER, algorithm="dissemination", n=5)
SHARDS = Request(
    operation=Operation.ALL_REDUCE_SHARDS,
    algorithm="shard_tree",
    n=3,
    chunks=3,
    shards=8,
    assignment=((0, 3), (3, 6), (6, 8)),
)


def find(program: Program, kind: type[Instruction], nth: int = 0) -> int:
    """The index of the nth instruction of a kind; negative counts from the end."""
    return [i for i, found in enumerate(program.instructions) if isinstance(found, kind)][nth]


def edit(programs: Programs, rank: int, change: Callable[[list[Instruction]], None]) -> Programs:
    instructions = list(programs[rank].instructions)
    change(instructions)
    return [replace(p, instructions=tuple(instructions)) if p.rank == rank else p for p in programs]


def put_at(programs: Programs, rank: int, index: int, *new: Instruction, drop: int = 1) -> Programs:
    return edit(
        programs, rank, lambda instructions: instructions.__setitem__(slice(index, index + drop), new)
    )


def dropped_wait(p: Programs) -> Programs:
    return put_at(p, 1, find(p[1], Wait))


def missing_notify(p: Programs) -> Programs:
    return put_at(p, 2, find(p[2], Notify))


def swapped_chunk(p: Programs) -> Programs:
    at = find(p[0], Copy)
    return put_at(p, 0, at, Copy(2, Operand(0, OUT, 2), Operand(1, OUT, 3)))


def chunk_done_twice(p: Programs) -> Programs:
    at = find(p[0], Copy, 1)
    return put_at(p, 0, at, p[0].instructions[find(p[0], Copy)])


def notify_wrong_peer(p: Programs) -> Programs:
    return put_at(p, 0, find(p[0], Notify), Notify(2))


def copy_from_wrong_peer(p: Programs) -> Programs:
    at = find(p[0], Copy)
    return put_at(p, 0, at, Copy(2, Operand(0, OUT, 2), Operand(2, OUT, 2)))


def input_taken_twice(p: Programs) -> Programs:
    at = find(p[0], Reduce)
    return put_at(p, 0, at, Reduce(0, Operand(0, SCRATCH, 0), Operand(0, IN, 0), Operand(0, IN, 0)))


def contribution_left_out(p: Programs) -> Programs:
    at = find(p[0], Reduce, 1)
    return put_at(p, 0, at, Copy(0, Operand(0, OUT, 0), Operand(0, SCRATCH, 0)))


def reversed_on_one_rank(p: Programs) -> Programs:
    at = find(p[1], Reduce)
    return put_at(p, 1, at, Reduce(2, Operand(1, SCRATCH, 0), Operand(1, IN, 2), Operand(0, IN, 2)))


def total_copied_from_scratch(p: Programs) -> Programs:
    at = find(p[0], Reduce, 1)
    last = p[0].instructions[at]
    assert isinstance(last, Reduce) and last.dst.buffer == OUT
    scratch = Operand(0, SCRATCH, 0)
    return put_at(p, 0, at, replace(last, dst=scratch), Copy(last.chunk, last.dst, scratch))


def gathered_at_another_root(p: Programs) -> Programs:
    return build_all(replace(TO_ROOT, root=2))


def root_lets_go_too_early(p: Programs) -> Programs:
    at = find(p[1], Notify)
    return put_at(put_at(p, 1, at), 1, 0, p[1].instructions[at], drop=0)


def leaves_before_the_root_has_read(p: Programs) -> Programs:
    return put_at(p, 0, find(p[0], Wait))


def scattered_block_of_a_neighbour(p: Programs) -> Programs:
    at = find(p[2], Copy)
    copy = p[2].instructions[at]
    assert isinstance(copy, Copy)
    return put_at(p, 2, at, Copy(0, Operand(2, OUT, 0), Operand(1, IN, 0)))


def exchanged_the_wrong_way_round(p: Programs) -> Programs:
    """Rank 0 fetches what rank 1 sends to itself."""
    at = find(p[0], Copy, 1)
    return put_at(p, 0, at, Copy(4, Operand(0, OUT, 4), Operand(1, IN, 4)))


def exchange_block_from_a_third(p: Programs) -> Programs:
    at = find(p[0], Copy, 1)
    copy = p[0].instructions[at]
    assert isinstance(copy, Copy)
    return put_at(p, 0, at, replace(copy, src=copy.src._replace(rank=2)))


def put_into_the_other_rings_slot(p: Programs) -> Programs:
    at = find(p[0], Put, 1)
    put = p[0].instructions[at]
    assert isinstance(put, Put)
    return put_at(p, 0, at, replace(put, dst=put.dst._replace(number=put.dst.number % 4)))


def one_slot_for_both_turns(p: Programs) -> Programs:
    """Rank 1's second put of a round goes where its first may still lie."""
    at = find(p[1], Put, 1)
    put = p[1].instructions[at]
    assert isinstance(put, Put)
    return put_at(p, 1, at, replace(put, dst=put.dst._replace(number=put.dst.number - 1)))


def one_chunk_further_ahead(p: Programs) -> Programs:
    """Rank 1 puts its tenth chunk a turn too early, into a slot that its peer may still read."""
    puts = [find(p[1], Put, nth) for nth in (8, 9)]
    late = p[1].instructions[puts[1]]
    programs = put_at(p, 1, puts[1])
    return put_at(programs, 1, puts[0] + 1, late, drop=0)


def neighbour_not_folded_in(p: Programs) -> Programs:
    at = find(p[1], Reduce)
    fold = p[1].instructions[at]
    assert isinstance(fold, Reduce) and fold.a.rank == 0
    return put_at(p, 1, at, Copy(fold.chunk, fold.dst, fold.b))


def halves_in_another_order(p: Programs) -> Programs:
    at = find(p[3], Reduce)
    add = p[3].instructions[at]
    assert isinstance(add, Reduce)
    return put_at(p, 3, at, replace(add, a=add.b, b=add.a))


def read_before_the_neighbour_has_doubled(p: Programs) -> Programs:
    first = find(p[0], Copy)
    wait, copy = p[0].instructions[first - 1], p[0].instructions[first]
    return put_at(p, 0, first - 1, copy, wait, drop=2)


def second_child_left_out(p: Programs) -> Programs:
    first, second = p[0].instructions[find(p[0], Reduce)], find(p[0], Reduce, 1)
    assert isinstance(first, Reduce)
    broken = put_at(p, 0, second)
    return put_at(broken, 0, find(p[0], Reduce), replace(first, dst=Operand(0, OUT, first.chunk)))


def childs_slot_freed_before_it_was_added(p: Programs) -> Programs:
    at = find(p[1], Notify)
    assert isinstance(p[1].instructions[at - 1], Reduce)
    return put_at(p, 1, at - 1, p[1].instructions[at], p[1].instructions[at - 1], drop=2)


def results_slot_freed_before_it_was_taken(p: Programs) -> Programs:
    at = find(p[1], Copy)
    assert isinstance(p[1].instructions[at + 1], Notify)
    return put_at(p, 1, at, p[1].instructions[at + 1], p[1].instructions[at], drop=2)


def share_copied_and_not_finished(p: Programs) -> Programs:
    at = find(p[0], Finish)
    finish = p[0].instructions[at]
    assert isinstance(finish, Finish)
    return put_at(p, 0, at, Copy(finish.chunk, finish.dst, finish.src))


def share_finished_before_all_is_in_it(p: Programs) -> Programs:
    at = find(p[1], Put)
    put, total = p[1].instructions[at], p[1].instructions[at - 1]
    assert isinstance(put, Put) and isinstance(total, Reduce)
    return put_at(p, 1, at - 1, replace(put, src=total.a), drop=2)


def input_finished(p: Programs) -> Programs:
    at = find(p[0], Finish)
    finish = p[0].instructions[at]
    assert isinstance(finish, Finish)
    return put_at(p, 0, at, replace(finish, src=Operand(0, IN, finish.chunk)))


def result_finished_again(p: Programs) -> Programs:
    at = find(p[1], Copy)
    copy = p[1].instructions[at]
    assert isinstance(copy, Copy) and copy.src.buffer == INBOX
    return put_at(p, 1, at, Finish(copy.chunk, copy.dst, copy.src))


def shares_slot_freed_before_it_was_taken(p: Programs) -> Programs:
    at = next(i for i, found in enumerate(p[0].instructions) if isinstance(found, Finish))
    assert isinstance(p[0].instructions[at + 1], Notify)
    return put_at(p, 0, at, p[0].instructions[at + 1], p[0].instructions[at], drop=2)


def leaves_while_others_read_its_input(p: Programs) -> Programs:
    waits = [i for i, found in enumerate(p[1].instructions) if isinstance(found, Wait) and found.peer == 2]
    return put_at(p, 1, waits[-1])


def sum_sent_up_the_other_tree(p: Programs) -> Programs:
    ups = [put for put in p[2].instructions if isinstance(put, Put) and put.src.buffer in (IN, SCRATCH)]
    parents = {put.dst.rank for put in ups}
    at = find(p[2], Put)
    put = p[2].instructions[at]
    assert isinstance(put, Put) and len(parents) == 2
    (other,) = parents - {put.dst.rank}
    return put_at(p, 2, at, replace(put, dst=put.dst._replace(rank=other)))


def moved_on_from_the_input(p: Programs) -> Programs:
    """A block that came from another rank is sent on as if it were the own one."""
    at, put = next(
        (i, found)
        for i, found in enumerate(p[1].instructions)
        if isinstance(found, Put) and found.src.buffer == INBOX
    )
    return put_at(p, 1, at, replace(put, src=Operand(1, IN, put.chunk)))


def two_blocks_in_one_slot(p: Programs) -> Programs:
    at, other = find(p[0], Put), p[0].instructions[find(p[0], Put, 1)]
    put = p[0].instructions[at]
    assert isinstance(put, Put) and isinstance(other, Put)
    return put_at(p, 0, at, replace(put, dst=other.dst))


def host_adds_itself_alone(p: Programs) -> Programs:
    """A worker passes its own input on for that of its host."""
    at = find(p[0], Reduce)
    add = p[0].instructions[at]
    assert isinstance(add, Reduce)
    return put_at(p, 0, at, Copy(add.chunk, add.dst, add.a))


def reads_the_slice_of_a_rank_on_another_host(p: Programs) -> Programs:
    at = find(p[4], Copy, -1)
    copy = p[4].instructions[at]
    assert isinstance(copy, Copy) and copy.src.rank in (2, 3)
    return put_at(p, 4, at, replace(copy, src=copy.src._replace(rank=copy.src.rank - 2)))


def no_final_sync(p: Programs) -> Programs:
    return put_at(p, 0, find(p[0], Wait, -2), drop=2)


def final_wait_too_low(p: Programs) -> Programs:
    at = find(p[0], Wait, -1)
    return put_at(p, 0, at, replace(p[0].instructions[at], count=1))


def wait_too_high(p: Programs) -> Programs:
    at = find(p[0], Wait, -1)
    return put_at(p, 0, at, replace(p[0].instructions[at], count=3))


def notify_before_the_data(p: Programs) -> Programs:
    at = find(p[1], Notify)
    early = p[1].instructions[at]
    return put_at(put_at(p, 1, at), 1, 0, early, drop=0)


def extra_notify(p: Programs) -> Programs:
    return put_at(p, 2, 0, Notify(0), drop=0)


def scratch_unwritten(p: Programs) -> Programs:
    return put_at(p, 1, find(p[1], Reduce))


def scratch_overwritten(p: Programs) -> Programs:
    at = find(p[1], Reduce)
    return put_at(p, 1, at, p[1].instructions[at], p[1].instructions[at])


def scratch_forgotten(p: Programs) -> Programs:
    last = len(p[2].instructions)
    return put_at(p, 2, last, Copy(0, Operand(2, SCRATCH, 0), Operand(2, OUT, 0)))


def chunk_beyond_the_end(p: Programs) -> Programs:
    at = find(p[2], Reduce)
    beyond = Reduce(6, Operand(2, SCRATCH, 0), Operand(0, IN, 6), Operand(1, IN, 6))
    return put_at(p, 2, at, beyond)


def slot_beyond_the_end(p: Programs) -> Programs:
    at = find(p[2], Reduce)
    return put_at(p, 2, at, Reduce(4, Operand(2, SCRATCH, 1), Operand(0, IN, 4), Operand(1, IN, 4)))


def rank_beyond_the_end(p: Programs) -> Programs:
    at = find(p[2], Reduce)
    return put_at(p, 2, at, Reduce(4, Operand(2, SCRATCH, 0), Operand(3, IN, 4), Operand(1, IN, 4)))


def put_into_a_peers_output(p: Programs) -> Programs:
    return put_at(p, 0, 0, Put(0, Operand(1, OUT, 0), Operand(0, IN, 0)), drop=0)


def write_to_an_input(p: Programs) -> Programs:
    return put_at(p, 0, 0, Copy(0, Operand(0, IN, 0), Operand(1, IN, 0)), drop=0)


def write_to_a_peer(p: Programs) -> Programs:
    return put_at(p, 0, 0, Copy(0, Operand(1, OUT, 0), Operand(0, IN, 0)), drop=0)


def write_another_block(p: Programs) -> Programs:
    scattered = build_all(replace(GATHER, operation=Operation.REDUCE_SCATTER))
    return put_at(scattered, 0, 0, Copy(5, Operand(0, OUT, 5), Operand(0, IN, 5)), drop=0)


def read_a_peers_scratch(p: Programs) -> Programs:
    at = find(p[0], Reduce, 1)
    return put_at(p, 0, at, Reduce(0, Operand(0, OUT, 0), Operand(1, SCRATCH, 0), Operand(2, IN, 0)))


def notify_oneself(p: Programs) -> Programs:
    return put_at(p, 0, 0, Notify(0), drop=0)


def wait_for_nothing(p: Programs) -> Programs:
    return put_at(p, 0, 0, Wait(1, 0), drop=0)


def program_of_another_rank(p: Programs) -> Programs:
    return [p[0], p[2], p[1]]


def program_missing(p: Programs) -> Programs:
    return p[:2]


def another_chunking_on_one_rank(p: Programs) -> Programs:
    return [p[0], build(replace(DIRECT, chunks=7), 1), p[2]]


def credit_not_awaited(p: Programs) -> Programs:
    waits = [i for i, found in enumerate(p[0].instructions) if isinstance(found, Wait) and found.peer == 1]
    return put_at(p, 0, waits[0])


def slot_given_back_too_early(p: Programs) -> Programs:
    at = find(p[1], Notify)
    assert isinstance(p[1].instructions[at - 1], Reduce)
    return put_at(p, 1, at - 1, p[1].instructions[at], p[1].instructions[at - 1], drop=2)


def all_wait_before_they_put(p: Programs) -> Programs:
    for rank in range(6):
        first_put, first_wait = find(p[rank], Put), find(p[rank], Wait)
        wait = p[rank].instructions[first_wait]
        p = put_at(put_at(p, rank, first_wait), rank, first_put, wait, drop=0)
    return p


def another_slot_consumed(p: Programs) -> Programs:
    at = find(p[0], Reduce, 1)
    instruction = p[0].instructions[at]
    assert isinstance(instruction, Reduce) and instruction.a.buffer == INBOX
    return put_at(p, 0, at, replace(instruction, a=instruction.a._replace(number=3)))


def last_put_not_consumed(p: Programs) -> Programs:
    return put_at(p, 0, find(p[0], Copy, -1))


def wrong_root_everywhere(p: Programs) -> Programs:
    return build_all(replace(TREE, root=2))


def wrong_root_on_one_rank(p: Programs) -> Programs:
    return [build(replace(TREE, root=3), 0), *p[1:]]


def gathered_into_swapped_blocks(p: Programs) -> Programs:
    at = find(p[0], Copy, 2)
    return put_at(p, 0, at, Copy(2, Operand(0, OUT, 2), Operand(2, IN, 2)))


def barrier_round_missing(p: Programs) -> Programs:
    return [replace(x, instructions=tuple(i for k, i in enumerate(x.instructions) if k // 2 != 1)) for x in p]


def shards_in_another_order(p: Programs) -> Programs:
    other = replace(SHARDS, assignment=((3, 6), (0, 3), (6, 8)))
    return build_all(other)


PLANTS: list[tuple[Callable[[Programs], Programs], Request, set[Flaw]]] = [
    (dropped_wait, DIRECT, {Flaw.RACE, Flaw.UNINITIALISED}),
    (missing_notify, DIRECT, {Flaw.DEADLOCK}),
    (swapped_chunk, DIRECT, {Flaw.WRONG_CHUNK}),
    (chunk_done_twice, DIRECT, {Flaw.WRONG_OUTPUT}),
    (notify_wrong_peer, DIRECT, {Flaw.RACE, Flaw.DEADLOCK}),
    (copy_from_wrong_peer, DIRECT, {Flaw.RACE, Flaw.UNINITIALISED}),
    (input_taken_twice, DIRECT, {Flaw.DUPLICATE}),
    (contribution_left_out, DIRECT, {Flaw.WRONG_OUTPUT}),
    (reversed_on_one_rank, DIRECT, {Flaw.WRONG_ORDER}),
    (total_copied_from_scratch, DIRECT, {Flaw.UNFINISHED}),
    (gathered_at_another_root, TO_ROOT, {Flaw.NOT_ACCESSIBLE}),
    (root_lets_go_too_early, TO_ROOT, {Flaw.RACE}),
    (leaves_before_the_root_has_read, TO_ROOT, {Flaw.RACE, Flaw.UNBALANCED}),
    (root_lets_go_too_early, REDUCE, {Flaw.RACE}),
    (leaves_before_the_root_has_read, REDUCE, {Flaw.RACE, Flaw.UNBALANCED}),
    (scattered_block_of_a_neighbour, FROM_ROOT, {Flaw.NOT_ACCESSIBLE}),
    (exchanged_the_wrong_way_round, EXCHANGE, {Flaw.NOT_ACCESSIBLE}),
    (exchange_block_from_a_third, EXCHANGE, {Flaw.UNINITIALISED}),
    (leaves_before_the_root_has_read, EXCHANGE, {Flaw.RACE, Flaw.UNBALANCED}),
    (put_into_the_other_rings_slot, BOTH_WAYS, {Flaw.OVERWRITTEN, Flaw.RACE, Flaw.UNINITIALISED}),
    (last_put_not_consumed, BOTH_WAYS, {Flaw.UNCONSUMED}),
    (one_slot_for_both_turns, HALVING, {Flaw.OVERWRITTEN, Flaw.RACE, Flaw.UNINITIALISED}),
    (one_chunk_further_ahead, SWAP, {Flaw.RACE, Flaw.OVERWRITTEN}),
    (one_slot_for_both_turns, SWAP, {Flaw.OVERWRITTEN, Flaw.RACE, Flaw.UNINITIALISED}),
    (neighbour_not_folded_in, HALVING, {Flaw.PARTIAL_OUTPUT}),
    (halves_in_another_order, HALVING, {Flaw.WRONG_ORDER}),
    (read_before_the_neighbour_has_doubled, HALVING, {Flaw.RACE, Flaw.UNINITIALISED}),
    (second_child_left_out, UP_AND_DOWN, {Flaw.PARTIAL_OUTPUT}),
    (childs_slot_freed_before_it_was_added, UP_AND_DOWN, {Flaw.RACE, Flaw.OVERWRITTEN}),
    (results_slot_freed_before_it_was_taken, UP_AND_DOWN, {Flaw.RACE, Flaw.UNINITIALISED}),
    (result_finished_again, UP_AND_DOWN, {Flaw.DUPLICATE}),
    (share_copied_and_not_finished, SHARED, {Flaw.UNFINISHED}),
    (share_finished_before_all_is_in_it, SHARED, {Flaw.PARTIAL_OUTPUT}),
    (input_finished, SHARED, {Flaw.NOT_ACCESSIBLE}),
    (shares_slot_freed_before_it_was_taken, SHARED, {Flaw.RACE, Flaw.OVERWRITTEN}),
    (leaves_while_others_read_its_input, SHARED, {Flaw.RACE, Flaw.UNBALANCED}),
    (
        sum_sent_up_the_other_tree,
        TWO_TREES,
        {Flaw.DEADLOCK, Flaw.OVERWRITTEN, Flaw.RACE, Flaw.WRONG_CHUNK, Flaw.UNINITIALISED},
    ),
    (moved_on_from_the_input, BRUCK, {Flaw.UNINITIALISED}),
    (two_blocks_in_one_slot, BRUCK, {Flaw.OVERWRITTEN}),
    (host_adds_itself_alone, HOSTS, {Flaw.PARTIAL_OUTPUT}),
    (reads_the_slice_of_a_rank_on_another_host, HOSTS, {Flaw.RACE, Flaw.UNINITIALISED}),
    (no_final_sync, DIRECT, {Flaw.RACE}),
    (final_wait_too_low, DIRECT, {Flaw.RACE}),
    (wait_too_high, DIRECT, {Flaw.DEADLOCK}),
    (notify_before_the_data, DIRECT, {Flaw.RACE, Flaw.UNINITIALISED}),
    (extra_notify, DIRECT, {Flaw.RACE, Flaw.UNBALANCED}),
    (scratch_unwritten, DIRECT, {Flaw.UNINITIALISED}),
    (scratch_overwritten, DIRECT, {Flaw.OVERWRITTEN}),
    (scratch_forgotten, DIRECT, {Flaw.UNCONSUMED}),
    (chunk_beyond_the_end, DIRECT, {Flaw.OUT_OF_BOUNDS}),
    (slot_beyond_the_end, DIRECT, {Flaw.OUT_OF_BOUNDS}),
    (rank_beyond_the_end, DIRECT, {Flaw.OUT_OF_BOUNDS}),
    (put_into_a_peers_output, DIRECT, {Flaw.NOT_ACCESSIBLE}),
    (write_to_an_input, DIRECT, {Flaw.NOT_ACCESSIBLE}),
    (write_to_a_peer, DIRECT, {Flaw.NOT_ACCESSIBLE}),
    (write_another_block, replace(GATHER, operation=Operation.REDUCE_SCATTER), {Flaw.NOT_ACCESSIBLE}),
    (read_a_peers_scratch, DIRECT, {Flaw.NOT_ACCESSIBLE}),
    (notify_oneself, DIRECT, {Flaw.MALFORMED}),
    (wait_for_nothing, DIRECT, {Flaw.MALFORMED}),
    (program_of_another_rank, DIRECT, {Flaw.MALFORMED}),
    (program_missing, DIRECT, {Flaw.MALFORMED}),
    (another_chunking_on_one_rank, DIRECT, {Flaw.MALFORMED}),
    (credit_not_awaited, RING, {Flaw.RACE, Flaw.OVERWRITTEN}),
    (slot_given_back_too_early, RING, {Flaw.RACE}),
    (all_wait_before_they_put, RING, {Flaw.DEADLOCK}),
    (another_slot_consumed, RING, {Flaw.UNINITIALISED, Flaw.WRONG_CHUNK, Flaw.RACE}),
    (last_put_not_consumed, RING, {Flaw.UNCONSUMED}),
    (wrong_root_everywhere, TREE, {Flaw.UNINITIALISED}),
    (wrong_root_on_one_rank, TREE, {Flaw.UNINITIALISED, Flaw.RACE, Flaw.DEADLOCK}),
    (gathered_into_swapped_blocks, GATHER, {Flaw.UNINITIALISED}),
    (barrier_round_missing, BARRIER, {Flaw.NOT_SYNCHRONISED}),
    (shards_in_another_order, SHARDS, {Flaw.UNINITIALISED, Flaw.WRONG_ORDER}),
]


@pytest.mark.parametrize(("plant", "request_", "flaws"), PLANTS, ids=[plant.__name__ for plant, *_ in PLANTS])
def test_planted_wrong_programs_are_rejected(
    plant: Callable[[Programs], Programs], request_: Request, flaws: set[Flaw]
) -> None:
    programs, spec = programs_of(request_), spec_of(request_)
    verify(programs, spec)
    broken = plant(programs)
    assert broken != programs
    with pytest.raises(VerificationError) as caught:
        verify(broken, spec)
    assert caught.value.flaw in flaws, str(caught.value)


def test_partial_sums_are_kept_out_of_the_output() -> None:
    """There they would be rounded too early, and in place they would overwrite what peers still read."""

    def accumulate(rank: int) -> list[Instruction]:
        out = Operand(rank, OUT, rank)
        return [
            Reduce(rank, out, Operand(0, IN, rank), Operand(1, IN, rank)),
            Reduce(rank, out, out, Operand(2, IN, rank)),
        ]

    request = replace(DIRECT, chunks=3)
    programs: Sequence[Program] = programs_of(request)
    for rank in range(3):
        programs = put_at(list(programs), rank, 0, *accumulate(rank), drop=2)
    with pytest.raises(VerificationError) as caught:
        verify(programs, spec_of(request))
    assert caught.value.flaw is Flaw.PARTIAL_OUTPUT


def test_an_error_names_rank_instruction_and_reason() -> None:
    programs = reversed_on_one_rank(programs_of(DIRECT))
    with pytest.raises(
        VerificationError, match=r"rank 0, at its end: output is reduced in another order: out\[2\]"
    ):
        verify(programs, spec_of(DIRECT))
    with pytest.raises(
        VerificationError, match=r"rank 0, instruction 0: a contribution counts twice.*rank 0"
    ):
        verify(input_taken_twice(programs_of(DIRECT)), spec_of(DIRECT))
