"""The files of a run are listed once: not its own ones, and not those that come later."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from zbmd.training.data.corpus import Corpus, prepare_corpus
from zbmd.training.data.sources import RECORD_NAME, RunData, find_sources
from zbmd.training.data.token_corpus import MANIFEST_NAME, prepare_tokens
from zbmd.transport.errors import UserError

BEGUN = RunData(begun=True)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        (tmp_path / "texts" / name).write_text(f"some text of {name} " * 200)
    return tmp_path / "texts"


def content(texts: Path, out: Path, run: RunData, data: str = "") -> bytes:
    return bytes(Corpus(prepare_corpus(data or str(texts), out, run=run), context=8).data)


@pytest.mark.parametrize("pattern", ["", "**", "*/*"])
def test_the_directory_of_the_run_is_not_data(texts: Path, pattern: str) -> None:
    out, data = texts / "runs" / "one", str(texts / pattern) if pattern else str(texts)
    out.mkdir(parents=True)
    (out / "notes").write_text("of the run")
    (texts / "more").mkdir()
    (texts / "more" / "c").write_text("deeper " * 50)
    found = [Path(source.path).name for source in find_sources(data, beside=out)]
    assert found == (["c"] if pattern == "*/*" else ["a", "b", "c"])


def test_data_may_lie_in_the_directory_of_the_run(texts: Path) -> None:
    for data in (str(texts), str(texts / "*")):
        assert [Path(source.path).name for source in find_sources(data, beside=texts.parent)] == ["a", "b"]
    with pytest.raises(UserError, match="is the directory of the run, and of its data"):
        find_sources(str(texts), beside=texts)


@pytest.mark.parametrize("run", [BEGUN, RunData(job=7)], ids=["resumed", "another rank"])
def test_a_run_that_has_begun_takes_the_files_that_it_began_with(texts: Path, run: RunData) -> None:
    out = texts / "run"
    first = content(texts, out, RunData(job=7))
    (texts / "c").write_text("a file that has come")
    assert content(texts, out, run) == first
    assert content(texts, texts / "other", RunData(resumed=out)) == first
    assert content(texts, texts / "third", RunData(resumed=out / "checkpoint.json")) == first
    assert b"that has come" in content(texts, texts / "fourth", RunData(job=7))
    assert b"that has come" in content(texts, out, RunData(job=8)), "a run that did not begin is forgotten"


def test_a_file_that_has_changed_is_named(texts: Path) -> None:
    out = texts / "run"
    first = content(texts, out, RunData(job=7))
    (texts / "b").write_text("another text" * 100)
    with structlog.testing.capture_logs() as told:
        assert content(texts, out, BEGUN) == first, "it has a copy"
    assert [one["log_level"] for one in told] == ["warning"]
    assert f"{texts / 'b'} has changed: 3,000 bytes then, 1,200 now" in told[0]["changed"]
    with pytest.raises(UserError, match=r"b has changed: .* put the file back, or begin a run with another"):
        prepare_corpus(str(texts), texts / "other", run=RunData(resumed=out))
    (texts / "b").unlink()
    with pytest.raises(UserError, match=r"b is gone \(No such file"):
        prepare_corpus(str(texts), texts / "other", run=RunData(resumed=out))


def test_tokens_are_of_the_recorded_files_too(texts: Path) -> None:
    out = texts / "run"
    prepare_tokens(str(texts), out, vocabulary=260, context=8, run=RunData(job=7))
    first = (out / MANIFEST_NAME).read_bytes()
    (texts / "c").write_text("a file that has come")
    prepare_tokens(str(texts), out, vocabulary=260, context=8, run=BEGUN)
    assert (out / MANIFEST_NAME).read_bytes() == first


def test_names_that_are_no_text_are_recorded(texts: Path) -> None:
    with open(os.fsencode(texts) + b"/\xff\xfe", "w") as file:
        file.write("under a strange name" * 20)
    out = texts / "run"
    assert content(texts, out, RunData(job=7)) == content(texts, out, BEGUN)


@pytest.mark.parametrize(
    "record", [b"", b"[]", b"{", b"\xff", b'{"format":1,"data":"x","job":0,"sources":[[1,2,3]]}']
)
def test_a_damaged_record_is_as_none(texts: Path, record: bytes) -> None:
    out = texts / "run"
    first = content(texts, out, RunData(job=7))
    (out / RECORD_NAME).write_bytes(record)
    assert content(texts, out, BEGUN) == first
