"""Training text: any files, joined into one memory-mapped file and divided into windows, some held out.

The corpus file is one header page (JSON, padded) followed by the bytes of all sources in order, with a zero
byte between two sources. It is written once and mapped by every process: opening it reads one page.

Window i is the bytes [i * T, i * T + T]: T inputs, each predicting the byte after it, so that every byte but
the first is predicted once. Windows are grouped into blocks of `BLOCK_WINDOWS`, or fewer in a short corpus,
and the last of every `HELD_OUT_EVERY` blocks is held out (5 %). Held-out text is thus spread evenly over the
corpus, in contiguous runs, and no held-out byte is ever a target in training.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from zbmd.training.autograd.rng import Permutation
from zbmd.training.config import VOCABULARY
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
from zbmd.transport.errors import UserError
from zbmd.transport.host.files import write_atomically

SMOOTHING = 0.1  # added to every count; 0.01 to 1 differ by 0.001 nats on the standard library
WINDOWS_PER_PASS = 4_096


def fit_bigram(corpus: Corpus) -> npt.NDArray[np.float64]:
    """Return log P(next byte | byte), (256, 256) in nats, over all pairs in the corpus' training windows.

    This table is the baseline that a model has to beat. `SMOOTHING` is added to the counts (G. J. Lidstone,
    1920), so that no pair is impossible.
    """
    counts = np.zeros(VOCABULARY * VOCABULARY, dtype=np.int64)
    count = corpus.split.training_count
    for start in range(0, count, WINDOWS_PER_PASS):
        ids = corpus.split.training_ids(np.arange(start, min(start + WINDOWS_PER_PASS, count)))
        windows = corpus.windows(ids).astype(np.intp)
        pairs = windows[:, :-1] * VOCABULARY + windows[:, 1:]
        counts += np.bincount(pairs.reshape(-1), minlength=VOCABULARY * VOCABULARY)
    table = counts.reshape(VOCABULARY, VOCABULARY) + SMOOTHING
    logs: npt.NDArray[np.float64] = np.log(table / table.sum(axis=1, keepdims=True))
    return logs


def bigram_loss(table: npt.NDArray[np.float64], windows: Windows) -> float:
    """Return the mean loss of `table` on `windows`, (samples, T + 1) uint8, in nats per byte."""
    return float(-table[windows[:, :-1], windows[:, 1:]].mean())


CORPUS_FILE = "corpus.bin"
CORPUS_FORMAT = 1
CORPUS_BYTES_MAX = 1 << 40
STDLIB_BYTES_MAX = 64 << 20
SEPARATOR = b"\0"
BLOCK_WINDOWS = 64
HELD_OUT_EVERY = 20

_HEADER_BYTES = mmap.PAGESIZE
_COPY_BYTES = 1 << 20

Windows = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class CorpusHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The header of a corpus file.

    `digest`: SHA-256 of its bytes. `inputs_digest`: of the list of its sources' paths, sizes and modification
    times. `left_out_bytes`: truncated by the size limit of a corpus.
    """

    format: int
    digest: str
    inputs_digest: str
    nbytes: int
    sources: int
    left_out_bytes: int
    origin: str


