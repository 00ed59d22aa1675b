"""The corpus: which files, in which order, what is held out, made once; and the order of samples."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.autograd.rng import Permutation, Purpose, stream
from zbmd.training.data.corpus import (
    CORPUS_FILE,
    Corpus,
    SampleOrder,
    Split,
    prepare_corpus,
)
from zbmd.training.data.sources import RECORD_NAME, find_sources
from zbmd.transport.errors import UserError


def corpus_of(directory: Path, data: bytes, *, context: int) -> Corpus:
    source = directory / "source"
    source.write_bytes(data)
    return Corpus(prepare_corpus(str(source), directory / "run"), context=context)


def test_a_directory_is_joined_in_the_order_of_paths(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    for name, text in (("b", b"two"), ("a/z", b"one"), ("c", b"\xff\x00three"), ("d", b"")):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes(text)
    corpus = Corpus(prepare_corpus(str(texts), tmp_path), context=2)
    assert bytes(corpus.data) == b"one\0two\0\xff\x00three\0"
    assert (corpus.header.sources, corpus.header.left_out_bytes) == (4, 0)


def test_a_glob_crosses_directories_and_takes_files_only(tmp_path: Path) -> None:
    (tmp_path / "x.txt").mkdir()
    (tmp_path / "x.txt" / "deep.txt").write_bytes(b"deep")
    (tmp_path / "y.txt").write_bytes(b"flat")
    (tmp_path / "z.bin").write_bytes(b"no")
    found = find_sources(str(tmp_path / "**" / "*.txt"))
    assert [Path(source.path).name for source in found] == ["deep.txt", "y.txt"]


def test_the_default_is_the_standard_library_without_tests(tmp_path: Path) -> None:
    corpus = Corpus(prepare_corpus(None, tmp_path), context=64)
    assert corpus.header.nbytes > 4_000_000
    text = bytes(corpus.data)
    assert b"class ThreadingHTTPServer" in text
    assert b"site-packages" not in corpus.header.origin.encode()
    assert b"class BaseTestDecompressor" not in text


def test_it_is_made_once_and_again_when_a_source_changes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"first" * 10)
    path = prepare_corpus(str(source), tmp_path)
    made = path.stat().st_ino, path.stat().st_mtime_ns
    assert prepare_corpus(str(source), tmp_path) == path
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == made
    old = Corpus(path, context=4)
    os.utime(source, ns=(1, 1))
    source.write_bytes(b"other" * 10)
    prepare_corpus(str(source), tmp_path)
    assert bytes(Corpus(path, context=4).data) == b"other" * 10
    assert bytes(old.data) == b"first" * 10, "a process that has the old file mapped keeps it whole"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [CORPUS_FILE, RECORD_NAME, "source"]


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b"{}"), lambda p: os.truncate(p, 5000)])
def test_a_damaged_corpus_file_is_made_again(tmp_path: Path, damage: object) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"text" * 1000)
    path = prepare_corpus(str(source), tmp_path)
    assert callable(damage)
    damage(path)
    with pytest.raises(UserError, match="not a corpus file"):
        Corpus(path, context=4)
    assert bytes(Corpus(prepare_corpus(str(source), tmp_path), context=4).data) == b"text" * 1000


def test_a_corpus_is_cut_at_its_bound_and_says_so(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 10)
    corpus = Corpus(prepare_corpus(str(tmp_path / "[abc]"), tmp_path, bytes_max=15), context=3)
    assert bytes(corpus.data) == b"a" * 10 + b"\0" + b"b" * 4
    assert corpus.header.left_out_bytes == 16


def test_a_long_text_is_taken_whole_a_piece_at_a_time(tmp_path: Path) -> None:
    nbytes, source = 80 << 20, tmp_path / "long"
    with source.open("wb") as file:  # of holes, but for its end
        file.seek(nbytes - 3)
        file.write(b"end")
    tracemalloc.start()
    try:
        corpus = Corpus(prepare_corpus(str(source), tmp_path / "run"), context=64)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (corpus.header.nbytes, corpus.header.left_out_bytes) == (nbytes, 0)
    assert bytes(corpus.data[-3:]) == b"end"
    assert peak < 8 << 20


def test_a_text_that_the_disk_has_no_room_for_is_told_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_bytes(b"text" * 1000)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"takes 4,000 bytes in .*, and its disk has 100 free"):
        prepare_corpus(str(tmp_path / "text"), tmp_path / "run")
    assert not list((tmp_path / "run").glob("corpus*"))


def test_missing_unmatched_and_empty_data_are_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'--data ".*absent" does not exist'):
        prepare_corpus(str(tmp_path / "absent"), tmp_path)
    with pytest.raises(UserError, match="no file matches"):
        prepare_corpus(str(tmp_path / "*.absent"), tmp_path)
    with pytest.raises(UserError, match="no file matches"):
        prepare_corpus(str(tmp_path), tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="is empty: all of its 1 files"):
        prepare_corpus(str(tmp_path / "empty"), tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["empty"]


def test_a_corpus_shorter_than_two_windows_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 16 bytes.*at least 17"):
        corpus_of(tmp_path, b"x" * 16, context=8)
    assert corpus_of(tmp_path, b"x" * 17, context=8).split.window_count == 2


def test_a_source_that_disappears_is_explained_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match="no file matches"):
        prepare_corpus(str(tmp_path / "*"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@settings(max_examples=60, deadline=None)
@given(windows=st.integers(2, 5000))
def test_every_window_is_either_trained_on_or_held_out(windows: int) -> None:
    split = Split(windows)
    train = split.training_ids(np.arange(split.training_count)).tolist()
    held = split.held_out_ids(np.arange(split.held_out_count)).tolist()
    assert train == sorted(train)
    assert held == sorted(held)
    assert sorted(train + held) == list(range(windows))
    assert len(train) > 0
    assert 0 < len(held) <= max(1, windows // 10)


def test_no_held_out_byte_is_a_training_target(tmp_path: Path) -> None:
    data = bytes(range(1, 256))
    corpus = corpus_of(tmp_path, data, context=6)
    split = corpus.split
    train = corpus.windows(split.training_ids(np.arange(split.training_count)))
    held = corpus.windows(split.held_out_ids(np.arange(split.held_out_count)))
    targets, held_targets = set(train[:, 1:].ravel().tolist()), set(held[:, 1:].ravel().tolist())
    assert not targets & held_targets
    assert targets | held_targets == set(data[1 : 1 + 6 * split.window_count])
    assert all(bytes(window) in data for window in (*train, *held))


def test_evaluation_windows_are_held_out_distinct_and_spread(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, bytes(100_000), context=8)
    held = corpus.split.held_out_ids(np.arange(corpus.split.held_out_count))
    picked = corpus.evaluation_ids(7)
    assert len(set(picked.tolist())) == 7
    assert set(picked.tolist()) <= set(held.tolist())
    assert picked[-1] > corpus.split.window_count * 0.8
    assert corpus.evaluation_ids(10**9).tolist() == held.tolist()


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), index=st.integers(0, 50))
def test_a_permutation_meets_every_element_once(size: int, seed: int, index: int) -> None:
    permutation = Permutation(size, seed=seed, index=index)
    everything = np.arange(size, dtype=np.int64)
    image = permutation(everything)
    assert sorted(image.tolist()) == everything.tolist()
    np.testing.assert_array_equal(permutation(everything[size // 2 :]), image[size // 2 :])


def test_a_permutation_mixes() -> None:
    size = 10_000
    image = Permutation(size, seed=1)(np.arange(size))
    correlation = np.corrcoef(np.arange(size), image)[0, 1]
    assert abs(correlation) < 0.05
    assert (np.abs(np.diff(image)) == 1).sum() < 10
    other = Permutation(size, seed=1, index=1)(np.arange(size))
    assert (image == other).sum() < 10


def test_a_permutation_refuses_what_lies_outside() -> None:
    with pytest.raises(ValueError, match="outside"):
        Permutation(10, seed=0)(np.array([10]))
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, seed=0)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(2, 60), batch=st.integers(1, 25), seed=st.integers(0, 2**63 - 1))
def test_every_window_is_used_once_before_any_is_used_again(count: int, batch: int, seed: int) -> None:
    split = Split(count)
    order = SampleOrder(split, seed=seed, batch=batch)
    steps = 4 * -(-split.training_count // batch)
    drawn = np.concatenate([order.sample_ids(step) for step in range(steps)])
    everything = split.training_ids(np.arange(split.training_count)).tolist()
    for start in range(0, len(drawn) - len(everything) + 1, len(everything)):
        assert sorted(drawn[start : start + len(everything)]) == everything
    middle = steps // 2
    fresh = SampleOrder(split, seed=seed, batch=batch)
    np.testing.assert_array_equal(fresh.sample_ids(middle), order.sample_ids(middle))


def test_streams_of_two_purposes_differ() -> None:
    draws = {
        stream(seed, purpose, index).integers(2**63)
        for seed in (0, 1)
        for purpose in Purpose
        for index in (0, 1)
    }
    assert len(draws) == 2 * len(Purpose) * 2
