"""Plans calls: the algorithm, pieces and chunks of each. Pure functions, the same on all ranks.

"auto" stands for what `ZBMD_ALGORITHM` names, else for what the cost model predicts to be the quickest. The
caller's choice and the environment are the same on all ranks, or the first operation ends as
`Desynchronised`; the model is one rank's measurement, agreed when the group is made and pinned for its epoch
(`group_trials`), or the same constants everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Algorithm, Operation, Request, algorithm_of
from zbmd.collectives.communicator.cost_model import FORMULAS, MANY_HOSTS, ONE_HOST, Case, Model, is_far
from zbmd.collectives.errors import ProgramError
from zbmd.collectives.execution.executor import Executor
from zbmd.collectives.execution.plan import (
    CHUNK_BYTES,
    CHUNKS_DENSE,
    FAR_CHUNK_BYTES,
    FAR_PIECE_BYTES,
    FAR_SLOT_BYTES,
    PIECE_BYTES,
    PLANS_MAX,
    UNSTAGED_PIECE_BYTES,
    Plan,
    chunks_for,
    plan_of,
)
from zbmd.collectives.native._stepper import PUB_BYTES_MAX
from zbmd.collectives.programs.layout import Layout
from zbmd.collectives.programs.program import hash_text
from zbmd.collectives.programs.reductions import BYTES_CODE, itemsize, slot_itemsize
from zbmd.transport.errors import UserError

VARIABLE = "ZBMD_ALGORITHM"
"""`ring`, or `all_reduce=ring,broadcast=tree`: a name alone is for every operation that has it."""
OF_ONE_HOST = ("swap", "shared")
"""Their chunks are short, and between hosts each is a message."""
BY_SLOTS = {
    Operation.ALL_REDUCE: "shared",
    Operation.REDUCE_SCATTER: "swap",
    Operation.BROADCAST: "shared",
    Operation.ALL_GATHER: "swap",
    Operation.ALL_TO_ALL: "swap",
    Operation.GATHER: "shared",
    Operation.SCATTER: "shared",
}
"""The algorithm of an operation whose ranks put all of it into each other's slots."""
SLOT_RANKS_MAX = 8
"""Ranks of a group that does so: with more, chunks are so short that notifications cost as much as copies."""
CHOICES_MAX = 4096
"""Choices kept; the least recently used is dropped."""

MOVING = (
    Operation.BROADCAST,
    Operation.ALL_GATHER,
    Operation.GATHER,
    Operation.SCATTER,
    Operation.ALL_TO_ALL,
)
"""Operations that reduce nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call as its rank made it: the operation, and all that the ranks must agree on.

    `request` has the algorithm as the caller named it, the group's size and the hosts of its members.
    `count`: elements of a block, of the longest if they differ. `published`: elements that a rank would
    publish in its descriptor, at most. `layout`: where the blocks lie, if not one stride apart. `digest`: of
    what the ranks must agree on beyond the plan. Calls are equal if they have the same plan.
    """

    request: Request
    count: int
    dtype: int
    reduction: int = field(default=0, compare=False)
    published: int = 0
    layout: Layout | None = field(default=None, compare=False, repr=False)
    digest: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of a block, the longest if they differ."""
        return self.count * itemsize(self.dtype)

    @property
    def published_bytes(self) -> int:
        """Bytes that a rank would publish in its descriptor, at most."""
        return max(self.published, self.count) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTraits:
    """The traits of a group that plans depend on. All but `place` is the same on all ranks.

    `eager_bytes_max`: what can travel with a descriptor. `far`: whether there are members on other hosts.
    `reads_peers`: whether members read each other's ordinary arrays, so that nothing is staged. `override`:
    the value of `ZBMD_ALGORITHM`.
    """

    place: int
    model: Model = ONE_HOST
    eager_bytes_max: int = PUB_BYTES_MAX
    far: bool = False
    reads_peers: bool = False
    override: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm, the reason, and what each was predicted to take (ns), the quickest first.

    in_arena: another, of the same bits, that may run instead where the arrays of all ranks lie in the arena,
    or ranks read each other's memory (`GroupTraits.reads_peers`); one rank times both. "": none.
    """

    algorithm: str
    reason: str
    in_arena: str = ""
    predicted_ns: tuple[tuple[str, float], ...] = ()