def prepare_corpus(
    data: str | None,
    directory: Path,
    *,
    context: int = 1,
    bytes_max: int | None = None,
    run: RunData = NEW_RUN,
) -> Path:
    """Create the corpus file of `data` in `directory`, unless it is up to date, and return its path.

    `data` is a file, a directory (all files below it) or a glob (`**` crosses directories); None is the
    source of the Python standard library, without tests and third-party packages. Sources are joined in the
    order of their paths, with one chunk in memory at a time. They are listed once for a `run`
    (`sources_for`), and an existing file of them is used again. The corpus is truncated to `bytes_max` bytes
    if given, the standard library to `STDLIB_BYTES_MAX`. One process of a host at a time does this in a
    directory.

    Raises `UserError` if nothing matches, a source cannot be read, the corpus is empty, too short for windows
    of `context` bytes or longer than `CORPUS_BYTES_MAX`, a source that has to be read has changed since it
    was listed, or the disk is full; unsuitable data creates no file.
    """
    origin = "the Python standard library" if data is None else data
    sources = sources_for(data, directory, run)
    _require_usable(sources, origin, context=context)
    if bytes_max is None:
        bytes_max = STDLIB_BYTES_MAX if data is None else CORPUS_BYTES_MAX
    _check_length(min(_joined_bytes(sources), bytes_max), origin, context)
    path = directory / CORPUS_FILE
    with settled_sources(data, directory, sources, run) as sources:
        wanted = inputs_digest(sources, CORPUS_FORMAT, bytes_max)
        known = _read_header(path)
        if known is not None and known.inputs_digest == wanted:
            report_changed(sources)
        else:
            require_unchanged(sources)
            require_disk(directory, min(_joined_bytes(sources), bytes_max), origin)
            write_atomically(path, lambda file: write_corpus(file, sources, wanted, origin, bytes_max))
    return path


