"""Measure how much of a training state two steps leave unchanged: what incremental parities would save.

    python -m zbmd.tools.lab.bench.training.unchanged [--data GLOB] [--vocabulary N] [--json]

The state is compared with that of two steps before, which is what lies in the slot that a step's parities are
written to, at the last of some steps. The figures are shares of the bytes of each unit (its weights and
moments), in whole blocks of a size. A pipeline's rank holds some units. A step is of 512 tokens, so few that
many rows of the embedding get no gradient: a real one leaves less unchanged.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from zbmd.tools.bench.result import now_utc, this_machine
from zbmd.tools.cli.options import add_json, exit_code_of, script_parser
from zbmd.training.config import GPTConfig, TrainingConfig
from zbmd.training.optim import OPTIMIZERS, arrays_of
from zbmd.training.run.plain import PlainTrainer
from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import open_recipe

BLOCKS: Final = (4, 1 << 12, 1 << 16, 1 << 20)
"""Bytes of a block; 4: of a number."""


class Unchanged(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of a unit's bytes that are as two steps before, by `BLOCKS`."""

    optimizer: str
    unit: str
    nbytes: int
    shares: tuple[float, ...]


def measured(options: TrainOptions, optimizer: str) -> list[Unchanged]:
    """Train, and return the shares of the embedding, of the blocks and of the head."""
    trainer = PlainTrainer(open_recipe(options))
    kept: list[list[NDArray[np.float32]]] = []
    arrays = len(arrays_of(options.training.optimizer))
    for _ in range(options.training.steps):
        trainer.run_step()
        kept = [*kept[-2:], [np.array(each) for each in trainer.state.arrays[:arrays]]]
    model, first, last = trainer.recipe.model, kept[0], kept[-1]
    embedding, *blocks, head = model.units
    named = {"embedding": embedding, "blocks": slice(blocks[0].start, blocks[-1].stop), "head": head}
    found: list[Unchanged] = []
    for name, indices in named.items():
        spans = [slot.span for slot in model.layout.slots[indices]]
        now, then = (
            np.concatenate([array[span] for array in state for span in spans]) for state in (last, first)
        )
        shares = tuple(_share(now.view(np.uint32) == then.view(np.uint32), size // 4) for size in BLOCKS)
        found.append(Unchanged(optimizer=optimizer, unit=name, nbytes=now.nbytes, shares=shares))
    return found


def _share(same: NDArray[np.bool_], size: int) -> float:
    """Return the share of numbers that are in blocks of `size` that changed nowhere."""
    starts = range(0, len(same), size)
    held = sum(len(part) for part in (same[at : at + size] for at in starts) if part.all())
    return round(held / len(same), 4)


@exit_code_of
def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = script_parser("lab.bench.training.unchanged", __doc__)
    parser.add_argument("--data", help="as of `zbmd train`; default: Python's own library")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that bpe learns; default: 4096")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    add_json(parser)
    arguments = parser.parse_args(argv)
    found: list[Unchanged] = []
    with tempfile.TemporaryDirectory() as directory:
        for name, config in OPTIMIZERS.items():
            options = TrainOptions(
                out=Path(directory),
                data=arguments.data,
                tokens="bpe" if arguments.data else "bytes",
                vocabulary=arguments.vocabulary,
                model=GPTConfig(width=64, layers=2, context=64),
                training=TrainingConfig(
                    steps=max(3, arguments.steps), shards=2, sequences_per_shard=4, optimizer=config
                ),
            )
            found += measured(options, name)
    if arguments.json:
        print(msgspec.json.encode({"at": now_utc(), "machine": this_machine(), "figures": found}).decode())
        return 0
    print("optimizer  unit          MiB  numbers  4 KiB  64 KiB  1 MiB")
    for one in found:
        shares = "  ".join(f"{share:6.2%}" for share in one.shares)
        print(f"{one.optimizer:9}  {one.unit:10}  {one.nbytes / (1 << 20):5.1f}  {shares}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
