"""The target of arrays in messages: whole, or refused."""

from __future__ import annotations

import msgspec
import numpy as np

from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.training.model_actors.tensor_actor import ArrayData, pack, unpack
from zbmd.transport.errors import RemoteProtocolError

_SEEDS = (np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int64), np.array(True))


def _array(data: bytes) -> None:
    array = unpack(msgspec.msgpack.decode(data, type=ArrayData))
    again = unpack(pack(array))
    if again.dtype != array.dtype or again.shape != array.shape or again.tobytes() != array.tobytes():
        raise Broken(f"{array!r:.200}")


TARGETS = (
    Target(
        name="array",
        what="an array in a message",
        allowed=(RemoteProtocolError, msgspec.MsgspecError, ValueError, RecursionError),
        seeds=lambda: tuple(msgspec.msgpack.encode(pack(array)) for array in _SEEDS),
        run=_array,
    ),
)
"""Targets of the messages of a model's actors."""
