"""`python -m zbmd.tools.fuzzing`: it finds what is planted, saves it, repeats it; one seed is one
sequence."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from zbmd.tools.fuzzing import __main__ as fuzz
from zbmd.tools.fuzzing import coverage, registry
from zbmd.tools.fuzzing.mutate import mutate
from zbmd.tools.fuzzing.target import (
    Broken,
    Hang,
    Target,
    bounded_in_memory,
    bounded_in_time,
    refuses,
)


class Refused(Exception):
    """The error that the planted decoder may raise."""


def planted(data: bytes) -> None:
    """A decoder with a bug: it forgets that a list may be empty."""
    if not data.startswith(b"list "):
        raise Refused("no list")
    items = data[5:].split(b",")
    if items[0] == b"":
        raise IndexError("the bug")


BUGGY = Target(
    name="planted",
    what="a decoder with a bug",
    allowed=(Refused,),
    seeds=lambda: (b"list 1,2,3", b"list 4"),
    run=planted,
)


@pytest.fixture(autouse=True)
def no_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    """By mutation alone, also where atheris is installed: that has a process and a stage of CI of its own."""
    monkeypatch.setattr(fuzz, "is_installed", lambda: False)


@pytest.fixture
def with_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = {**registry.TARGETS, BUGGY.name: BUGGY}
    monkeypatch.setattr(registry, "TARGETS", targets)


def test_a_planted_bug_is_found_saved_and_repeated(
    with_bug: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found"
    assert fuzz.main(["planted", "--seconds", "30", "--seed", "7", "--save", str(found)]) == 1
    told = capsys.readouterr()
    (saved,) = found.iterdir()
    assert f"again: python -m zbmd.tools.fuzzing planted --input {saved}" in told.out
    assert "planted: IndexError: the bug" in told.out and "1 findings with seed 7" in told.out
    assert fuzz.main(["planted", "--input", str(saved)]) == 1
    assert "IndexError: the bug" in capsys.readouterr().err
    fine = tmp_path / "fine"
    fine.write_bytes(b"list 1")
    assert fuzz.main(["planted", "--input", str(fine)]) == 0
    assert "taken, as documented" in capsys.readouterr().out


def test_every_target_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(registry.TARGETS)


def test_the_first_part_of_a_name_names_all_that_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fuzz.main(["frames", "--seconds", "0.05", "--save", str(tmp_path / "none")]) == 0
    told = capsys.readouterr().out
    assert "2 targets" in told and "frames.header" in told and "frames.frame" in told
    assert "atheris is not installed" in told and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-target"], "There are: arguments, array, attach.message"),
        (["--seconds", "0"], "out of range"),
        (["--input", "x"], "the one target"),
        (["frames.header", "--input", "no-such-file"], "cannot read no-such-file"),
    ],
)
def test_bad_input_is_said(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fuzz.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_one_seed_is_one_sequence(seed: int) -> None:
    corpus = (b"\x93\x01\xa1a\xc0", b"text of a kind")

    def inputs() -> list[bytes]:
        rng = random.Random(seed)
        return [mutate(rng, corpus) for _ in range(200)]

    assert inputs() == inputs()
    assert len(set(inputs())) > 100


def test_what_takes_too_long_too_much_memory_or_a_descriptor_is_a_finding(tmp_path: Path) -> None:
    def loop(_: bytes) -> None:
        while True:
            pass

    with pytest.raises(Hang, match="test_fuzz_cli"), bounded_in_time(0.01):
        loop(b"")

    def hoard(_: bytes) -> None:
        bytes(64 << 20)

    greedy = Target(name="greedy", what="takes memory", allowed=(), seeds=lambda: (b"x",), run=hoard)
    with pytest.raises(Broken, match="bytes of input took"), bounded_in_memory(greedy, 1):
        refuses(greedy, b"x")

    left: list[int] = []
    leaky = Target(
        name="leaky",
        what="leaves descriptors",
        allowed=(),
        seeds=lambda: (b"x",),
        run=lambda _: left.append(os.open("/dev/null", os.O_RDONLY)) if len(left) < 8 else None,
    )
    try:
        finding = fuzz.fuzz(leaky, 0.05, 1, tmp_path, fuzz.Tally())
        assert finding is not None and "left open" in finding.why
    finally:
        for fd in left:
            os.close(fd)


def test_whether_atheris_is_there_is_asked_without_importing_it() -> None:
    assert isinstance(coverage.is_installed(), bool)