@lru_cache(maxsize=CHOICES_MAX)
def choose(
    operation: Operation,
    *,
    n: int,
    nbytes: int,
    published_bytes: int,
    hosts: int,
    model: Model,
    override: str,
    eager_bytes_max: int = PUB_BYTES_MAX,
    far: bool = False,
) -> Choice:
    """What "auto" stands for.

    `nbytes`: a rank's largest array. `published_bytes`: what a rank would publish, if all of its input
    travelled. `hosts`: how many. `override`: the value of `ZBMD_ALGORITHM`. `eager_bytes_max`: what can
    travel with a descriptor; up to `PUB_BYTES_MAX` it always does. `far`: whether a member is on another
    host. Raises `UserError` if the override names an algorithm that does not exist.
    """
    fits = published_bytes <= eager_bytes_max
    chosen = _overridden(operation, override)
    if chosen and (fits or chosen != "eager"):
        return Choice(algorithm=chosen, reason=f"{VARIABLE}={override}")
    if operation is Operation.BARRIER:
        return Choice(algorithm="dissemination", reason="there is one algorithm")
    if operation is Operation.ALL_REDUCE_SHARDS:
        return Choice(algorithm="shard_tree", reason="there is one algorithm")
    case = Case(n=n, nbytes=nbytes, hosts=hosts, model=model)
    costs = {
        name: formula(case)
        for (of, name), formula in FORMULAS.items()
        if of is operation
        and (fits or name != "eager")
        and not (far and name in OF_ONE_HOST)
        and (hosts > 1 or not ALGORITHMS[of, name].over_hosts)
    }
    ranked = tuple(sorted(costs.items(), key=lambda item: item[1]))
    best, cost = ranked[0]
    if published_bytes <= PUB_BYTES_MAX:
        return Choice(
            algorithm="eager",
            reason=f"{published_bytes} bytes travel with the descriptor (at most {PUB_BYTES_MAX})",
            predicted_ns=ranked,
        )
    if operation in BY_SLOTS and 2 <= n <= SLOT_RANKS_MAX and hosts == 1 and not far:
        # The model knows neither of copies of arrays outside the arena nor of caches that ranks do not share.
        pair = operation is Operation.ALL_REDUCE and n == 2
        return Choice(
            algorithm="swap" if pair else BY_SLOTS[operation],
            in_arena="direct",
            reason=f"{n} ranks of one host: arrays are used wherever they lie, and read in place where "
            "that is possible and has proved quicker",
            predicted_ns=ranked,
        )
    if operation is Operation.REDUCE and (best == "shared" or _each_has_a_core_and_a_chunk(case, far=far)):
        # Nor does it know that one core cannot take all that memory gives, and how much less that is.
        return Choice(
            algorithm="shared",
            in_arena="direct",
            reason="all ranks reduce for the root; it reads all of it by itself where that is possible and "
            "has proved quicker",
            predicted_ns=ranked,
        )
    reason = f"predicted to take {cost / 1e3:.1f} us"
    if len(ranked) > 1:
        reason += f", before {ranked[1][0]} with {ranked[1][1] / 1e3:.1f} us"
    return Choice(algorithm=best, reason=reason, predicted_ns=ranked)


def _each_has_a_core_and_a_chunk(case: Case, *, far: bool) -> bool:
    """Whether all ranks, of one host, can reduce for another at once."""
    alone = case.n == 1 or case.hosts > 1 or far
    return not alone and case.crowding == 1.0 and case.nbytes >= case.n * CHUNK_BYTES


@lru_cache(maxsize=CHOICES_MAX)
def moved_digest(dtype: np.dtype[Any]) -> int:
    """Return the digest of operations that move arrays of a dtype, as bytes: it must be the same on all."""
    return hash_text(f"{dtype.str} {dtype.name}")


def override_of_environment() -> str:
    """The value of `ZBMD_ALGORITHM`."""
    return os.environ.get(VARIABLE, "")


def _overridden(operation: Operation, override: str) -> str:
    """The algorithm that the override names for an operation, or "". Raises `UserError` on an unknown one."""
    found = ""
    for part in filter(None, (part.strip() for part in override.split(","))):
        name, separator, algorithm = part.partition("=")
        if not separator:
            name, algorithm = operation.name.lower(), name
            if not any(known == algorithm for _, known in ALGORITHMS):
                raise UserError(f"{VARIABLE}={override}: there is no algorithm {algorithm!r}")
            if (operation, algorithm) not in ALGORITHMS:
                continue
        operations = {known.name.lower(): known for known, _ in ALGORITHMS}
        if name not in operations or (operations[name], algorithm) not in ALGORITHMS:
            raise UserError(f"{VARIABLE}={override}: there is no algorithm {algorithm!r} for {name!r}")
        if operations[name] is operation:
            found = algorithm
    return found


def choice_of(call: Call, group: GroupTraits) -> Choice:
    """What "auto" stands for here. Raises `UserError` if `ZBMD_ALGORITHM` names no algorithm."""
    request = call.request
    gathers = request.operation is Operation.ALL_GATHER
    return choose(
        request.operation,
        n=request.n,
        nbytes=call.nbytes * request.n if gathers else call.published_bytes,
        published_bytes=call.published_bytes,
        # Only where no two members share memory does more than a little travel with a descriptor.
        hosts=max(1, len(set(request.hosts))) if group.eager_bytes_max <= PUB_BYTES_MAX else request.n,
        model=group.model,
        eager_bytes_max=group.eager_bytes_max,
        far=group.far,
        override=group.override,
    )


