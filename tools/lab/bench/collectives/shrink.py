"""Times the repair of an operation: rank 1 is killed in an all-reduce, the others finish it without it.

`python -m zbmd.tools.lab.bench.collectives.shrink --ranks 4 --mib 1 --rounds 20`. A round is a job that
shrinks. Printed: ms from the notice of the death to the complete operation, of the slowest survivor; median
and worst round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Final

import structlog

from zbmd.actors.cluster.jobs.host import HostConfig
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.run_ranks import run_ranks
from zbmd.tools.cli.options import script_parser

VICTIM: Final = 1
ARENA_BYTES: Final = 64 << 20

SCRIPT: Final = """
import json
import numpy as np
import zbmd
from zbmd.transport.native._native import now_ns

PLAN = json.loads({plan!r})

async def main():
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker)
        noticed = []
        worker.on_peer_lost(lambda rank, incarnation, notice: noticed.append(notice.at_ns))
        x = zbmd.from_array(np.full(PLAN["count"], float(worker.rank), np.float32))
        out = zbmd.empty(x.shape)
        for _ in range(3):
            await group.all_reduce(x, out=out)
        if worker.rank == PLAN["victim"]:
            communicator = group.group.communicator
            communicator.kill_at(communicator.sequence + 1, PLAN["point"])
        done = await group.all_reduce(x, out=out, inputs=PLAN["inputs"])
        end_ns = now_ns()
        worker.report({{"took_ms": (end_ns - min(noticed)) / 1e6, "of": done.contributors}})
        await group.close()

zbmd.run(main())
"""


async def _round(plan: dict[str, object], ranks: int) -> float:
    """One job; ms from the first notice to the end of the operation, of the slowest survivor."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "shrink.py"
        script.write_text(SCRIPT.format(plan=json.dumps(plan)))
        config = HostConfig(
            target=str(script),
            world_size=ranks,
            on_loss=OnLoss.SHRINK,
            arena_bytes=ARENA_BYTES,
            preload=("zbmd.collectives.elastic.group",),
        )
        took = [float(report["took_ms"]) for report in await run_ranks(config)]
    if len(took) != ranks - 1:
        raise RuntimeError(f"{len(took)} of {ranks - 1} survivors reported their time")
    return max(took)


async def _measure(arguments: argparse.Namespace) -> None:
    count = max(1, round(arguments.mib * (1 << 18)))
    print(f"{'inputs':>10} {'ranks':>6} {'MiB':>6} {'ms p50':>8} {'ms max':>8}")
    for inputs in ("preserve", "adopt"):
        plan: dict[str, object] = {
            "count": count,
            "victim": VICTIM,
            "point": arguments.point,
            "inputs": inputs,
        }
        took = [await _round(plan, arguments.ranks) for _ in range(arguments.rounds)]
        row = f"{inputs:>10} {arguments.ranks:>6} {arguments.mib:>6g}"
        print(f"{row} {statistics.median(took):>8.2f} {max(took):>8.2f}", flush=True)


def main() -> None:
    """Run the measurement."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parser = script_parser("lab.bench.collectives.shrink", __doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, default=1.0, help="size of the array")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--point", type=int, default=5, help="instruction at which the victim dies")
    asyncio.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
