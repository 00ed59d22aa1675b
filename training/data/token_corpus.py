"""Training text as tokens: shards of 16-bit integers in memory-mapped files, and a manifest.

Texts are encoded one after the other, with the tokenizer's separator between two, and packed: windows are cut
from the whole wherever a text ends, so no token is padding. Held-out windows are as in
`zbmd.training.data.corpus`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.training.data.corpus import Corpus, CorpusHeader, Ids, Split, require_disk
from zbmd.training.data.sources import (
    NEW_RUN,
    RunData,
    Source,
    inputs_digest,
    report_changed,
    require_unchanged,
    settled_sources,
    sources_for,
    unreadable,
)
from zbmd.training.data.tokenizers import TOKENIZER_NAME, BPETokenizer, Tokenizer, Tokens, read_pieces
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

MANIFEST_NAME = "tokens.json"
FORMAT = 1
SHARD_TOKENS = 1 << 25
"""Most tokens of a shard file: 64 MiB."""
PIECE_BYTES = 1 << 20
"""Text that is encoded at once."""
TRAINED_ON_BYTES = 64 << 20
"""Text that a tokenizer is trained on; of longer corpora, the same fraction of each text."""
MANIFEST_BYTES_MAX = 1 << 20
SHARDS_MAX = 4096


class TokenManifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a directory of tokens. `shards`: the number of tokens in each file, in order.

    `inputs_digest` identifies the sources and the tokenizer that were requested, `digest` the tokens.
    """

    format: int
    digest: str
    inputs_digest: str
    vocabulary: int
    shards: list[int]
    sources: int
    left_out_bytes: int
    origin: str


class TokenCorpus(Corpus):
    """An open directory of tokens, divided into windows for contexts of `context` tokens.

    Raises `UserError` if it is missing, damaged or too short.
    """

    def __init__(self, directory: Path, *, context: int) -> None:
        manifest = read_manifest(directory)
        if manifest is None:
            raise UserError(f"no tokens of this version in {directory}: prepare them again.")
        count = sum(manifest.shards)
        self.manifest = manifest
        self.context = context
        self.header = CorpusHeader(
            format=manifest.format,
            digest=manifest.digest,
            inputs_digest=manifest.inputs_digest,
            nbytes=2 * count,
            sources=manifest.sources,
            left_out_bytes=manifest.left_out_bytes,
            origin=manifest.origin,
        )
        self.split = Split(require_windows(count, manifest.origin, context))
        self._maps = [
            _mapped(directory / shard_name(number), length) for number, length in enumerate(manifest.shards)
        ]
        self._starts = np.array([0, *accumulate(manifest.shards)])

    def windows(self, ids: Ids) -> npt.NDArray[np.uint16]:  # type: ignore[override]
        """Return the tokens of windows `ids`: (len(ids), context + 1) uint16."""
        places = ids[:, None] * self.context + np.arange(self.context + 1)
        made = np.empty(places.shape, np.uint16)
        shards = np.searchsorted(self._starts, places, side="right") - 1
        for shard in np.unique(shards):
            here = shards == shard
            made[here] = self._maps[shard][places[here] - self._starts[shard]]
        return made


def require_windows(tokens: int, origin: str, context: int) -> int:
    """Return the number of windows. Raises `UserError` without one to train on and one to hold out."""
    windows = (tokens - 1) // context
    if windows < 2:
        raise UserError(
            f"the dataset {origin} is too short: it has {tokens} tokens, and sequences of {context} need at "
            f"least {2 * context + 1}. Give more text, or a shorter --context."
        )
    return windows