@lru_cache(maxsize=PLANS_MAX)
def plan_call(call: Call, group: GroupTraits) -> Plan:
    """The plan: pieces of at most `PIECE_BYTES` over all blocks of a rank, or `FAR_PIECE_BYTES` if there are
    members on other hosts. Raises `UserError`.
    """
    item, operation = itemsize(call.dtype), call.request.operation
    name, in_arena = call.request.algorithm, ""
    if name == "auto":
        choice = choice_of(call, group)
        name, in_arena = choice.algorithm, choice.in_arena
    if name == "eager" and call.published_bytes > group.eager_bytes_max:
        raise UserError(f"algorithm 'eager' does not take {call.published_bytes} bytes; use 'auto'")
    try:
        a_rank = call.request.n if operation.blocked else 1
        piece = min(call.count, max(1, _cut(call, group, name)[1] // (item * a_rank)))

        def plan(elements: int) -> Plan:
            request, *other = (
                _request(call, group, each, elements * item) for each in (name, in_arena) if each
            )
            return plan_of(request, group.place, *other)

        rest = call.count % piece if piece else 0
        return replace(plan(piece), piece=piece, last=plan(rest) if rest else None)
    except ProgramError as error:
        raise UserError(str(error)) from None


class Planner:
    """Makes the calls of one group, and plans them. `model`: the cost model that "auto" goes by."""

    def __init__(self, executor: Executor, hosts: tuple[int, ...]) -> None:
        self._executor = executor
        self._hosts = hosts
        self._override = override_of_environment()
        self.model = MANY_HOSTS if is_far(hosts) else ONE_HOST

    def call(
        self,
        operation: Operation,
        algorithm: str,
        count: int,
        dtype: int = BYTES_CODE,
        reduction: int = 0,
        *,
        root: int = 0,
        **more: Any,
    ) -> Call:
        """Return a call of `count` elements a block. `more`: other fields of `Call`."""
        n, hosts = len(self._executor.members), self._hosts
        request = Request(operation=operation, algorithm=algorithm, n=n, root=root, hosts=hosts)
        return Call(request=request, count=count, dtype=dtype, reduction=reduction, **more)

    def call_laid_out(
        self,
        operation: Operation,
        algorithm: str,
        layout: Layout,
        *dtype_and_reduction: int,
        root: int = 0,
        digest: int = 0,
    ) -> Call:
        """Return a call over blocks that lie by a layout."""
        return self.call(
            operation,
            algorithm,
            layout.longest,
            *dtype_and_reduction,
            root=root,
            published=layout.published_max,
            layout=layout,
            digest=digest,
        )

    def plan(self, call: Call) -> Plan:
        """Return the plan of a call. Raises `UserError`."""
        executor = self._executor
        traits = GroupTraits(
            place=executor.place,
            model=self.model,
            eager_bytes_max=executor.eager_bytes_max,
            far=executor.far,
            reads_peers=executor.reads_peers,
            override=self._override,
        )
        return plan_call(call, traits)


def _request(call: Call, group: GroupTraits, name: str, block_bytes: int) -> Request:
    hosts = call.request.hosts if _entry(call, name).over_hosts else ()
    request = replace(call.request, algorithm=name, hosts=hosts)
    request = replace(request, chunks=request.blocks)
    return replace(request, chunks=chunks_for(request, block_bytes, _cut(call, group, name)[0]))


def _cut(call: Call, group: GroupTraits, name: str) -> tuple[int, int]:
    """Bytes of a chunk and of a piece, at most."""
    wider = slot_itemsize(call.dtype) // itemsize(call.dtype)  # a 16-bit float takes more in a slot
    if name in OF_ONE_HOST and not _entry(call, name).exposes(call.request, 0):
        # Nothing is staged, and a chunk of each peer is in slots; a piece has as many chunks as are proved.
        n, operation = call.request.n, call.request.operation
        slots = 1 if operation in (Operation.BROADCAST, Operation.SCATTER) else max(1, n - 1)
        if operation is Operation.ALL_REDUCE and name == "shared":
            slots *= 2  # for results, too
        chunk = max(1, CHUNK_BYTES // (wider * slots))
        return chunk, chunk * n * (1 << max(1, CHUNKS_DENSE // n).bit_length() - 1)
    if group.far and name == "direct":
        return FAR_CHUNK_BYTES, FAR_PIECE_BYTES
    if group.reads_peers and name == "direct":
        return CHUNK_BYTES, UNSTAGED_PIECE_BYTES
    if group.far and (_entry(call, name).over_hosts or call.request.operation in MOVING):
        return FAR_SLOT_BYTES // wider, FAR_PIECE_BYTES
    # Others go by chunks in the order in which they reduce: theirs are the bits of one host.
    return CHUNK_BYTES, PIECE_BYTES


def _entry(call: Call, name: str) -> Algorithm:
    return algorithm_of(replace(call.request, algorithm=name, chunks=call.request.blocks))
