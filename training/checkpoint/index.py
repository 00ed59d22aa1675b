"""The index of a checkpoint: its version, plan and shards, and which checkpoints of a run are kept.

Each checkpoint has an index of its own, `checkpoint-<version>-<token>.json`, written when all of its shards
are durable: a checkpoint without one is not complete. `checkpoint.json` is a copy of the newest one's, and is
written last.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from zbmd.training.checkpoint.blocks import digest_of
from zbmd.training.checkpoint.storage import Storage
from zbmd.transport.errors import UserError

SHARDS_FORMAT: Final = "zbmd-checkpoint-shards-2"
SHARDS_NAME: Final = "checkpoint.json"
MANIFEST_BYTES_MAX: Final = 1 << 20
KEEP_DEFAULT: Final = 2
_FILE: Final = re.compile(
    r"(checkpoint-(\d{1,18})-[0-9a-f]{16})(-\d+\.safetensors|-part-\d+\.json|\.json)", re.ASCII
)


class ShardNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index of a checkpoint: its version, its plan (see `plan_text`), the loss scale, and its shard
    files.

    headers: the digest of each shard's header, on which the ranks that wrote them have voted; digest: of the
    index itself.
    """

    format: str
    version: int
    plan: str
    loss_scale: tuple[float, ...]
    files: tuple[str, ...]
    headers: tuple[str, ...] = ()
    digest: str = ""

    @property
    def stem(self) -> str:
        """Return the beginning of its files' names; empty if it has none."""
        return self.files[0].rsplit("-", 1)[0] if self.files else ""

    def encode(self) -> bytes:
        """Return the file, with its digest."""
        read = msgspec.json.decode(msgspec.json.encode(self), type=ShardNames)  # 1 is 1.0 then
        return msgspec.json.encode(msgspec.structs.replace(read, digest=_digest(read)))


def _digest(names: ShardNames) -> str:
    return digest_of(msgspec.json.encode(msgspec.structs.replace(names, digest="")))


def is_shard(name: str) -> bool:
    """Return whether a file has the name of a shard."""
    found = _FILE.fullmatch(name)
    return found is not None and found[3].endswith(".safetensors")


def is_checkpoint_file(name: str) -> bool:
    """Return whether a file is of a checkpoint: a shard, a host's part of an index (`parts`), or an index."""
    return name == SHARDS_NAME or _FILE.fullmatch(name) is not None


