"""Weights on disk: nothing is lost on the way, and what does not fit is explained."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from zbmd.training.config import GPTConfig
from zbmd.training.model.gpt import GPT
from zbmd.training.model.weights import load_weights, save_weights
from zbmd.transport.errors import UserError
from zbmd.transport.host import files as files
from zbmd.transport.host.files import write_atomically

CONFIG = GPTConfig(context=6, width=8, heads=2, layers=2, activation="gelu")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    save_weights(path, GPT(CONFIG).init(3), CONFIG, step=17)
    return path


def rewritten(path: Path, change: str) -> Path:
    """The file at `path`, made wrong in one way."""
    tensors = load_file(path)
    with safe_open(path, framework="numpy") as file:
        metadata = dict(file.metadata())
    match change:
        case "missing":
            del tensors["head.weight"]
        case "unknown":
            tensors["surplus"] = np.zeros(1, np.float32)
        case "shape":
            tensors["head.weight"] = tensors["head.weight"].T.copy()
        case "dtype":
            tensors["head.weight"] = tensors["head.weight"].astype(np.float16)
        case "format":
            metadata["format"] = "pt"
        case "config":
            metadata["config"] = '{"width": "wide"}'
        case "huge":
            metadata["config"] = '{"layers": 1000000000}'
        case "step":
            del metadata["step"]
        case _:
            raise AssertionError(change)
    save_file(tensors, path, metadata=metadata)
    return path


def test_weights_come_back_as_they_were(saved: Path) -> None:
    params, config, step = load_weights(saved)
    assert (config, step) == (CONFIG, 17)
    assert params.tobytes() == GPT(CONFIG).init(3).tobytes()
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_any_safetensors_reader_finds_them_by_name(saved: Path) -> None:
    tensors = load_file(saved)
    assert tensors["blocks.1.attn.qkv.weight"].shape == (8, 24)
    assert len(tensors) == len(GPT(CONFIG).layout.slots)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("missing", "lacks tensor head.weight"),
        ("unknown", "has an unknown tensor surplus"),
        ("shape", r"tensor head.weight is float32 of shape \(256, 8\), not float32 of shape \(8, 256\)"),
        ("dtype", "tensor head.weight is float16"),
        ("format", "does not hold weights in the format"),
        ("config", "description of the weights .* is damaged"),
        ("huge", "layers is 1000000000"),
        ("step", "description of the weights .* is damaged"),
    ],
)
def test_weights_that_do_not_fit_are_explained(saved: Path, change: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_weights(rewritten(saved, change))


def test_missing_and_damaged_files_are_explained(saved: Path) -> None:
    with pytest.raises(UserError, match="no weights at"):
        load_weights(saved.with_name("absent"))
    saved.write_bytes(saved.read_bytes()[:-1])
    with pytest.raises(UserError, match="cannot be read as a safetensors file"):
        load_weights(saved)
    with pytest.raises(UserError, match="cannot be read"):
        load_weights(saved.parent)


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Generator[None]:
    """Let the kernel refuse writes beyond `nbytes` of a file with EFBIG, as a full disk does with ENOSPC."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(saved: Path) -> None:
    before = saved.read_bytes()
    with file_size_limit(100), pytest.raises(UserError, match="File too large"):
        save_weights(saved, GPT(CONFIG).init(4), CONFIG, step=18)
    assert saved.read_bytes() == before
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_a_full_disk_is_explained(tmp_path: Path) -> None:
    def write_to_full_device(_: object) -> None:
        with open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(UserError, match=r"the disk is full .* Free some space"):
        write_atomically(tmp_path / "file", write_to_full_device)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unnamed", [True, False])
def test_atomic_writes_with_and_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        real = os.open

        def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, mode)

        monkeypatch.setattr(files.os, "open", refuse)
    path = tmp_path / "deep" / "file"
    write_atomically(path, lambda file: file.write(b"first"))
    write_atomically(path, lambda file: file.write(b"second"))
    with pytest.raises(RuntimeError, match="midway"):
        write_atomically(path, lambda file: (file.write(b"third"), _fail()))
    assert path.read_bytes() == b"second"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def _fail() -> None:
    raise RuntimeError("midway")


def test_a_directory_that_cannot_be_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Choose a directory"):
        write_atomically(tmp_path / "file" / "below", lambda file: file.write(b"x"))


def test_a_kill_while_writing_leaves_nothing(tmp_path: Path) -> None:
    if files._unnamed(tmp_path) is None:
        pytest.fail("the test directory's file system has no O_TMPFILE: run the tests with TMPDIR on another")
    path = tmp_path / "file"
    child = os.fork()
    if child == 0:
        write_atomically(
            path, lambda file: (file.write(b"x" * (1 << 20)), os.kill(os.getpid(), signal.SIGKILL))
        )
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
