"""The files of a checkpoint: what is in them, what is kept of them, and that no byte changes unnoticed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from zbmd.training.autograd.parameter_layout import ParameterLayout, flat_slice
from zbmd.training.checkpoint.blocks import BLOCK_BYTES, Codec, Shard
from zbmd.training.checkpoint.index import (
    SHARDS_FORMAT,
    SHARDS_NAME,
    Retention,
    ShardNames,
    is_shard,
    put_index,
    read_index,
)
from zbmd.training.checkpoint.sharded import Piece, open_state, write_alone
from zbmd.training.checkpoint.storage import Directory, storage_of, url_of
from zbmd.transport.errors import UserError

SLOTS = ParameterLayout.of({"a": (3, 5), "b": (2,)}).slots
PLAN = "{}"


def pieces(scale: float = 1.0) -> list[Piece]:
    return [
        Piece(
            slot.name,
            flat_slice(slot.size, 0, slot.size),
            tuple(np.arange(slot.size, dtype=np.float32) * scale + at for at in range(3)),
        )
        for slot in SLOTS
    ]


def the_shard(directory: Path) -> Path:
    (found,) = (path for path in directory.iterdir() if is_shard(path.name))
    return found


@pytest.mark.parametrize("codec", Codec)
def test_a_state_comes_back_and_is_smaller_where_it_is_compressed(tmp_path: Path, codec: Codec) -> None:
    size = 3 * BLOCK_BYTES // 4 + 7  # its last block is not whole
    values = np.random.default_rng(1).normal(size=size).astype(np.float32)
    piece = Piece("x", flat_slice(size, 0, size), (values, np.zeros(size, np.float32), values))
    write_alone(tmp_path, [piece], version=4, plan=PLAN, codec=codec)
    slot = ParameterLayout.of({"x": (size,)}).slots[0]
    with closing(open_state(tmp_path, plan=PLAN)) as saved:
        saved.verify()
        assert saved.parameter("weights", slot).tobytes() == values.tobytes()
        assert not saved.parameter("mean", slot).any()
    nbytes = the_shard(tmp_path).stat().st_size
    assert nbytes < 2 * values.nbytes if codec is Codec.ZSTD else nbytes > 3 * values.nbytes


def test_without_compression_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    write_alone(tmp_path, pieces(), version=1, plan=PLAN)
    found = load_file(the_shard(tmp_path))
    assert found["weights.a"].reshape(-1).tolist() == list(range(15)) and found["mean.b"].dtype == np.float32


@pytest.mark.parametrize("codec", Codec)
def test_no_byte_changes_unnoticed(tmp_path: Path, codec: Codec) -> None:
    """Of the shard, and of both indexes; the error names the file, and the block if it is one of data."""
    write_alone(tmp_path, pieces(), version=1, plan=PLAN, codec=codec)
    named, data_begins = set[str](), 0
    for path in (the_shard(tmp_path), tmp_path / SHARDS_NAME):
        data = path.read_bytes()
        if is_shard(path.name):
            data_begins = 8 + int.from_bytes(data[:8], "little")
        for at in range(len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
            with (
                pytest.raises(UserError, match="check") as caught,
                closing(open_state(tmp_path, plan=PLAN)) as it,
            ):
                it.verify()
            assert path.name in str(caught.value)
            if is_shard(path.name) and at >= data_begins:
                named.add(str(caught.value).partition(" in ")[2].partition(" (")[0])
        for cut in (0, 7, len(data) // 2, len(data) - 1):
            path.write_bytes(data[:cut])
            with pytest.raises(UserError), closing(open_state(tmp_path, plan=PLAN)) as it:
                it.verify()
        path.write_bytes(data)
    assert named == {
        f"block 0 of {array}.{slot.name}" for array in ("weights", "mean", "square") for slot in SLOTS
    }


def test_a_file_without_checksums_is_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-3-0000000000000001-0.safetensors"
    save_file({"weights.b": np.zeros(2, np.float32)}, path, {"format": SHARDS_FORMAT})
    with pytest.raises(ValueError, match="it has no checksums of weights"):
        Shard(Directory(tmp_path).open(path.name))


# ---- what is kept


def files_of(version: int, *, token: int = 0, complete: bool = True) -> list[str]:
    stem = f"checkpoint-{version}-{token:016x}"
    return [f"{stem}-0.safetensors", f"{stem}-1.safetensors", *([f"{stem}.json"] if complete else [])]


def named_at(version: int, token: int = 0) -> ShardNames:
    files = tuple(files_of(version, token=token, complete=False))
    return ShardNames(format="", version=version, plan="", loss_scale=(), files=files)


@given(
    versions=st.sets(st.integers(0, 30), min_size=1),
    incomplete=st.sets(st.integers(0, 30)),
    keep=st.integers(1, 4),
    every=st.integers(0, 5),
)
def test_the_last_ones_stay_and_nothing_else(
    versions: set[int], incomplete: set[int], keep: int, every: int
) -> None:
    newest = max(versions)
    there = [name for version in versions for name in files_of(version)] + [
        "weights.safetensors",
        SHARDS_NAME,
    ]
    there += [name for version in incomplete for name in files_of(version, token=1, complete=False)]
    gone = set(Retention(keep, every).removed(there, named_at(newest)))
    kept = set(sorted(versions)[-keep:]) | {each for each in versions if every and each and each % every == 0}
    left = {name for version in kept for name in files_of(version)}
    # What has no index, and is later, may be being written.
    left |= {name for each in incomplete if each > newest for name in files_of(each, token=1, complete=False)}
    assert set(there) - gone == left | {"weights.safetensors", SHARDS_NAME}


def test_a_run_that_goes_back_takes_the_place_of_later_checkpoints() -> None:
    """Those of the same version and of later ones, once it has published its own."""
    there = [*files_of(4), *files_of(6), *files_of(6, token=1), *files_of(8), *files_of(9, complete=False)]
    gone = Retention().removed(there, named_at(6, token=1))
    assert set(gone) == {*files_of(6), *files_of(8)}
    assert gone[0].endswith(".json") and gone[-1].endswith(".safetensors")


def test_a_kill_while_others_are_removed_leaves_no_index_without_its_shards(tmp_path: Path) -> None:
    """They go index first: whatever is left is complete, or goes with the next one."""
    for version in (1, 2, 3, 4):
        write_alone(tmp_path, pieces(version), version=version, plan=PLAN, retention=Retention(9))
    names = read_index(Directory(tmp_path))
    for name in Retention(1).removed(Directory(tmp_path).names(), names):
        (tmp_path / name).unlink()
        for index in tmp_path.glob("checkpoint*.json"):
            with closing(open_state(index, plan=PLAN)) as saved:
                saved.verify()
    assert len(list(tmp_path.iterdir())) == 3
    put_index(Directory(tmp_path), names)  # the same again changes nothing
    assert read_index(Directory(tmp_path)).version == 4


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://b/p/", "s3://b/p"),
        ("s3:/b/p", "s3://b/p"),
        ("runs/s3:/x", None),
        ("gs://b", "gs://b"),
        ("/a", None),
    ],
)
def test_urls_are_known_also_where_they_have_been_paths(text: str, url: str | None) -> None:
    assert url_of(text) == url == url_of(Path(text))


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIDKEY:hunter2@bucket/runs",
        "s3:/AKIDKEY:hunter2@bucket/runs",
        "s3://hunter2@bucket",
        "s3://AKIDKEY:hunter2/of+base64/@bucket/runs",
        "s3://bucket/runs?aws_secret_access_key=hunter2",
        "az://container/runs?sig=hunter2",
        "gs://bucket/runs#hunter2",
        "https://user:hunter2@host/bucket",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(text: str) -> None:
    for where in (text, Path(text)):
        with pytest.raises(UserError, match="only from the environment") as caught:
            storage_of(where)
        assert "hunter2" not in str(caught.value) and "AKIDKEY" not in str(caught.value)
    assert storage_of("a@b/runs?x#1").where() == "a@b/runs?x#1", "a directory may have any name"
