"""Binary-tree broadcast, chunk by chunk, and the dissemination barrier."""

from __future__ import annotations

from zbmd.collectives.programs.program import OUT, Copy, Instruction, Notify, Operand, Program, Wait


def tree_broadcast(n: int, rank: int, chunks: int, root: int) -> Program:
    """Broadcast down a binary tree, pipelined: a chunk is announced to the children once it is here.

    Ranks are numbered from the root: v = (rank - root) mod n has the parent (v - 1) // 2. A rank ends
    when its children have read all of its chunks.
    """
    place = (rank - root) % n
    parent = ((place - 1) // 2 + root) % n
    children = [(child + root) % n for child in (2 * place + 1, 2 * place + 2) if child < n]
    instructions: list[Instruction] = []
    for chunk in range(chunks):
        if place:
            instructions.append(Wait(parent, chunk + 1))
            instructions.append(Copy(chunk, Operand(rank, OUT, chunk), Operand(parent, OUT, chunk)))
        instructions += [Notify(child) for child in children]
    if place:
        instructions.append(Notify(parent))
    instructions += [Wait(child, 1) for child in children]
    return Program(
        algorithm="tree_broadcast",
        n=n,
        rank=rank,
        blocks=1,
        chunks=chunks,
        scratch_slots=0,
        inbox_slots=0,
        instructions=tuple(instructions),
    )


def dissemination_barrier(n: int, rank: int) -> Program:
    """ceil(log2 n) rounds; in round k notify rank + 2^k, then wait for rank - 2^k (mod n).

    (Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", Int. J. Parallel
    Programming 17(1), 1988.) No peer is met twice, so every count is 1.
    """
    instructions: list[Instruction] = []
    distance = 1
    while distance < n:
        instructions += [Notify((rank + distance) % n), Wait((rank - distance) % n, 1)]
        distance *= 2
    return Program(
        algorithm="dissemination_barrier",
        n=n,
        rank=rank,
        blocks=1,
        chunks=1,
        scratch_slots=0,
        inbox_slots=0,
        instructions=tuple(instructions),
    )
