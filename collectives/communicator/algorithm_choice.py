"""The choice of an algorithm, and why: what the caller says, else `ZBMD_ALGORITHM`, else the cost model.

All ranks must choose alike. The caller's word and the environment are the same on all, or the first operation
ends as `Desynchronised`; the model is one rank's measurement, agreed at the group's creation and pinned for
its epoch (`tuning`), or the same constants everywhere.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache

from zbmd.collectives.algorithms.catalogue import ALGORITHMS, Operation
from zbmd.collectives.communicator.cost_model import FORMULAS, Case, Model
from zbmd.collectives.execution.plan import CHUNK_BYTES
from zbmd.collectives.native._stepper import PUB_BYTES_MAX
from zbmd.transport.errors import UserError

VARIABLE = "ZBMD_ALGORITHM"
"""`ring`, or `all_reduce=ring,broadcast=tree`: a name alone is for every operation that has it."""
OF_ONE_HOST = ("swap", "shared")
"""Their chunks are short, and between hosts each is a message."""
CHOICES_MAX = 4096
"""Choices kept; the least recently used is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """An algorithm, the reason, and what each was predicted to take (ns), the quickest first.

    in_arena: another, of the same bits, that may run instead where the arrays of all ranks lie in the arena;
    the first rank times both. "": none.
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
    if operation is Operation.ALL_REDUCE and n == 2 and hosts == 1 and not far:
        # The model knows neither of copies of arrays outside the arena nor of caches that ranks do not share.
        return Choice(
            algorithm="swap",
            in_arena="direct",
            reason="two ranks of one host: arrays are used wherever they lie, and in the arena read in place "
            "where that has proved quicker",
            predicted_ns=ranked,
        )
    if operation is Operation.REDUCE and (best == "shared" or _each_has_a_core_and_a_chunk(case, far=far)):
        # Nor does it know that one core cannot take all that memory gives, and how much less that is.
        return Choice(
            algorithm="shared",
            in_arena="direct",
            reason="all ranks reduce for the root; in the arena it reads all of it by itself where that has "
            "proved quicker",
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
