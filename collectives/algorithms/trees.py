"""Reductions up binary trees and broadcasts down, chunk by chunk in a pipeline.

With two trees, in which nobody has children in both, every rank's bandwidth is used both ways (Sanders, Speck
and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12),
2009): the even chunks take the first tree, the odd ones the second. Sums go up through inbox slots, and
results come down through others: between hosts a put is one latency, where to announce, ask and be answered
is three.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from zbmd.collectives.algorithms.compose import (
    Await,
    Draft,
    Signal,
    copy_if_alone,
    finish_program,
    number_waits,
)
from zbmd.collectives.programs.program import (
    IN,
    INBOX,
    OUT,
    SCRATCH,
    Copy,
    Instruction,
    Notify,
    Operand,
    Program,
    Put,
    Reduce,
    Wait,
)
from zbmd.collectives.programs.spec import Tree

CHILD_SLOTS = 2
"""Inbox slots of a child's sums."""
PARENT_SLOTS = 2
"""Inbox slots of a parent's results."""
TREES_KEPT = 64
"""Trees that are remembered: all ranks of a simulation share one."""


@dataclass(frozen=True, slots=True)
class BinaryTree:
    """A tree over nodes 0..n-1: the parent of each (-1 for the root), and its children in order of reduction.

    `most_children`: the largest number of children that a node has.
    """

    parents: tuple[int, ...]
    children: tuple[tuple[int, ...], ...]
    height: int
    most_children: int

    @property
    def root(self) -> int:
        """The node without a parent."""
        return self.parents.index(-1)


def _tree(parents: Sequence[int]) -> BinaryTree:
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    height, level = -1, [parents.index(-1)]
    while level:
        height, level = height + 1, [child for node in level for child in children[node]]
    return BinaryTree(tuple(parents), tuple(map(tuple, children)), height, max(map(len, children)))


