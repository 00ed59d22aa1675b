"""Tokenizers: bytes as they are, or byte pair encoding (BPE) learned from a text.

BPE comes from the `tokenizers` library, on bytes, so that every text can be encoded and nothing is unknown
(R. Sennrich and others, 2016, arXiv:1508.07909; A. Radford and others, 2019).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt

from zbmd.training.config import EXTENT_MAX, VOCABULARY
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_BYTES_MAX = 64 << 20
END_OF_TEXT = "<|endoftext|>"
BPE_VOCABULARY_MIN = VOCABULARY + 1
"""All bytes, and the end of a text."""

Tokens = npt.NDArray[np.uint16]


class Tokenizer(Protocol):
    """Converts text to tokens and back."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens."""
        ...

    @property
    def separator(self) -> int:
        """Return the token between two texts."""
        ...

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the tokenizer, hex."""
        ...

    def encode(self, text: bytes) -> Tokens:
        """Return the tokens of a text."""
        ...

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens."""
        ...


class ByteTokenizer:
    """One token per byte, with a zero byte between texts."""

    vocabulary = VOCABULARY
    separator = 0
    digest = hashlib.sha256(b"bytes").hexdigest()

    def encode(self, text: bytes) -> Tokens:
        """See `Tokenizer`."""
        return np.frombuffer(text, np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """See `Tokenizer`."""
        return bytes(tokens)


class BPETokenizer:
    """Byte pair encoding, from `text` in the JSON of the `tokenizers` library. Raises `UserError`."""

    def __init__(self, text: bytes, origin: str) -> None:
        tokenizers = _library()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(text.decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{origin} is not a tokenizer: {error}. Train it again.") from error
        separator = self._tokenizer.token_to_id(END_OF_TEXT)
        self.vocabulary: int = self._tokenizer.get_vocab_size()
        if separator is None or self.vocabulary > EXTENT_MAX:
            raise UserError(
                f"{origin} is not a usable tokenizer: expected at most {EXTENT_MAX} tokens (it has "
                f"{self.vocabulary}), with {END_OF_TEXT} among them."
            )
        self.separator: int = separator
        self.digest = hashlib.sha256(text).hexdigest()
        self.text = text

    @classmethod
    def train(cls, texts: Iterable[bytes], vocabulary: int) -> BPETokenizer:
        """Learn at most `vocabulary` tokens from `texts`. Raises `UserError`."""
        if not BPE_VOCABULARY_MIN <= vocabulary <= EXTENT_MAX:
            raise UserError(
                f"a vocabulary of {vocabulary} cannot be trained: give {BPE_VOCABULARY_MIN} to {EXTENT_MAX}."
            )
        tokenizers = _library()
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
        return cls(made.to_str().encode(), "the tokenizer just trained")

    @classmethod
    def load(cls, path: Path) -> BPETokenizer:
        """Read a tokenizer file. Raises `UserError`."""
        try:
            with path.open("rb") as file:
                text = file.read(TOKENIZER_BYTES_MAX + 1)
        except OSError as error:
            raise UserError(f"cannot read the tokenizer {path}: {error.strerror}.") from None
        if len(text) > TOKENIZER_BYTES_MAX:
            raise UserError(f"{path} has more than {TOKENIZER_BYTES_MAX} bytes: it is not a tokenizer.")
        return cls(text, str(path))

    def save(self, path: Path) -> None:
        """Write the tokenizer to a file, atomically. Raises `UserError`."""
        write_atomically(path, lambda file: file.write(self.text))

    def encode(self, text: bytes) -> Tokens:
        """See `Tokenizer`. Invalid UTF-8 becomes U+FFFD, and no text yields a special token."""
        ids = self._tokenizer.encode(text.decode(errors="replace")).ids
        return np.array([i for i in ids if i != self.separator], dtype=np.uint16)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """See `Tokenizer`."""
        decoded: str = self._tokenizer.decode(list(tokens))
        return decoded.encode()


def read_pieces(file: IO[bytes], size: int, nbytes: int | None = None) -> Iterator[bytes]:
    """Yield a text in pieces of up to `size` bytes, ending at a line's end, otherwise at a space if there is
    one.

    `nbytes`: read only the beginning of the text. One piece is in memory at a time.
    """
    left, room = b"", nbytes
    while True:
        wanted = size - len(left)
        more = file.read(wanted if room is None else min(wanted, room))
        room = None if room is None else room - len(more)
        text = left + more
        if not more:  # its end
            if text:
                yield text
            return
        if len(text) < size:
            left = text
            continue
        stop = text.rfind(b"\n") + 1 or max(0, text.rfind(b" ")) or size
        yield text[:stop]
        left = text[stop:]


def _library() -> Any:
    # Without a pool of its own: a process with threads cannot fork, and the ranks of a host share its cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError('BPE needs the tokenizers library: pip install "zbmd[train]".') from error
