"""Reductions up binary trees, chunk by chunk in a pipeline, and the way down for all-reduce.

With two trees, in which nobody has children in both, every rank's bandwidth is used both ways (Sanders, Speck
and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12),
2009): the even chunks take the first tree, the odd ones the second. Sums go up through inbox slots; results
are read downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zbmd.collectives.algorithms.compose import finish_program
from zbmd.collectives.algorithms.drafts import Await, Draft, Signal, number_waits
from zbmd.collectives.program import IN, INBOX, OUT, SCRATCH, Copy, Notify, Operand, Program, Put, Reduce
from zbmd.collectives.spec import Tree

CHILD_SLOTS = 2
"""Inbox slots of a child's sums."""


@dataclass(frozen=True, slots=True)
class BinaryTree:
    """A tree over the ranks: the parent of each (-1 for the root), and the children in order of reduction."""

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    height: int

    @property
    def root(self) -> int:
        """Who has no parent."""
        return self.parents.index(-1)


def _tree(parents: Sequence[int]) -> BinaryTree:
    children = tuple(
        tuple(rank for rank, parent in enumerate(parents) if parent == above) for above in range(len(parents))
    )

    def depth(rank: int) -> int:
        return 0 if parents[rank] < 0 else 1 + depth(parents[rank])

    return BinaryTree(tuple(parents), children, max(map(depth, range(len(parents)))))


def balanced_tree(n: int, root: int = 0) -> BinaryTree:
    """The tree of a heap, numbered from `root`: v = (rank - root) mod n has the parent (v - 1) // 2."""
    places = [(rank - root) % n for rank in range(n)]
    return _tree([((v - 1) // 2 + root) % n if v else -1 for v in places])


def two_trees(n: int) -> tuple[BinaryTree, BinaryTree]:
    """Two in-order trees: nobody has children in both. One is the other's mirror image, or shifted by one.

    In the first, a rank that is a multiple of 2^k and not of 2^(k+1) has the height k, so odd ranks are
    leaves; in the second, even ranks are (but for the root and the ends of the row, which have at most one
    child).
    """
    first = [_in_order_parent(rank, n) for rank in range(n)]
    if n % 2:
        second = [-1 if (p := first[(rank - 1) % n]) < 0 else (p + 1) % n for rank in range(n)]
    else:
        second = [-1 if (p := first[n - 1 - rank]) < 0 else n - 1 - p for rank in range(n)]
    return _tree(first), _tree(second)


def _in_order_parent(rank: int, n: int) -> int:
    """Rank 0 is the root; another's parent is found by clearing its lowest bit and setting the next."""
    if rank == 0:
        return -1
    low = rank & -rank
    up = (rank ^ low) | (low << 1)
    return up if up < n else rank ^ low


def tree_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Up one balanced binary tree and down again. Order (`tree_order`): own, first child, second child."""
    return _program("tree_all_reduce", n, rank, chunks, (balanced_tree(n),), down=True)


def double_tree_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Up and down two binary trees, chunks in turn. Order: `tree_order` of the chunk's tree."""
    return _program("double_tree_all_reduce", n, rank, chunks, two_trees(n), down=True)


def tree_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """Up one balanced binary tree to the root. Order (`tree_order`): own, first child, second child."""
    return _program("tree_reduce", n, rank, chunks, (balanced_tree(n, root),), down=False)


def tree_order(tree: BinaryTree) -> Tree:
    """The order in which a chunk is reduced: a rank's own input, then the sums of its children."""

    def of(rank: int) -> Tree:
        total: Tree = rank
        for child in tree.children[rank]:
            total = (total, of(child))
        return total

    return of(tree.root)


def _program(
    name: str, n: int, rank: int, chunks: int, trees: tuple[BinaryTree, ...], *, down: bool
) -> Program:
    if n == 1:
        copies = [Copy(chunk, Operand(0, OUT, chunk), Operand(0, IN, chunk)) for chunk in range(chunks)]
        return finish_program(name, n, rank, 1, chunks, copies)
    most = max(len(tree.children[r]) for tree in trees for r in range(n))
    return finish_program(
        name,
        n,
        rank,
        1,
        chunks,
        number_waits(lambda r: _draft(n, r, chunks, trees, down=down), rank),
        scratch_slots=1,
        inbox_slots=len(trees) * most * CHILD_SLOTS,
    )


def _draft(n: int, rank: int, chunks: int, trees: tuple[BinaryTree, ...], *, down: bool) -> Draft:
    """Up and down of all chunks. A chunk's way down comes so much later than its way up that it need not
    wait.

    At every rank the ups are in one order and each down comes as long after its up, so no two ranks wait for
    each other.
    """
    lag = len(trees) * 2 * max(tree.height for tree in trees) if down else 0
    draft: Draft = []
    for at in range(chunks + lag):
        if at < chunks:
            draft += _up(rank, at, chunks, trees)
        if down and at >= lag:
            draft += _down(rank, at - lag, trees)
    if down:
        used = trees[:chunks]
        for i, tree in enumerate(used):
            if tree.parents[rank] >= 0:
                draft.append(Signal(Notify(tree.parents[rank]), ("read", i)))
        draft += [Await(child, ("read", i)) for i, tree in enumerate(used) for child in tree.children[rank]]
    elif trees[0].parents[rank] < 0:
        draft += [Signal(Notify(peer), "end") for peer in range(n) if peer != rank]
    else:
        draft.append(Await(trees[0].root, "end"))
    return draft


def _up(rank: int, chunk: int, chunks: int, trees: tuple[BinaryTree, ...]) -> Draft:
    """Add the children's sums to the own input, and put the sum into the parent's inbox."""
    which = chunk % len(trees)
    tree, turn = trees[which], chunk // len(trees)
    children, parent = tree.children[rank], tree.parents[rank]
    draft: Draft = []
    total = Operand(rank, IN, chunk)
    for k, child in enumerate(children):
        slot = Operand(rank, INBOX, _slot(trees, which, k, turn))
        last = k == len(children) - 1
        target = Operand(rank, OUT, chunk) if parent < 0 and last else Operand(rank, SCRATCH, 0)
        draft += [Await(child, ("sum", which, turn)), Reduce(chunk, target, total, slot)]
        if chunk + len(trees) * CHILD_SLOTS < chunks:
            draft.append(Signal(Notify(child), ("free", which, turn)))
        total = target
    if parent >= 0:
        if turn >= CHILD_SLOTS:
            draft.append(Await(parent, ("free", which, turn - CHILD_SLOTS)))
        slot = Operand(parent, INBOX, _slot(trees, which, tree.children[parent].index(rank), turn))
        draft.append(Signal(Put(chunk, slot, total), ("sum", which, turn)))
    return draft


def _slot(trees: tuple[BinaryTree, ...], which: int, k: int, turn: int) -> int:
    most = max(len(children) for tree in trees for children in tree.children)
    return (which * most + k) * CHILD_SLOTS + turn % CHILD_SLOTS


def _down(rank: int, chunk: int, trees: tuple[BinaryTree, ...]) -> Draft:
    """Read the result from the parent, and tell the children that it is here."""
    which = chunk % len(trees)
    tree, parent = trees[which], trees[which].parents[rank]
    draft: Draft = []
    if parent >= 0:
        draft.append(Await(parent, ("total", chunk)))
        draft.append(Copy(chunk, Operand(rank, OUT, chunk), Operand(parent, OUT, chunk)))
    return draft + [Signal(Notify(child), ("total", chunk)) for child in tree.children[rank]]
