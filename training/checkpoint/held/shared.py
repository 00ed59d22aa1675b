"""The storage that the snapshot processes of several hosts share, for one checkpoint: does their tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple, Self, assert_never

import msgspec

from zbmd.training.checkpoint.blocks import digest_of
from zbmd.training.checkpoint.held.gathering import Done, Event, Failed, Seen, Sight, Task
from zbmd.training.checkpoint.held.messages import SaveShard
from zbmd.training.checkpoint.index import Retention, read_index
from zbmd.training.checkpoint.parts import part_name, put_part, read_parts
from zbmd.training.checkpoint.sharded import name_written
from zbmd.training.checkpoint.storage import Storage
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

PART_POINT = faults.declare("shards.part", "when the shards of a host are durable, before its part is")
PARTED_POINT = faults.declare("shards.parted", "when the part of a host is durable, before it looks for more")
FOUND_POINT = faults.declare("shards.found", "when a host has found all parts, before it publishes the whole")


class Published(NamedTuple):
    """The checkpoint that `checkpoint.json` names; version 0 if there is none."""

    version: int = 0
    stem: str = ""

    @classmethod
    def of(cls, storage: Storage) -> Self:
        """Read it. One that cannot be read is none."""
        try:
            names = read_index(storage)
        except UserError:
            return cls()
        return cls(names.version, names.stem)

    def leaves(self, version: int, before: Published) -> bool:
        """Return whether a checkpoint of `version` may be published after this one. before: when it began.

        A later one that was there before is of a run that went back.
        """
        return self == before or self.version <= version


class Shared:
    """One checkpoint of several hosts. first: a request for one of its shards; before: the one before it."""

    def __init__(self, storage: Storage, first: SaveShard, before: Published) -> None:
        self.storage, self._first, self._before = storage, first, before
        self._checkpoint = digest_of(msgspec.msgpack.encode(first.everywhere()))
        self._known = frozenset[str]()
        """The files that were there when this host began: others may be of a later checkpoint."""
        self._headers: dict[int, str] = {}
        """Of all shards, once all parts are found."""
        with contextlib.suppress(OSError):  # then they stay until the next one is published
            self._known = frozenset(() if first.together else storage.names())

    def done(self, task: Task, headers: Mapping[int, str]) -> Event:
        """Do a task, and return what has come of it. headers: of the shards of this host."""
        try:
            match task:
                case Task.PUT_PART:
                    faults.hit(PART_POINT)
                    put_part(self.storage, self._first.stem, self._checkpoint, headers)
                    faults.hit(PARTED_POINT)
                case Task.LOOK:
                    return Seen(self._look())
                case Task.PUBLISH:
                    faults.hit(FOUND_POINT)
                    self._publish()
                case _:
                    assert_never(task)
        except (UserError, OSError, ValueError) as error:
            return Failed(task, str(error))
        return Done(task)

    def _look(self) -> Sight:
        first, homes = self._first, set(self._first.homes)
        names = set(self.storage.names())
        parts = {part_name(first.stem, home) for home in homes}
        is_named = f"{first.stem}.json" in names
        if not is_named and not parts <= names:
            return Sight.MISSING
        counts = Published.of(self.storage)
        if counts.stem == first.stem:
            return Sight.PUBLISHED
        if not counts.leaves(first.version, self._before):
            return Sight.OVERTAKEN
        if not parts <= names:
            return Sight.PUBLISHED  # another one counts by now, of a run that went back
        try:
            self._headers = read_parts(self.storage, first.stem, self._checkpoint, homes, first.places)
        except FileNotFoundError:
            return Sight.MISSING  # it was published and they were removed meanwhile: the next look finds it
        return Sight.WHOLE

    def _publish(self) -> None:
        first = self._first
        if not Published.of(self.storage).leaves(first.version, self._before):
            raise UserError("a later one was published meanwhile.")
        name_written(
            self.storage,
            first.stem,
            {place: header for place, header in self._headers.items() if header},
            version=first.version,
            plan=first.plan,
            loss_scale=first.loss_scale,
            retention=Retention(first.keep, first.every),
            known=self._known,
        )
