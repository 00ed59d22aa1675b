"""Every fuzz target, held to its promise by hypothesis: only documented errors, bounded memory, nothing left.

`python -m zbmd.tools.fuzzing` runs the same targets for as long as one likes.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.tools.fuzzing.mutate import INTERESTING, MSGPACK_HEADS, TEXTS, mutate
from zbmd.tools.fuzzing.registry import TARGETS
from zbmd.tools.fuzzing.target import Target, bounded_in_memory, refuses
from zbmd.tools.sim.scenarios import quietly

EXAMPLES = 25
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)

numbers = st.builds(
    lambda value, width, order: (value & (1 << 8 * width) - 1).to_bytes(width, order),
    st.sampled_from(INTERESTING),
    st.sampled_from((1, 2, 4, 8)),
    st.sampled_from(("little", "big")),
)
pieces = st.one_of(st.binary(max_size=16), numbers, st.sampled_from(MSGPACK_HEADS), st.sampled_from(TEXTS))
edits = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 64), pieces), min_size=1, max_size=4)


def edited(data: bytes, changes: list[tuple[int, int, bytes]]) -> bytes:
    """`data` with parts cut out and others put in: shrinks to the least that still shows a bug."""
    for at, drop, piece in changes:
        at %= len(data) + 1
        data = data[:at] + piece + data[at + drop :]
    return data


def hold(target: Target, data: bytes) -> None:
    with quietly(), bounded_in_memory(target, len(data)):
        refuses(target, data)


@every_target
def test_valid_inputs_are_taken(target: Target) -> None:
    with quietly():
        verdicts = [refuses(target, data) for data in target.seeds()]
    assert None in verdicts, verdicts


@every_target
def test_garbage_is_refused_with_a_documented_error(target: Target) -> None:
    @settings(max_examples=EXAMPLES)
    @given(st.one_of(st.binary(max_size=64), st.binary(min_size=64, max_size=2048)))
    def garbage(data: bytes) -> None:
        hold(target, data)

    garbage()


@every_target
def test_edited_inputs_are_refused_with_a_documented_error(target: Target) -> None:
    run_edited(target)


def run_edited(target: Target) -> None:
    corpus = target.seeds()

    @settings(max_examples=EXAMPLES)
    @given(st.sampled_from(corpus), edits)
    def check(data: bytes, changes: list[tuple[int, int, bytes]]) -> None:
        hold(target, edited(data, changes))

    check()


@every_target
def test_mutated_inputs_are_refused_with_a_documented_error(target: Target, seed: int) -> None:
    rng, corpus = random.Random(seed), target.seeds()
    for _ in range(EXAMPLES):
        hold(target, mutate(rng, corpus))


Refused = tuple[str, bytes]
FOUND: dict[str, Refused] = {
    "an offer whose name is no UTF-8": ("attach.message", b"\0\x93\xa5off\xff\xfe\x01\xc0"),
    "a named argument whose name is a number": ("arguments", b"\x92\x90\x81\x01\x02"),
    "a tuple of arguments that is a number": ("arguments", b"\x92\x91\xd4\x02\x05\x80"),
    "a reply to the template's host that is no UTF-8": ("template.packet", b"\1\x94\xa5for\xff\xfe\0\1\2"),
    "a report that is no UTF-8": ("host.report", b"\x81\xa2\xff\xfe\x01"),
    "a text of a capture that is not ASCII": ("capture.text", b"# a.zlog\n\xc3\xa9\xc3\xa9"),
    "a text of a capture with too long a name": ("capture.text", b"# " + b"a" * 300 + b".zlog\nAAAA"),
    "a number of 5,000 digits in the settings": ("settings.toml", b"nproc_per_node = " + b"9" * 5000),
    "settings nested too deep": ("settings.toml", b"capture = " + b"[" * 20_000),
    "a hexadecimal number too long to print": ("settings.toml", b"max_restarts = 0x" + b"f" * 5000),
    "settings that are no settings": ("settings.toml", b"# " + b"x" * (1 << 20)),
    "a count of faults of 5,000 digits": ("sim.faults", b"9" * 5000),
    "a program with a number of 5,000 digits": (
        "program",
        b"program ring n=2 rank=0 blocks=1 chunks=1 scratch=0 inbox=0\nnotify " + b"9" * 5000,
    ),
    "a commit log with a list for a key": ("ledger", b"\x81\x91\x01\x01"),
    "a file that is no commit log": ("ledger", b"\xc1 somebody's notes"),
    "a corpus whose header is no UTF-8": ("corpus", b'{"format":1,"digest":"\xff\xfe"}'),
    "a result that is no UTF-8": ("result", b'{"deaths": [], "verified": "\xff"}'),
    "a plan that is no plan": ("ledger.plan", b"[" * 20_000),
}
"""Inputs that were findings once."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_refused(name: str) -> None:
    target_name, data = FOUND[name]
    target = TARGETS[target_name]
    with quietly(), bounded_in_memory(target, len(data)):
        assert isinstance(refuses(target, data), target.allowed)


LONG = b"9" * 5000


@pytest.mark.parametrize("data", [LONG, LONG + b"MiB", LONG + b"ms", b"1." + LONG + b"s"])
def test_numbers_of_any_length_are_refused_as_options(data: bytes) -> None:
    hold(TARGETS["options"], data)
