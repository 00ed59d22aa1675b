"""Inputs out of valid ones: what goes wrong with bytes on a wire or a disk, and what an enemy would try.

One random source, so one seed is one sequence of inputs, in every process.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from zbmd.tools.fuzzing.target import INPUT_BYTES_MAX

MUTATIONS: Final = (1, 1, 1, 1, 2, 2, 3, 6)
"""Number of changes to an input: mostly few, since an input that is rejected early does not get far."""
DEPTH_MAX = 20_000
GARBAGE_EVERY = 8
"""One input in so many is not made of a valid one."""

INTERESTING: Final = tuple(
    value & (1 << 64) - 1
    for value in (
        *(0, 1, 2, 47, 48, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, -1, -2),
        *((1 << 20) - 48, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40),
        *((1 << 63) - 1, 1 << 63),
    )
)
MSGPACK_HEADS: Final = (
    *(bytes([head]) + n.to_bytes(2, "big") for head in (0xDC, 0xDE, 0xDA) for n in (0, 1, 0xFFFF)),
    *(
        bytes([head]) + n.to_bytes(4, "big")
        for head in (0xDD, 0xDF, 0xDB, 0xC6, 0xC9)
        for n in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF)
    ),
    *(b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\x90", b"\x80", b"\xa2\xff\xfe", b"\x81\x90\x80", b"\xd4\x05a"),
    *(b"\xca\x7f\xc0\x00\x00", b"\xcb\x7f\xf0" + bytes(6), b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7)),
    *(b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd6\xff" + bytes(4)),
)
TEXTS: Final = (
    *(b"\0", b"\n", b"\r\n", b'"', b"{}", b"[]", b"null", b"NaN", b"Infinity", b"-1", b"1e999", b"9" * 5000),
    *(b"0x" + b"f" * 5000, "\u0661".encode(), "\ud7ff\u2028".encode(), b"\xff\xfe", b"../", b"%s%n", b"="),
    *(b",", b":", b" "),
)
OPENERS: Final = (b"[", b'{"a":', b"\x91", b"\x81\xa1a", b"\x81", b"(", b"[[", b"a = [", b"{a=")


def garbage(rng: random.Random, nbytes_max: int = 512) -> bytes:
    """Bytes that were never valid."""
    return rng.randbytes(rng.randrange(nbytes_max))


def mutate(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """An input: a valid one, changed in some places; now and then mere garbage."""
    if not corpus or rng.randrange(GARBAGE_EVERY) == 0:
        return garbage(rng)
    data = bytearray(rng.choice(corpus))
    for _ in range(rng.choice(MUTATIONS)):
        rng.choice(_MUTATIONS)(rng, data, corpus)
    del data[INPUT_BYTES_MAX:]
    return bytes(data)


def _place(rng: random.Random, data: bytearray) -> int:
    return rng.randint(0, len(data))


def _flip_bit(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _truncate(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[_place(rng, data) :]


def _drop(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, data)
    del data[at : at + rng.randint(1, 16)]


def _repeat(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """A part of the input once more: as a message that is sent twice."""
    begin = _place(rng, data)
    part = bytes(data[begin : begin + rng.choice((1, 2, 4, 16, 64, 1024))])
    at = _place(rng, data)
    data[at:at] = part * rng.randint(1, 4)


def _swap(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Two parts change places: as messages that overtake each other."""
    a, b, c = sorted(_place(rng, data) for _ in range(3))
    data[a:c] = data[b:c] + data[a:b]


def _splice(rng: random.Random, data: bytearray, corpus: Sequence[bytes]) -> None:
    """The head of one valid input and the tail of another."""
    other = rng.choice(corpus)
    data[_place(rng, data) :] = other[rng.randint(0, len(other)) :]


def _insert(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, data)
    data[at:at] = rng.randbytes(rng.randint(1, 32))


