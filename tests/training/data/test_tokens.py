"""Byte pairs and their shards: every text comes back, windows cross files, bad input is reported."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbmd.training.data import token_corpus
from zbmd.training.data.token_corpus import (
    MANIFEST_NAME,
    TokenCorpus,
    prepare_tokens,
    shard_name,
)
from zbmd.training.data.tokenizers import (
    END_OF_TEXT,
    TOKENIZER_NAME,
    BPETokenizer,
    ByteTokenizer,
    read_pieces,
)
from zbmd.transport.errors import UserError

TEXT = b"the cat sat on the mat, and the other cat sat there too.\n" * 40


@pytest.fixture(scope="module")
def tokenizer() -> BPETokenizer:
    return BPETokenizer.train([TEXT], 300)


def write_texts(directory: Path) -> str:
    for name in ("a", "b", "c"):
        (directory / f"{name}.txt").write_bytes(TEXT + name.encode())
    return str(directory / "*.txt")


def test_texts_come_back(tokenizer: BPETokenizer) -> None:
    @settings(max_examples=30)
    @given(st.text(max_size=40))
    def comes_back(text: str) -> None:
        for one in (tokenizer, ByteTokenizer()):
            tokens = one.encode(text.encode())
            assert one.decode(tokens.tolist()) == text.encode()
            assert not len(tokens) or tokens.max() < one.vocabulary

    comes_back()
    assert len(tokenizer.encode(TEXT)) < len(TEXT) / 3
    assert tokenizer.separator not in tokenizer.encode(b"a " + END_OF_TEXT.encode() + b" b")


class Dribbling(io.BytesIO):
    """A file that gives less than it is asked for, as pipes do."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(size if size is None or size < 0 else min(size, 3))


@given(st.text(" \nab", max_size=60), st.integers(1, 20), st.none() | st.integers(0, 70))
def test_pieces_are_the_text(text: str, size: int, nbytes: int | None) -> None:
    for kind in (io.BytesIO, Dribbling):
        cut = list(read_pieces(kind(text.encode()), size, nbytes))
        assert b"".join(cut) == text.encode()[:nbytes]
        assert all(0 < len(piece) <= size for piece in cut)
        for piece, following in pairwise(cut):
            assert piece.endswith(b"\n") or following.startswith(b" ") or piece[1:].isalpha() or size == 1


def test_texts_longer_than_what_is_learnt_from_are_tokens_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_corpus, "TRAINED_ON_BYTES", 1 << 12)
    monkeypatch.setattr(token_corpus, "PIECE_BYTES", 1 << 10)
    texts = [b"one and two and three\n" * 900, b"four and five \xc3\xa4\n" * 900]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text)
    learnt: list[int] = []
    train = BPETokenizer.train

    def counting(given: Iterable[bytes], vocabulary: int) -> BPETokenizer:
        kept = list(given)
        learnt.append(sum(map(len, kept)))
        return train(kept, vocabulary)

    monkeypatch.setattr(BPETokenizer, "train", counting)
    made = prepare_tokens(
        str(tmp_path / "*.txt"), tmp_path / "tokens", vocabulary=300, context=8, shard_tokens=1000
    )
    assert 1 << 12 <= learnt[0] <= (1 << 12) + len(texts)
    shards = sorted((tmp_path / "tokens").glob("tokens-*.bin"))
    whole = np.concatenate([np.fromfile(shard, "<u2") for shard in shards])
    found = np.split(whole, np.flatnonzero(whole == made.separator))
    assert [made.decode(t[t != made.separator].tolist()) for t in found] == texts


def test_windows_cross_shards(tmp_path: Path) -> None:
    data = write_texts(tmp_path)
    made = prepare_tokens(data, tmp_path / "tokens", vocabulary=290, context=8, shard_tokens=100)
    corpus = TokenCorpus(tmp_path / "tokens", context=8)
    whole = np.concatenate(
        [np.fromfile(tmp_path / "tokens" / shard_name(i), "<u2") for i in range(len(corpus.manifest.shards))]
    )
    assert len(corpus.manifest.shards) > 3 and len(whole) == sum(corpus.manifest.shards)
    ids = np.arange(corpus.split.window_count)
    found = corpus.windows(ids)
    assert np.array_equal(found[:, :-1].reshape(-1), whole[: found[:, :-1].size])
    assert np.array_equal(found[:-1, -1], found[1:, 0])
    texts = np.split(whole, np.flatnonzero(whole == made.separator))
    assert [made.decode(t[t != made.separator].tolist()) for t in texts] == [
        TEXT + n for n in (b"a", b"b", b"c")
    ]


def test_what_is_there_is_used_again(tmp_path: Path) -> None:
    data, directory = write_texts(tmp_path), tmp_path / "tokens"
    first = prepare_tokens(data, directory, vocabulary=290, context=8)
    made = (directory / MANIFEST_NAME).stat().st_mtime_ns
    again = prepare_tokens(data, directory, vocabulary=290, context=8)
    assert again.digest == first.digest and (directory / MANIFEST_NAME).stat().st_mtime_ns == made
    other = prepare_tokens(data, directory, vocabulary=270, context=8)
    assert other.vocabulary < first.vocabulary
    kept = prepare_tokens(
        data, tmp_path / "more", vocabulary=0, context=8, tokenizer=directory / TOKENIZER_NAME
    )
    assert kept.digest == other.digest


def test_trouble_is_explained(tmp_path: Path, tokenizer: BPETokenizer) -> None:
    data, directory = write_texts(tmp_path), tmp_path / "tokens"
    with pytest.raises(UserError, match="a vocabulary of 10 cannot be trained"):
        prepare_tokens(data, directory, vocabulary=10, context=8)
    with pytest.raises(UserError, match=r"too short: it has \d+ tokens, and sequences of 5000 need"):
        prepare_tokens(data, directory, vocabulary=290, context=5000)
    with pytest.raises(UserError, match="no tokens of this version"):
        TokenCorpus(directory, context=8)
    (tmp_path / "bad.json").write_bytes(b"{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        BPETokenizer.load(tmp_path / "bad.json")
    prepare_tokens(data, directory, vocabulary=290, context=8)
    (directory / shard_name(0)).write_bytes(b"xy")
    with pytest.raises(UserError, match="is damaged: it should hold"):
        TokenCorpus(directory, context=8)
