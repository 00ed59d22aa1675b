"""Measure the erasure code beside a copy of the same data, in one run and on one core.

    python -m zbmd.tools.lab.bench.training.coding [--mib N] [--codes 4+1,4+2] [--json]

`encode` and `rebuild` (of as many data shards as there are parities) are in bytes of data per second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.training.native._kernels import code
from zbmd.training.redundancy.coded.field import flat, parity_matrix, rebuilding_matrix
from zbmd.transport.errors import UserError

TRIES: Final = 7
RATIO_MIN: Final = 0.5
"""Of a copy, for one parity."""
BYTES_PER_S_MIN: Final = 2e9
"""For two."""


class CodeFigure(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one code; rates in GB/s."""

    code: str
    encode: float
    rebuild: float
    copy: float
    is_met: bool


def measured(data: int, parity: int, nbytes: int) -> CodeFigure:
    """Return the figures of a code of shards of `nbytes`. The best of some tries counts."""
    random = np.random.default_rng(0)
    shards = [random.integers(256, size=nbytes, dtype=np.uint8) for _ in range(data)]
    parities = [np.empty(nbytes, np.uint8) for _ in range(parity)]
    copies = [np.empty(nbytes, np.uint8) for _ in range(data)]
    factors = flat(parity_matrix(data, parity))
    lost = list(range(min(data, parity)))
    have = list(range(data + parity))[len(lost) :][:data]
    solved = flat(rebuilding_matrix(data, parity, have, lost))
    every = shards + parities

    def copy() -> None:
        for into, shard in zip(copies, shards, strict=True):
            np.copyto(into, shard)

    total = data * nbytes / 1e9
    encode = total / _best_s(lambda: code(parities, shards, factors))
    rebuild = total / _best_s(lambda: code(copies[: len(lost)], [every[one] for one in have], solved))
    if any((copies[one] != shards[one]).any() for one in lost):
        raise UserError(f"the code {data}+{parity} does not give back what was lost")
    beside = total / _best_s(copy)
    is_met = encode >= RATIO_MIN * beside if parity == 1 else encode >= BYTES_PER_S_MIN / 1e9
    return CodeFigure(
        code=f"{data}+{parity}",
        encode=round(encode, 2),
        rebuild=round(rebuild, 2),
        copy=round(beside, 2),
        is_met=is_met,
    )


def _best_s(work: Callable[[], None]) -> float:
    best_s = float("inf")
    for _ in range(TRIES):
        began_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures; 1 if a goal is missed."""
    parser = script_parser("lab.bench.training.coding", __doc__)
    parser.add_argument("--mib", type=int, default=4, help="of a shard; default: 4")
    parser.add_argument("--codes", default="4+1,4+2,8+2,8+4", help="k+m, with commas between them")
    add_json(parser)
    arguments = parser.parse_args(argv)
    figures: list[CodeFigure] = []
    for text in arguments.codes.split(","):
        data, _, parity = text.partition("+")
        if not data.isdecimal() or not parity.isdecimal():
            raise UserError(f"--codes: expected k+m such as 4+2, got {text!r}")
        figures.append(measured(int(data), int(parity), arguments.mib << 20))
    if arguments.json:
        shown = {"at": now_utc(), "machine": this_machine(), "figures": figures}
        print(msgspec.json.encode(shown).decode())
    else:
        print("code   encode  rebuild  copy  GB/s")
        for one in figures:
            goal = "" if one.is_met else "  below its goal"
            print(f"{one.code:5}  {one.encode:6.2f}  {one.rebuild:7.2f}  {one.copy:4.2f}{goal}")
    return 0 if all(one.is_met for one in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
