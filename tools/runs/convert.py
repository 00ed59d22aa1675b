"""`zbmd checkpoint convert`: from and to PyTorch's and Hugging Face's formats."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from zbmd.actors.rank.environment import parse_size
from zbmd.tools.cli.options import add_command
from zbmd.training.checkpoint.formats.convert import Format, convert_checkpoint
from zbmd.training.checkpoint.formats.safetensors_folder import SHARD_BYTES
from zbmd.transport.errors import UserError


def add_checkpoint(commands: Any) -> None:
    """Add `checkpoint` to the commands of `zbmd`."""
    checkpoint = add_command(
        commands,
        "checkpoint",
        "convert checkpoints from and to PyTorch's and Hugging Face's formats",
        examples=(
            "zbmd checkpoint convert zbmd-runs/train exported --to dcp",
            "zbmd checkpoint convert zbmd-runs/train model --to hf --shard-size 2GB",
            "zbmd checkpoint convert exported zbmd-runs/again --to zbmd",
        ),
    )
    kinds = checkpoint.add_subparsers(required=True, metavar="WHAT")
    made = add_command(
        kinds,
        "convert",
        "write a checkpoint in another format",
        description="FROM: the directory of a run, of torch.distributed.checkpoint, or of safetensors files.",
        examples=("zbmd checkpoint convert zbmd-runs/train exported --to dcp",),
    )
    made.add_argument("source", type=Path, metavar="FROM", help="the checkpoint to read")
    made.add_argument("target", type=Path, metavar="TO", help="a directory to make")
    made.add_argument(
        "--to",
        required=True,
        choices=[one.value for one in Format],
        help="dcp: torch.distributed.checkpoint; hf: weights in safetensors files; zbmd: of a run",
    )
    made.add_argument(
        "--shard-size", default=str(SHARD_BYTES), metavar="SIZE", help="of a file of hf (default: 5GB)"
    )
    made.set_defaults(run_command=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    try:
        shard_bytes = parse_size(arguments.shard_size)
    except UserError as error:
        raise UserError(f"--shard-size: {error}") from None
    if shard_bytes < 1:
        raise UserError(f"--shard-size: expected a size above 0, got {arguments.shard_size!r}")
    found, count = convert_checkpoint(
        arguments.source, arguments.target, Format(arguments.to), shard_bytes=shard_bytes
    )
    print(f"{arguments.target}: {count} tensors, from {found.value} to {arguments.to}")
    return 0
