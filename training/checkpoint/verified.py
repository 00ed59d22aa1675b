"""Find the newest checkpoint that is whole, to resume from, where later ones are damaged."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

from zbmd.training.checkpoint.blocks import Shard
from zbmd.training.checkpoint.index import (
    SHARDS_NAME,
    Damaged,
    ShardNames,
    candidates,
    no_checkpoint,
    read_index,
)
from zbmd.training.checkpoint.sharded import SavedState, located
from zbmd.training.checkpoint.storage import Storage
from zbmd.transport.errors import UserError

REHEARSED_BLOCKS: Final = 16
"""Of a shard, after each checkpoint: 16 MiB at most are read back."""


def each_checkpoint(storage: Storage) -> Iterator[tuple[str, ShardNames | None, str]]:
    """Yield the index of each checkpoint, the newest first, its content, and what is wrong with it or "".

    All blocks are read. Raises `UserError` for a storage that cannot be read.
    """
    tried = set[str]()
    for name in candidates(storage):
        names = None
        try:
            names = read_index(storage, name)
            if names.stem and names.stem in tried:
                continue
            tried.add(names.stem)
            with closing(SavedState(storage, name, names.plan)) as saved:
                saved.verify()
        except UserError as error:
            yield name, names, str(error)
        else:
            yield name, names, ""


def newest_whole(resume: Path) -> Path:
    """Return the index of the newest checkpoint at `resume` that verifies; report damaged ones on stderr.

    `checkpoint.json` names that one then. Another index that was named is returned as it is. Raises
    `UserError` if none is whole.
    """
    storage, name = located(resume)
    if name != SHARDS_NAME:
        return resume
    problems = list[str]()
    for name, names, problem in each_checkpoint(storage):
        if problem or names is None:
            problems.append(problem)
            continue
        for each in problems:
            print(f"left out: {each}", file=sys.stderr)
        if problems:
            print(f"going on from the checkpoint of step {names.version}", file=sys.stderr, flush=True)
            with contextlib.suppress(UserError):  # one that cannot be written is read from there nevertheless
                storage.put(SHARDS_NAME, [names.encode()])
        own = f"{names.stem}.json"
        return Path(storage.where(own if names.stem and own in storage.names() else name))
    if not problems:
        raise no_checkpoint(storage.where(SHARDS_NAME))
    raise Damaged(f"no checkpoint in {storage.where()} is whole: {' '.join(problems)}")


def rehearse(storage: Storage, name: str, digest: str) -> str:
    """Read a sample of the blocks of a shard back; return what is wrong with it, or "".

    digest: of its header. One that has been removed by now is not wrong.
    """
    try:
        file = storage.open(name)
        try:
            shard = Shard(file, digest=digest)
            blocks = shard.block_names()
            shard.verify(random.sample(blocks, min(len(blocks), REHEARSED_BLOCKS)))
        finally:
            file.close()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return f"{storage.where(name)}: {error}"
    return ""