def _set_number(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """A length, a position or a count becomes one at a bound."""
    width = rng.choice((1, 2, 4, 8))
    value = rng.choice(INTERESTING) + rng.randint(-2, 2)
    at = _place(rng, data)
    data[at : at + width] = (value & (1 << 8 * width) - 1).to_bytes(width, rng.choice(("little", "big")))


def _other_type(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """A value becomes one of another type, or an array of four thousand million items."""
    at = _place(rng, data)
    data[at : at + rng.randint(0, 4)] = rng.choice(MSGPACK_HEADS)


def _other_text(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, data)
    data[at : at + rng.randint(0, 4)] = rng.choice(TEXTS)


def _nest(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Deeper than any stack."""
    at = _place(rng, data)
    data[at:at] = rng.choice(OPENERS) * rng.choice((16, 64, 1000, DEPTH_MAX))


def _retype(rng: random.Random, data: bytearray, _: Sequence[bytes]) -> None:
    """In MessagePack, wholly or behind a short prefix: see `retyped`."""
    for prefix in (0, 1, 16):
        changed = retyped(rng, bytes(data[prefix:]))
        if changed is not None:
            data[prefix:] = changed
            return


def retyped(rng: random.Random, encoded: bytes) -> bytes | None:
    """MessagePack that is well formed, with one value in it changed; None if `encoded` is not such."""
    try:
        tree: Any = msgspec.msgpack.decode(encoded)
        return msgspec.msgpack.encode(_changed(rng, tree, 0))
    except (ValueError, RecursionError, TypeError, OverflowError):
        return None


def _changed(rng: random.Random, tree: Any, depth: int) -> Any:
    """`tree` with one of its values replaced, dropped or doubled; deep ones as likely as shallow ones."""
    if isinstance(tree, dict) and tree and depth < TREE_DEPTH_MAX:
        key = rng.choice(list(tree))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in tree.items() if k != key}
            case 1:
                return {**tree, rng.choice(VALUES[:TEXTS_AND_NUMBERS]): tree[key]}
            case _:
                return {**tree, key: _changed(rng, tree[key], depth + 1)}
    if isinstance(tree, list) and tree and depth < TREE_DEPTH_MAX:
        at = rng.randrange(len(tree))
        match rng.randrange(8):
            case 0:
                return tree[:at] + tree[at + 1 :]
            case 1:
                return [*tree[:at], rng.choice(VALUES), *tree[at:]]
            case _:
                return [*tree[:at], _changed(rng, tree[at], depth + 1), *tree[at + 1 :]]
    if isinstance(tree, int) and not isinstance(tree, bool) and rng.randrange(2):
        return tree + rng.choice((-1, 1, 2, 63, 64, 1 << 16))
    if isinstance(tree, bytes) and rng.randrange(2):
        return retyped(rng, tree) or tree[: rng.randint(0, len(tree))]
    return rng.choice(VALUES)


TREE_DEPTH_MAX = 8
VALUES: Final[tuple[Any, ...]] = (
    *(
        0,
        1,
        -1,
        2,
        62,
        63,
        64,
        65,
        255,
        1022,
        1023,
        1024,
        1 << 31,
        (1 << 32) - 1,
        1 << 32,
        1 << 53,
        (1 << 63) - 1,
        1 << 63,
    ),
    *((1 << 64) - 1, -(1 << 63), "", "a", "rank1", "node/host", "x" * 129, "x" * 5000, "\0", "\ud7ff"),
    *("../../x", "\u0661", b"", bytes(32), b"x" * 5000, None, True, False, 0.0, -0.0, 1.5, 1e308),
    *(float("inf"), float("nan"), [], [[]], [0] * 100, {}, {"a": {}}, {1: 2}, [None, {"": [b""]}]),
)
TEXTS_AND_NUMBERS = 27
"""Number of them that may be the key of a map."""

_MUTATIONS: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip_bit,
    _flip_bit,
    _set_byte,
    _set_byte,
    _truncate,
    _drop,
    _repeat,
    _swap,
    _splice,
    _insert,
    _set_number,
    _set_number,
    _other_type,
    _other_type,
    _other_text,
    _nest,
    _retype,
    _retype,
    _retype,
    _retype,
)
