"""Train a byte-level GPT. Alone in one process, or on every rank of `zbmd-node run -m zbmd.training`.

examples:
  zbmd-node run -n 4 -m zbmd.training --steps 300
  zbmd-node run -n 4 -m zbmd.training --data 'texts/**/*.txt' --out runs/texts
  python -m zbmd.training --plain --steps 300 --out runs/plain
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import uvloop

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.optim import CURVES, OPTIMIZERS
from zbmd.training.replicated.job import (
    JobOptions,
    JobResult,
    check_data,
    check_memory,
    plan_of,
    run_job,
    run_plain,
)
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
    made.add_argument("--curve", choices=CURVES, default=training.curve, help="of the rate (%(default)s)")
    made.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw", help="(%(default)s)")
    made.add_argument("--horizon", type=int, default=0, help="steps over which it goes down; 0: all")
    for name in ("context", "width", "heads", "layers"):
        made.add_argument(f"--{name}", type=int, default=getattr(model, name), help="model (%(default)s)")
    made.add_argument(
        "--checkpoint-every", type=int, default=50, help="steps, 0: only the last (%(default)s)"
    )
    made.add_argument("--evaluate-every", type=int, default=50, help="steps, 0: only the last (%(default)s)")
    made.add_argument(
        "--storage",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of weights and gradients, with --plain (%(default)s)",
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
            curve=arguments.curve,
            horizon=arguments.horizon,
            optimizer=OPTIMIZERS[arguments.optimizer],
        ),
        checkpoint_every=arguments.checkpoint_every,
        evaluate_every=arguments.evaluate_every,
    )


def _require_effect(arguments: argparse.Namespace) -> None:
    """Raise `UserError` for options that have no effect."""
    if arguments.storage != "float32" and not arguments.plain:
        raise UserError(
            f"--storage {arguments.storage} is for --plain: add it, or train with zbmd train --precision."
        )


def _run(arguments: argparse.Namespace, options: JobOptions) -> JobResult | None:
    _require_effect(arguments)
    if arguments.plain:
        return run_plain(options, storage=arguments.storage)
    return uvloop.run(run_job(options))


def parsed(
    made: argparse.ArgumentParser, argv: Sequence[str], *, data: str | None
) -> tuple[argparse.Namespace, bool]:
    """What `made` understands, in a launcher, and whether the run's directory was named.

    data: what ranks will find in their environment. Raises `UserError`.
    """
    made.set_defaults(data=data, out=None)
    arguments = made.parse_args(argv)
    is_named = arguments.out is not None
    arguments.out = arguments.out if is_named else _default_out()
    return arguments, is_named


def check(argv: Sequence[str], *, ranks: int, data: str | None) -> None:
    """Raise `UserError` for what this job cannot do on `ranks` ranks of this host, before one is started."""
    arguments, is_named = parsed(parser(), argv, data=data)
    options = options_of(arguments)
    _require_effect(arguments)
    if arguments.plain:
        plan = partial(plan_of, precision=arguments.storage)
        check_data(options, plan=plan, is_named=is_named, has_log=False)
    else:
        check_memory(options, ranks=ranks)
        check_data(options, plan=plan_of, is_named=is_named)


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
