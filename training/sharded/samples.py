"""Text that the model writes while it is trained (`--sample-every`): a line of samples.jsonl each time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from zbmd.training.autograd.array_module import Array
from zbmd.training.config import VOCABULARY, GPTConfig
from zbmd.training.data.tokenizers import TOKENIZER_NAME, BPETokenizer
from zbmd.training.model.generate import generate_tokens
from zbmd.training.model.gpt import GPT
from zbmd.transport.errors import UserError

SAMPLES_NAME: Final = "samples.jsonl"
TOKENS: Final = 128
TEXT_SHOWN: Final = 200
FILE_BYTES_MAX: Final = 64 << 20
"""Size from which on no samples are added."""
LAST_BYTES: Final = 1 << 16
"""The end of the file that is read for its last line: many times a line of so many tokens."""


class SampleLine(msgspec.Struct, frozen=True, kw_only=True):
    """A text that the weights after `step` wrote."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    text: Annotated[str, msgspec.Meta(max_length=1 << 20)]


def read_samples(path: Path) -> Iterator[SampleLine]:
    """Yield the samples in a file; damaged lines are left out."""
    try:
        data = path.read_bytes()[: 2 * FILE_BYTES_MAX]
    except FileNotFoundError:
        return
    yield from _lines_in(data)


def _lines_in(data: bytes) -> Iterator[SampleLine]:
    for line in data.splitlines():
        try:
            yield msgspec.json.decode(line, type=SampleLine)
        except (ValueError, RecursionError):
            continue


def _last_step(path: Path) -> int:
    """Return the step of the last sample, which is the latest, or -1."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LAST_BYTES))
            return max((one.step for one in _lines_in(file.read())), default=-1)
    except FileNotFoundError:
        return -1


def write_sample(directory: Path, config: GPTConfig, weights: Array, *, step: int, seed: int) -> None:
    """Write a sample of `weights`, the whole model's, unless there is one of a step so late.

    The same weights write the same text. Raises `UserError`.
    """
    path = directory / SAMPLES_NAME
    try:
        if _last_step(path) >= step:
            return  # repeated after a loss
        tokenizer = _tokenizer_in(directory, config)
        prompt = [ord("\n")] if tokenizer is None else [tokenizer.separator]
        drawn = list(generate_tokens(GPT(config), weights, prompt=prompt, length=TOKENS, seed=seed + step))
        data = bytes(drawn) if tokenizer is None else tokenizer.decode(drawn)
        text = data.decode(errors="replace")
        with path.open("ab") as file:
            if file.tell() < FILE_BYTES_MAX:
                file.write(msgspec.json.encode(SampleLine(step=step, text=text)) + b"\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
    print(f"step {step} sample {text[:TEXT_SHOWN]!r}", file=sys.stderr, flush=True)


def _tokenizer_in(directory: Path, config: GPTConfig) -> BPETokenizer | None:
    """Return the tokenizer of the run; None: its tokens are bytes."""
    path = directory / TOKENIZER_NAME
    return None if config.vocabulary == VOCABULARY or not path.exists() else BPETokenizer.load(path)
