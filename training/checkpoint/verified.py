"""Find the newest checkpoint that is whole, to resume from, where later ones are damaged."""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
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


Vote = Callable[[int], Sequence[int]]
"""Takes the number of this rank; returns those of all, by place. All ranks call it together."""

_NONE: Final = 1 << 30
"""The vote of a rank that knows of no whole checkpoint."""


def each_checkpoint(
    storage: Storage, *, place: int = 0, places: int = 1
) -> Iterator[tuple[str, ShardNames | None, str]]:
    """Yield the index of each checkpoint, the newest first, its content, and what is wrong with it or "".

    All blocks are read; of several `places`, the part of the rank at `place`, and all indexes and headers.
    Raises `UserError` for a storage that cannot be read.
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
                saved.verify(place=place, places=places)
        except UserError as error:
            yield name, names, str(error)
        else:
            yield name, names, ""


def newest_whole(resume: Path, vote: Vote | None = None, *, place: int = 0, places: int = 1) -> Path:
    """Return the index of the newest checkpoint at `resume` that verifies; report damaged ones on stderr.

    `checkpoint.json` names that one then. Another index that was named is returned as it is. Raises
    `UserError` if none is whole.

    vote: with it, `places` ranks call this together, and the one at `place` reads its part of the blocks: one
    is whole if all say so. Raises what `vote` raises.
    """
    storage, name = located(resume)
    if name != SHARDS_NAME:
        return resume
    search = _Search(storage, place, places)
    at = search.whole_from(0)
    while vote is not None and {at} != {*(votes := vote(at))}:
        at = search.whole_from(max(votes))  # what another rank has found damaged is left out here as well
    if not search.seen:
        raise no_checkpoint(storage.where(SHARDS_NAME))
    problems = [problem for _, _, problem in search.seen[:at] if problem]
    if at == _NONE:
        told = " ".join(problems) or "other ranks have found damaged blocks, and name them."
        raise Damaged(f"no checkpoint in {storage.where()} is whole: {told}")
    for each in problems:
        print(f"left out: {each}", file=sys.stderr, flush=True)
    name, names, _ = search.seen[at]
    assert names is not None, "a checkpoint without an index is damaged"
    if at and not place:
        print(f"going on from the checkpoint of step {names.version}", file=sys.stderr, flush=True)
        with contextlib.suppress(UserError):  # one that cannot be written is read from there nevertheless
            storage.put(SHARDS_NAME, [names.encode()])
    own = f"{names.stem}.json"
    return Path(storage.where(own if names.stem and own in storage.names() else name))


class _Search:
    """The checkpoints of a storage, the newest first, as far as they have been read here."""

    def __init__(self, storage: Storage, place: int, places: int) -> None:
        self._left, self._places = each_checkpoint(storage, place=place, places=places), places
        self.seen: list[tuple[str, ShardNames | None, str]] = []

    def whole_from(self, first: int) -> int:
        """Return the first number from `first` on of one of which this rank's part is whole, or `_NONE`."""
        for at in itertools.count():
            if at == len(self.seen):
                try:
                    found = next(self._left, None)
                except UserError as error:  # the vote says so to the others
                    if self._places == 1:
                        raise
                    found = "", None, str(error)
                if found is None:
                    return _NONE
                self.seen.append(found)
            if at >= first and not self.seen[at][2]:
                return at
        raise AssertionError("the search ends with the checkpoints")


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
