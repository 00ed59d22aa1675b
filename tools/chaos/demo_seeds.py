"""The main job under many kill seeds: each run must end with the bits of the undisturbed one.

    python -m zbmd.tools.chaos.demo_seeds                 ten kills of the full job: some 20 minutes
    python -m zbmd.tools.chaos.demo_seeds --steps 45      the same in short

Prints one JSON line a run and one for all of them. Exit code 1: a run ended with other weights.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from zbmd.actors.process.log import log_to_stderr
from zbmd.tools.cli.options import script_parser
from zbmd.tools.demo.command import STEPS, WORLD_SIZE, DemoOptions, plan_kill, report, run_job
from zbmd.transport.errors import UserError

SEEDS = 10


def run_seeds(options: DemoOptions, seeds: Sequence[int]) -> dict[str, Any]:
    """Run the job undisturbed, then once for each kill seed. Raises `UserError` if a run fails."""
    calm = uvloop.run(run_job(options, options.out / "undisturbed", ()))
    assert calm.result is not None
    digest = calm.result["weights_sha256"]
    runs: list[dict[str, Any]] = []
    for seed in seeds:
        one = dataclasses.replace(options, kill_seed=seed, out=options.out / f"seed-{seed}")
        plan = plan_kill(one)
        found = report(one, uvloop.run(run_job(one, one.out, (plan,))))
        found |= {"kill_seed": seed, "rank": plan.rank, "killed_in_step": plan.step + 1}
        found["same_bits"] = found["weights_sha256"] == digest
        runs.append(found)
        print(json.dumps(found), flush=True)
    detection_ms = [ms for run in runs for ms in run["detection_ms"] if ms is not None]
    recovery_ms = [ms for run in runs for ms in run["recovery_ms"] if ms is not None]
    return {
        "runs": len(runs),
        "kills": sum(run["kills"] for run in runs),
        "recoveries": sum(run["recoveries"] for run in runs),
        "same_bits": all(run["same_bits"] for run in runs),
        "steps_lost": sum(run["steps_lost"] for run in runs),
        "samples_skipped": sum(run["samples_skipped"] for run in runs),
        "samples_repeated": sum(run["samples_repeated"] for run in runs),
        "detection_ms_median": statistics.median(detection_ms),
        "detection_ms_max": max(detection_ms),
        "recovery_ms_median": statistics.median(recovery_ms),
        "recovery_ms_max": max(recovery_ms),
        "weights_sha256": digest,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the seeds."""
    parser = script_parser("chaos.demo_seeds", __doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="kill seeds 0 … n-1 (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (%(default)s)")
    parser.add_argument("--data", help="file, directory or glob to train on (default: Python's own library)")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error("--seeds must be at least 1")
    log_to_stderr()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="zbmd-seeds-") as scratch:
        options = DemoOptions(
            world_size=WORLD_SIZE,
            steps=arguments.steps,
            kill_seed=0,
            verify=False,
            out=Path(scratch),
            data=arguments.data,
        )
        try:
            found = run_seeds(options, range(arguments.seeds))
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    print(json.dumps(found), flush=True)
    return 0 if found["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