def read_index(storage: Storage, name: str = SHARDS_NAME) -> ShardNames:
    """Return an index. Raises `UserError` if it is missing or damaged."""
    try:
        data = storage.get(name, MANIFEST_BYTES_MAX + 1)
        if len(data) > MANIFEST_BYTES_MAX:
            raise ValueError(f"it has more than {MANIFEST_BYTES_MAX} bytes")
        names = msgspec.json.decode(data, type=ShardNames)
        if names.format != SHARDS_FORMAT or names.version < 0:
            raise ValueError(f"its format is {names.format}, its version {names.version}")
        strange = [name for name in names.files if not is_shard(name)]
        if strange:
            raise ValueError(f"{strange[0]!r} is not the name of a shard")
        if names.digest != _digest(names):
            raise ValueError("checksum mismatch: the index was corrupted after it was written")
        if len(names.headers) != len(names.files):
            raise ValueError(f"it has {len(names.headers)} digests of {len(names.files)} shards")
    except FileNotFoundError as error:
        raise no_checkpoint(storage.where(name)) from error
    except (OSError, ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
        raise unreadable(storage.where(name), error) from error
    return names


def put_index(storage: Storage, names: ShardNames) -> None:
    """Publish a checkpoint whose shards are durable. Raises `UserError`; another one counts then."""
    data = names.encode()
    if names.files:
        storage.put(f"{names.stem}.json", [data])
    storage.put(SHARDS_NAME, [data])


@dataclass(frozen=True, slots=True)
class Retention:
    """Which complete checkpoints are kept. keep: the last so many; every: and those of each `every`-th
    version, for ever; 0: of none.
    """

    keep: int = KEEP_DEFAULT
    every: int = 0

    def check(self) -> None:
        """Raise `UserError` for what keeps nothing."""
        if self.keep < 1:
            raise UserError(f"--keep-checkpoints: expected at least 1, got {self.keep}")
        if self.every < 0:
            raise UserError(f"--keep-every: expected 0 or more steps, got {self.every}")

    def removed(self, files: Iterable[str], named: ShardNames) -> list[str]:
        """Return which of the files go once the checkpoint `named` is published, indexes first.

        It and what it names stay. Complete ones of later versions are of a run that another one has taken the
        place of, and go; shards and parts of later versions without an index may become whole, and stay.
        Those of earlier ones go: `named` has taken their place. Nobody needs a part beside an index.
        """
        found = [(match, name) for name in files if (match := _FILE.fullmatch(name))]
        complete = {match[1]: int(match[2]) for match, _ in found if match[3] == ".json"}
        if named.stem:
            complete[named.stem] = named.version
        earlier = sorted(
            (stem for stem in complete if stem != named.stem and complete[stem] < named.version),
            key=lambda stem: (-complete[stem], stem),
        )
        kept = {named.stem, *earlier[: self.keep - 1]}
        if self.every:
            kept |= {stem for stem in earlier if complete[stem] and complete[stem] % self.every == 0}
        gone = [
            (match[3] != ".json", name)
            for match, name in found
            if (match[1] not in kept and (int(match[2]) <= named.version or match[1] in complete))
            or (match[1] in complete and match[3].startswith("-part-"))
        ]
        return [name for _, name in sorted(gone) if name not in named.files]


KEEP: Final = Retention()


def remove_others(
    storage: Storage, named: ShardNames, retention: Retention, known: Container[str] | None = None
) -> None:
    """Remove what `retention` does not keep. What cannot be removed is left to the next checkpoint.

    known: others than these are left as well; None: none are.
    """
    try:
        for name in retention.removed(storage.names(), named):
            if known is None or name in known or name.startswith(f"{named.stem}-"):
                storage.remove(name)
    except OSError:
        return


def remove_unnamed(storage: Storage, stem: str) -> None:
    """Remove the shards of a checkpoint that was not published. What cannot be removed is left."""
    try:
        there = [name for name in storage.names() if name.startswith(f"{stem}-")]
        if f"{stem}.json" not in storage.names():
            for name in there:
                storage.remove(name)
    except OSError:
        return


def candidates(storage: Storage) -> list[str]:
    """Return the names of all indexes, the one that counts first, then by descending version.

    Raises `UserError` for a storage that cannot be read.
    """
    try:
        names = storage.names()
    except OSError as error:
        raise unreadable(storage.where(), error) from error
    found = [(int(match[2]), name) for name in names if (match := _FILE.fullmatch(name)) if is_index(name)]
    first = [SHARDS_NAME] if SHARDS_NAME in names else []
    return first + [name for _, name in sorted(found, reverse=True)]


def is_index(name: str) -> bool:
    """Return whether a file has the name of an index of its own."""
    found = _FILE.fullmatch(name)
    return found is not None and found[3] == ".json"


def no_checkpoint(where: object) -> UserError:
    """Return the error for a missing checkpoint."""
    return UserError(f"there is no checkpoint at {where}: check the path given to --resume.")


class Damaged(UserError):
    """A checkpoint cannot be read: another one may be."""


def unreadable(where: object, why: object) -> Damaged:
    """Return the error for one that is damaged."""
    reason = why.strerror if isinstance(why, OSError) and why.strerror else why
    return Damaged(
        f"{where} cannot be read as a checkpoint: {reason}. Give --resume a run's directory with a whole "
        "checkpoint, or omit it to start from the beginning."
    )


def require_shared(storage: Storage, files: Sequence[str]) -> None:
    """Raise `UserError` if a shard that another rank has written is not in the storage of this one."""
    try:
        absent = sorted(set(files) - set(storage.names()))
    except OSError as error:
        raise unreadable(storage.where(), error) from error
    if absent:
        raise UserError(
            f"{', '.join(absent)} is not in {storage.where()} of this host: a checkpoint needs a directory "
            "that all ranks share. Name one with --out or --checkpoint-to."
        )