def require_disk(directory: Path, nbytes: int, origin: str) -> None:
    """Raise `UserError` unless the disk of `directory` has `nbytes` free."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise UserError(
            f"the dataset {origin} takes {nbytes:,} bytes in {directory}, and its disk has {free:,} free: "
            "free some space, or give a directory on another disk with --out."
        )


def _joined_bytes(sources: list[Source]) -> int:
    return sum(source.nbytes for source in sources) + len(sources) - 1


def _require_usable(sources: list[Source], origin: str, *, context: int) -> None:
    """Raise `UserError` for sources that make no corpus."""
    if not any(source.nbytes for source in sources):
        raise UserError(
            f"the corpus {origin} is empty: all of its {len(sources)} files have no bytes. Give --data files "
            "with text in them."
        )
    joined = _joined_bytes(sources)
    if joined > CORPUS_BYTES_MAX:
        raise UserError(
            f"the corpus {origin} has {joined:,} bytes, more than {CORPUS_BYTES_MAX:,}: narrow it."
        )
    _check_length(joined, origin, context)


def _check_length(nbytes: int, origin: str, context: int) -> int:
    """Return the number of windows. Raise `UserError` if there is none to train on or none to hold out."""
    window_count = (nbytes - 1) // context
    if window_count < 2:
        raise UserError(
            f"the corpus {origin} is too short: it has {nbytes} bytes, and contexts of "
            f"{context} bytes need at least {2 * context + 1}. Give more text, or a shorter context."
        )
    return window_count


@dataclass(frozen=True, slots=True)
class Split:
    """The windows of `window_count` that are held out; computed, without a table."""

    window_count: int

    @property
    def _every(self) -> int:
        return min(HELD_OUT_EVERY, self.window_count)

    @property
    def _block(self) -> int:
        return min(BLOCK_WINDOWS, self.window_count // self._every)

    @property
    def _group(self) -> int:
        return self._every * self._block

    @property
    def training_count(self) -> int:
        """Return the number of windows to train on."""
        groups, rest = divmod(self.window_count, self._group)
        kept = self._group - self._block
        return groups * kept + min(rest, kept)

    @property
    def held_out_count(self) -> int:
        """Return the number of windows that are held out."""
        return self.window_count - self.training_count

    def training_ids(self, places: Ids) -> Ids:
        """Return the ids of the training windows at `places`, each in [0, training_count), ascending."""
        groups, rest = np.divmod(places, self._group - self._block)
        ids: Ids = groups * self._group + rest
        return ids

    def held_out_ids(self, places: Ids) -> Ids:
        """Return the ids of the held-out windows at `places`, each in [0, held_out_count), ascending."""
        groups, rest = np.divmod(places, self._block)
        ids: Ids = groups * self._group + (self._group - self._block) + rest
        return ids


class Corpus:
    """An open corpus, divided into windows for contexts of `context` bytes.

    Raises `UserError` if the file is not a corpus, or is too short for one training window and one held-out
    one.
    """

    def __init__(self, path: Path, *, context: int) -> None:
        header = _read_header(path)
        if header is None:
            raise UserError(f"{path} is not a corpus file of this version: delete it and start again.")
        self.header = header
        self.context = context
        self.split = Split(_check_length(header.nbytes, header.origin, context))
        self.data: Windows = np.memmap(path, np.uint8, mode="r", offset=_HEADER_BYTES, shape=(header.nbytes,))

    def windows(self, ids: Ids) -> Windows:
        """Return the bytes of windows `ids`: (len(ids), context + 1) uint8."""
        picked: Windows = self.data[ids[:, None] * self.context + np.arange(self.context + 1)]
        return picked

    def evaluation_ids(self, count: int) -> Ids:
        """Return at most `count` held-out windows, evenly spread; the same for every caller."""
        available = self.split.held_out_count
        picked = min(count, available)
        return self.split.held_out_ids(np.arange(picked) * available // picked)


class SampleOrder:
    """The windows that each step trains on: a random permutation per pass over the corpus.

    The order follows from the seed alone: neither history nor the number of ranks matters.
    """

    def __init__(self, split: Split, *, seed: int, batch: int) -> None:
        self._split = split
        self._seed = seed
        self._batch = batch
        self._permutations: dict[int, Permutation] = {}

    def sample_ids(self, step: int) -> Ids:
        """Return the window ids of `step` (from 0): (batch,) int64, in the order of the batch."""
        draws = np.arange(step * self._batch, (step + 1) * self._batch, dtype=np.int64)
        passes, draws_of_pass = np.divmod(draws, self._split.training_count)
        places = np.empty(self._batch, dtype=np.int64)
        for number in range(int(passes[0]), int(passes[-1]) + 1):
            mine = passes == number
            places[mine] = self._permutation(number)(draws_of_pass[mine])
        return self._split.training_ids(places)

    def _permutation(self, number: int) -> Permutation:
        """Return the order of pass `number` over the corpus; keeps those of the last two passes."""
        if number not in self._permutations:
            kept = {old: self._permutations[old] for old in self._permutations if old == number - 1}
            made = Permutation(self._split.training_count, seed=self._seed, index=number)
            self._permutations = kept | {number: made}
        return self._permutations[number]


def write_corpus(file: BinaryIO, sources: list[Source], inputs: str, origin: str, bytes_max: int) -> None:
    """Write a corpus file, truncated to `bytes_max` bytes. Raises `UserError` for an unreadable source."""
    digest = hashlib.sha256()
    room, left_out = bytes_max, 0
    file.write(bytes(_HEADER_BYTES))

    def put(data: bytes) -> None:
        nonlocal room, left_out
        taken = data[:room]
        file.write(taken)
        digest.update(taken)
        room -= len(taken)
        left_out += len(data) - len(taken)

    for number, source in enumerate(sources):
        if room == 0:
            left_out += source.nbytes
            continue
        if number:
            put(SEPARATOR)
        try:
            with open(source.path, "rb") as opened:
                while chunk := opened.read(_COPY_BYTES):
                    put(chunk)
        except OSError as error:
            if error.filename is None:
                raise  # not this source: our own file, say on a full disk
            raise unreadable(source.path, error.strerror) from error
    header = CorpusHeader(
        format=CORPUS_FORMAT,
        digest=digest.hexdigest(),
        inputs_digest=inputs,
        nbytes=bytes_max - room,
        sources=len(sources),
        left_out_bytes=left_out,
        origin=origin[:512],
    )
    file.seek(0)
    file.write(msgspec.json.encode(header).ljust(_HEADER_BYTES))


def _read_header(path: Path) -> CorpusHeader | None:
    """Return the header of the corpus file, or None if the file is missing, incomplete or of another
    format."""
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.read(_HEADER_BYTES), type=CorpusHeader)
            complete = os.fstat(file.fileno()).st_size == _HEADER_BYTES + header.nbytes
    except (FileNotFoundError, ValueError, RecursionError):  # text that is no UTF-8 is no MsgspecError
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}. Choose another directory.") from error
    return header if complete and header.format == CORPUS_FORMAT and header.nbytes > 0 else None