def prepare_tokens(
    data: str,
    directory: Path,
    *,
    vocabulary: int,
    context: int,
    tokenizer: Path | None = None,
    shard_tokens: int = SHARD_TOKENS,
    run: RunData = NEW_RUN,
) -> BPETokenizer:
    """Create the BPE tokens of `data` in `directory`, unless they are up to date, and return their tokenizer.

    `data`: files as for `prepare_corpus`, of any length: at most one shard is in memory. Without `tokenizer`,
    a file, one with `vocabulary` tokens is trained on `TRAINED_ON_BYTES` of the text and saved in the
    directory. Existing tokens are used again if the sources have not changed. One process of a host at a time
    does this in a directory. Raises `UserError`.
    """
    sources = sources_for(data, directory, run)
    given = None if tokenizer is None else BPETokenizer.load(tokenizer)
    asked = given.digest if given is not None else f"vocabulary {vocabulary}"
    with settled_sources(data, directory, sources, run) as sources:
        wanted = inputs_digest(sources, FORMAT, TRAINED_ON_BYTES, f"{asked} {shard_tokens}")
        known, path = read_manifest(directory), directory / TOKENIZER_NAME
        if known is not None and known.inputs_digest == wanted and path.exists():
            require_windows(sum(known.shards), known.origin, context)
            report_changed(sources)
            return BPETokenizer.load(path)
        require_unchanged(sources)
        made = given or BPETokenizer.train(_sample(sources, TRAINED_ON_BYTES), vocabulary)
        manifest = _write(directory, made, sources, (wanted, data), shard_tokens, context)
        made.save(path)
        write_atomically(directory / MANIFEST_NAME, lambda file: file.write(msgspec.json.encode(manifest)))
    return made


def _write(
    directory: Path,
    tokenizer: Tokenizer,
    sources: list[Source],
    asked: tuple[str, str],
    shard_tokens: int,
    context: int,
) -> TokenManifest:
    digest, lengths = hashlib.sha256(tokenizer.digest.encode()), list[int]()
    held: list[Tokens] = []

    def put(size: int) -> None:
        if len(lengths) == SHARDS_MAX:
            raise UserError(
                f"{asked[1]} is more than {SHARDS_MAX} files of {size} tokens: give less text at once."
            )
        tokens = np.concatenate(held)
        require_disk(directory, min(len(tokens), size) * tokens.itemsize, asked[1])
        shard, rest = tokens[:size], tokens[size:]
        data = shard.astype("<u2").tobytes()
        digest.update(data)
        write_atomically(directory / shard_name(len(lengths)), lambda file: file.write(data))
        lengths.append(len(shard))
        held[:] = [rest] if len(rest) else []

    for tokens in _encoded(tokenizer, sources):
        held.append(tokens)
        while sum(map(len, held)) >= shard_tokens:
            put(shard_tokens)
    if held:
        put(shard_tokens)
    require_windows(sum(lengths), asked[1], context)
    return TokenManifest(
        format=FORMAT,
        digest=digest.hexdigest(),
        inputs_digest=asked[0],
        vocabulary=tokenizer.vocabulary,
        shards=lengths,
        sources=len(sources),
        left_out_bytes=0,
        origin=asked[1][:512],
    )


def _encoded(tokenizer: Tokenizer, sources: list[Source]) -> Iterator[Tokens]:
    separator = np.array([tokenizer.separator], np.uint16)
    for number, source in enumerate(sources):
        if number:
            yield separator
        for piece in _pieces_of(source):
            yield tokenizer.encode(piece)


def _sample(sources: list[Source], nbytes: int) -> Iterator[bytes]:
    """Yield pieces of all texts, or about `nbytes` of them: the same fraction from each text's beginning."""
    share = min(1.0, nbytes / max(1, sum(source.nbytes for source in sources)))
    for source in sources:
        yield from _pieces_of(source, math.ceil(share * source.nbytes))


def _pieces_of(source: Source, nbytes: int | None = None) -> Iterator[bytes]:
    """Yield the pieces of a text, or of its first `nbytes`. Raises `UserError` if it cannot be read."""
    try:
        with open(source.path, "rb") as file:
            yield from read_pieces(file, PIECE_BYTES, nbytes)
    except OSError as error:
        raise unreadable(source.path, error.strerror) from error


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"tokens-{number:05}.bin"


def read_manifest(directory: Path) -> TokenManifest | None:
    """Return the manifest in `directory`, or None if there is none of this version."""
    try:
        with (directory / MANIFEST_NAME).open("rb") as file:
            found = msgspec.json.decode(file.read(MANIFEST_BYTES_MAX), type=TokenManifest)
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    except OSError as error:
        raise UserError(f"cannot read the tokens in {directory}: {error.strerror}.") from error
    fits = found.format == FORMAT and 0 < len(found.shards) <= SHARDS_MAX
    return found if fits and all(0 < length <= SHARD_TOKENS for length in found.shards) else None


def _mapped(path: Path, length: int) -> Tokens:
    try:
        if path.stat().st_size != 2 * length:
            raise UserError(f"{path} is damaged: it should hold {length} tokens. Prepare them again.")
        return np.memmap(path, np.dtype("<u2"), mode="r", shape=(length,))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Prepare the tokens again.") from error
