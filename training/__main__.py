"""Train a byte-level GPT. Alone in one process, or on every rank of `zbmd-node run -m zbmd.training`.

examples:
  zbmd-node run -n 4 -m zbmd.training --steps 300
  zbmd-node run -n 4 -m zbmd.training --data 'texts/**/*.txt' --out runs/texts
  zbmd-node run -n 4 -m zbmd.training --zero 3 --storage bfloat16
  python -m zbmd.training --plain --steps 300 --out runs/plain
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop

from zbmd.actors.runtime_env import RankEnvironment
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.job import JobOptions, JobResult, run, run_plain
from zbmd.training.zero.job import run_zero
from zbmd.training.zero.trainer import ZeroOptions
from zbmd.transport.errors import UserError

USER_ERROR_EXIT = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one paragraph, as the rest of the job does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See {self.prog} --help.")


def parser() -> argparse.ArgumentParser:
    """The options of the job."""
    made = _Parser(
        prog="python -m zbmd.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model, training = GPTConfig(), TrainingConfig(steps=300)
    made.add_argument(
        "--data", default=os.environ.get("ZBMD_DATA"), help="file, directory or glob to train on"
    )
    made.add_argument("--out", type=Path, default=_default_out(), help="directory of the run (%(default)s)")
    made.add_argument("--resume", type=Path, help="checkpoint to go on from")
    made.add_argument("--steps", type=int, default=training.steps, help="steps (%(default)s)")
    made.add_argument("--seed", type=int, default=training.seed, help="seed (%(default)s)")
    made.add_argument("--shards", type=int, default=training.shards, help="logical shards (%(default)s)")
    made.add_argument(
        "--sequences-per-shard",
        type=int,
        default=training.sequences_per_shard,
        help="windows a shard (%(default)s)",
    )
    made.add_argument("--lr", type=float, default=training.learning_rate, help="peak rate (%(default)s)")
    made.add_argument("--warmup", type=int, default=training.warmup_steps, help="steps (%(default)s)")
    for name in ("context", "width", "heads", "layers"):
        made.add_argument(f"--{name}", type=int, default=getattr(model, name), help="model (%(default)s)")
    made.add_argument(
        "--checkpoint-every", type=int, default=50, help="steps, 0: only the last (%(default)s)"
    )
    made.add_argument("--evaluate-every", type=int, default=50, help="steps, 0: only the last (%(default)s)")
    made.add_argument("--zero", type=int, choices=(1, 2, 3), help="share the state out: ZeRO of this stage")
    made.add_argument(
        "--storage",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and gradients, with --zero or --plain (%(default)s)",
    )
    made.add_argument(
        "--offload",
        type=Path,
        metavar="FOLDER",
        help="with --zero: the optimizer's state in files here, on a disk of each host, instead of in memory",
    )
    made.add_argument("--plain", action="store_true", help="one plain process, without any of the stack")
    return made


def _default_out() -> Path:
    return Path("zbmd-runs") / os.environ.get("ZBMD_JOB", f"alone-{os.getpid()}")


def options_of(arguments: argparse.Namespace) -> JobOptions:
    """The job that the command line asks for. Raises `UserError`."""
    return JobOptions(
        out=arguments.out,
        data=arguments.data,
        resume=arguments.resume,
        model=GPTConfig(
            context=arguments.context,
            width=arguments.width,
            heads=arguments.heads,
            layers=arguments.layers,
        ),
        training=TrainingConfig(
            steps=arguments.steps,
            seed=arguments.seed,
            shards=arguments.shards,
            sequences_per_shard=arguments.sequences_per_shard,
            learning_rate=arguments.lr,
            warmup_steps=arguments.warmup,
        ),
        checkpoint_every=arguments.checkpoint_every,
        evaluate_every=arguments.evaluate_every,
    )


def _run(arguments: argparse.Namespace, options: JobOptions) -> JobResult | None:
    if arguments.plain:
        return run_plain(options, storage=arguments.storage)
    if arguments.zero is None:
        if arguments.offload is not None:
            raise UserError("--offload is for a state that is shared out: add --zero 1, 2 or 3.")
        return uvloop.run(run(options))
    zero = ZeroOptions(stage=arguments.zero, storage=arguments.storage, offload=arguments.offload)
    return uvloop.run(run_zero(options, zero))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job; the last line printed by the lowest rank is its result as JSON.

    Under a launcher a `UserError` is raised: the launcher tells it, once for all ranks.
    """
    try:
        arguments = parser().parse_args(argv)
        result = _run(arguments, options_of(arguments))
    except UserError as error:
        if RankEnvironment.read(os.environ) is not None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_EXIT
    if result is not None:
        print(msgspec.json.encode(asdict(result)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