@lru_cache(maxsize=TREES_KEPT)
def balanced_tree(n: int, root: int = 0) -> BinaryTree:
    """The tree of a heap, numbered from `root`: v = (node - root) mod n has the parent (v - 1) // 2."""
    places = [(node - root) % n for node in range(n)]
    return _tree([((v - 1) // 2 + root) % n if v else -1 for v in places])


@lru_cache(maxsize=TREES_KEPT)
def two_trees(n: int) -> tuple[BinaryTree, BinaryTree]:
    """Two in-order trees: nobody has children in both. One is the other's mirror image, or shifted by one.

    In the first, a node that is a multiple of 2^k and not of 2^(k+1) has the height k, so odd ones are
    leaves; in the second, even ones are (but for the root and the ends of the row, which have at most one
    child).
    """
    first = [_in_order_parent(node, n) for node in range(n)]
    if n % 2:
        second = [-1 if (p := first[(node - 1) % n]) < 0 else (p + 1) % n for node in range(n)]
    else:
        second = [-1 if (p := first[n - 1 - node]) < 0 else n - 1 - p for node in range(n)]
    return _tree(first), _tree(second)


def _in_order_parent(node: int, n: int) -> int:
    """Node 0 is the root; another's parent is found by clearing its lowest bit and setting the next."""
    if node == 0:
        return -1
    low = node & -node
    up = (node ^ low) | (low << 1)
    return up if up < n else node ^ low


def tree_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Up one balanced binary tree and down again. Order (`tree_order`): own, first child, second child."""
    return _program("tree_all_reduce", n, rank, chunks, (balanced_tree(n),), down=True)


def double_tree_all_reduce(n: int, rank: int, chunks: int) -> Program:
    """Up and down two binary trees, chunks in turn. Order: `tree_order` of the chunk's tree."""
    return _program("double_tree_all_reduce", n, rank, chunks, two_trees(n), down=True)


def tree_reduce(n: int, rank: int, chunks: int, root: int) -> Program:
    """Up one balanced binary tree to the root. Order (`tree_order`): own, first child, second child."""
    return _program("tree_reduce", n, rank, chunks, (balanced_tree(n, root),), down=False)


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
    return finish_program("tree_broadcast", n, rank, 1, chunks, instructions)


def tree_order(tree: BinaryTree, leaf: Callable[[int], Tree] = lambda node: node) -> Tree:
    """The order in which a chunk is reduced: a node's own input, `leaf(node)`, then its children's sums."""

    def of(node: int) -> Tree:
        total = leaf(node)
        for child in tree.children[node]:
            total = (total, of(child))
        return total

    return of(tree.root)


def _program(
    name: str, n: int, rank: int, chunks: int, trees: tuple[BinaryTree, ...], *, down: bool
) -> Program:
    if n == 1:
        return finish_program(name, n, rank, 1, chunks, copy_if_alone(n, chunks))

    def draft_of(r: int) -> Draft:
        climb = Climb(
            trees=trees,
            ranks=range(n),
            node=r,
            chunks=range(chunks),
            own=lambda k: Operand(r, IN, k),
            partial=lambda k: Operand(r, SCRATCH, 0),
        )
        return climb.both_ways() if down else [*climb.up_alone(), *_part_from_root(trees[0], n, r)]

    return finish_program(
        name,
        n,
        rank,
        1,
        chunks,
        number_waits(draft_of, rank),
        scratch_slots=1,
        inbox_slots=inbox_slots(trees) if down else _sums_slots(trees),
    )


def _part_from_root(tree: BinaryTree, n: int, rank: int) -> Draft:
    if rank == tree.root:
        return [Signal(Notify(peer), "end") for peer in range(n) if peer != rank]
    return [Await(tree.root, "end")]


def inbox_slots(trees: tuple[BinaryTree, ...]) -> int:
    """The slots of a rank's inbox: for sums of children, then for results of parents."""
    return _sums_slots(trees) + len(trees) * PARENT_SLOTS


def _sums_slots(trees: tuple[BinaryTree, ...]) -> int:
    return len(trees) * max(tree.most_children for tree in trees) * CHILD_SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Climb:
    """The steps of one node of the trees: its chunks go up to the root, and the results come down.

    `ranks[node]` is the rank of a node. The k-th of `chunks` takes the k-th tree in turn; `own(k)` is where
    this node's contribution to it lies, `partial(k)` where its sum may be kept.
    """

    trees: tuple[BinaryTree, ...]
    ranks: Sequence[int]
    node: int
    chunks: Sequence[int]
    own: Callable[[int], Operand]
    partial: Callable[[int], Operand]

    def both_ways(self) -> Draft:
        """Up and down, in steps, of one chunk up and one down each.

        A node's ups come `CHILD_SLOTS` turns later than those of its children, and its downs `PARENT_SLOTS`
        turns earlier: about as long as a message takes, so that who is a leaf in one tree does not wait in
        each turn for its part in the other. Nobody waits for itself: an up needs earlier steps of the
        children, and of the parent (a slot that it has freed) an up of the same step at most, where ups come
        first; a down needs an earlier step of the parent, and of the children (a slot that they have freed) a
        down of the same step.
        """
        trees = len(self.trees)
        places = [(tree.height, _depth(tree, self.node)) for tree in self.trees]
        ups = [trees * CHILD_SLOTS * (height - depth) for height, depth in places]
        downs = [trees * (CHILD_SLOTS * height + PARENT_SLOTS * depth) for height, depth in places]
        draft: Draft = []
        for step in range(len(self.chunks) + max(downs)):
            if 0 <= (k := step - ups[step % trees]) < len(self.chunks):
                draft += self._up(k)
            if 0 <= (k := step - downs[step % trees]) < len(self.chunks):
                draft += self._down(k)
        return draft

    def up_alone(self) -> Draft:
        """Up to the root, where the sums stay."""
        return [item for k in range(len(self.chunks)) for item in self._up(k)]

    def _up(self, k: int) -> Draft:
        """Add the children's sums to the own input, and put the sum into the parent's inbox."""
        which, turn = k % len(self.trees), k // len(self.trees)
        tree, chunk, rank = self.trees[which], self.chunks[k], self.ranks[self.node]
        children, parent = tree.children[self.node], tree.parents[self.node]
        draft: Draft = []
        total = self.own(k)
        for i, child in enumerate(children):
            slot = Operand(rank, INBOX, self._slot(which, i, turn))
            last = i == len(children) - 1
            target = Operand(rank, OUT, chunk) if parent < 0 and last else self.partial(k)
            draft += [
                Await(self.ranks[child], ("sum", which, turn)),
                Reduce(chunk, target, total, slot),
            ]
            if k + len(self.trees) * CHILD_SLOTS < len(self.chunks):
                draft.append(Signal(Notify(self.ranks[child]), ("free", which, turn)))
            total = target
        if parent < 0:
            return draft
        if turn >= CHILD_SLOTS:
            draft.append(Await(self.ranks[parent], ("free", which, turn - CHILD_SLOTS)))
        place = self._slot(which, tree.children[parent].index(self.node), turn)
        put = Put(chunk, Operand(self.ranks[parent], INBOX, place), total)
        return [*draft, Signal(put, ("sum", which, turn))]

    def _slot(self, which: int, child: int, turn: int) -> int:
        most = max(tree.most_children for tree in self.trees)
        return (which * most + child) * CHILD_SLOTS + turn % CHILD_SLOTS

    def _down(self, k: int) -> Draft:
        """Take the result from the parent, and put it into the children's inboxes, at once."""
        which, turn = k % len(self.trees), k // len(self.trees)
        tree, chunk, rank = self.trees[which], self.chunks[k], self.ranks[self.node]
        parent = tree.parents[self.node]
        draft: Draft = []
        out = result = Operand(rank, OUT, chunk)
        if parent >= 0:
            result = Operand(rank, INBOX, self._slot_down(which, turn))
            draft.append(Await(self.ranks[parent], ("total", which, turn)))
        for child in tree.children[self.node]:
            below = self.ranks[child]
            if turn >= PARENT_SLOTS:
                draft.append(Await(below, ("taken", which, turn - PARENT_SLOTS)))
            put = Put(chunk, Operand(below, INBOX, self._slot_down(which, turn)), result)
            draft.append(Signal(put, ("total", which, turn)))
        if parent >= 0:
            draft.append(Copy(chunk, out, result))
            if k + len(self.trees) * PARENT_SLOTS < len(self.chunks):
                draft.append(Signal(Notify(self.ranks[parent]), ("taken", which, turn)))
        return draft

    def _slot_down(self, which: int, turn: int) -> int:
        return _sums_slots(self.trees) + which * PARENT_SLOTS + turn % PARENT_SLOTS


def _depth(tree: BinaryTree, node: int) -> int:
    """Edges from the root."""
    depth = 0
    while (node := tree.parents[node]) >= 0:
        depth += 1
    return depth
