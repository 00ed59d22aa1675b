"""Convert a checkpoint between the formats: of zbmd, of `torch.distributed.checkpoint`, of Hugging Face."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path

from zbmd.training.checkpoint.formats.dcp import is_dcp, open_dcp, write_dcp
from zbmd.training.checkpoint.formats.safetensors_folder import (
    SHARD_BYTES,
    is_safetensors,
    open_folder,
    write_folder,
)
from zbmd.training.checkpoint.formats.tensors import Content, content_of, write_run
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import open_state, read_names
from zbmd.transport.errors import UserError


class Format(StrEnum):
    """A format of checkpoints."""

    ZBMD = "zbmd"
    DCP = "dcp"
    HF = "hf"


@contextmanager
def opened(path: Path) -> Generator[tuple[Format, Content]]:
    """Open a checkpoint in any format, which is found by its files. Raises `UserError`."""
    index = path / SHARDS_NAME if path.is_dir() else path
    if index.name == SHARDS_NAME and index.is_file():
        plan = read_names(index).plan
        with closing(open_state(index, plan=plan)) as saved:
            yield Format.ZBMD, content_of(saved, plan)
    elif is_dcp(path):
        yield Format.DCP, open_dcp(path)
    elif is_safetensors(path):
        yield Format.HF, open_folder(path)
    else:
        raise UserError(
            f"there is no checkpoint at {path}: expected the directory of a run ({SHARDS_NAME}), a folder of "
            "torch.distributed.checkpoint (.metadata) or of safetensors files"
        )


def convert_checkpoint(
    source: Path, target: Path, to: Format, *, shard_bytes: int = SHARD_BYTES
) -> tuple[Format, int]:
    """Write the checkpoint at `source` into the new directory `target`.

    Return the format of the source, and how many tensors it has. Raises `UserError` for a target that is
    there, and for what the format cannot hold.
    """
    with opened(source) as (found, content):
        if to is Format.ZBMD and content.meta is None:
            write_run(target, content)  # it says why not
        try:
            target.mkdir(parents=True)
        except FileExistsError:
            raise UserError(f"{target} exists: give a directory that does not exist yet") from None
        except OSError as error:
            raise UserError(f"cannot make {target}: {error.strerror}: give another directory") from error
        if to is Format.ZBMD:
            write_run(target, content)
        elif to is Format.DCP:
            write_dcp(target, content)
        else:
            write_folder(target, content, shard_bytes=shard_bytes)
        return found, len(content.tensors)
