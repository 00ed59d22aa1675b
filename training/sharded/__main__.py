"""Train a GPT on a mesh of `dp × tp` ranks, by a recipe: what `zbmd train` runs on every rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import uvloop

from zbmd.training.sharded.options import TrainOptions
from zbmd.training.sharded.run import check_recipe, train


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe that the one argument spells, as JSON; the first rank's last line is the result."""
    given = list(sys.argv[1:] if argv is None else argv)
    options = TrainOptions.decode("".join(given))
    uvloop.run(train(options))
    return 0


def check(argv: Sequence[str], *, ranks: int, data: str | None) -> None:
    """Raise `UserError` for a recipe that `ranks` ranks of this host cannot train, before one is started.

    data: not used, as a recipe names its own.
    """
    check_recipe(TrainOptions.decode("".join(argv)), ranks)


if __name__ == "__main__":
    sys.exit(main())
