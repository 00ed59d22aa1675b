"""Records of a launcher, for `zbmd diagnose`: how each rank ended, hangs, views, and its own end.

A launcher appends JSON lines to `launches/<when>-<host>-<pid>.jsonl` in each directory that has to do with
it: its `--log-dir`, else the user's own, and those of the runs that its ranks begin. A node of a cluster does
the same for each job that it runs ranks of, in its state directory. A launch has one file in each, of at most
`FILE_BYTES_MAX`; a directory keeps the latest `FILES_MAX`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from zbmd.transport.errors import UserError
from zbmd.transport.host.files import UserFiles, decode_json_lines, read_json_lines, user_directory

DIRECTORY: Final = "launches"
VERSION: Final = 1
FILES_MAX: Final = 64
FILE_BYTES_MAX: Final = 2 << 20
"""Beyond it only the last record is written."""
LINE_BYTES_MAX: Final = 64 << 10
WORDS_MAX: Final = 48
"""Lines of an exit reason that are kept: the first ones and the last."""
TEXT_CHARACTERS_MAX: Final = 600
RANKS_MAX: Final = 1 << 16

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]
JobName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{0,16}$")]
Texts = Annotated[tuple[Text, ...], msgspec.Meta(max_length=WORDS_MAX + 1)]


class LaunchBegan(msgspec.Struct, frozen=True, kw_only=True, tag="launch", tag_field="kind"):
    """The first line. Times: ns of CLOCK_MONOTONIC and CLOCK_REALTIME at the same moment.

    process_ticks: when the launcher began, in ticks since boot; capture: directory of `--capture`; job: of a
    cluster, its id as `zbmd-node jobs` shows it, and node: the name of the node that keeps the record.
    """

    version: Count
    host: Text
    boot_id: Text
    pid: Count
    process_ticks: Count
    monotonic_ns: Count
    unix_ns: Count
    command: Texts
    folder: Text
    ranks: Count
    nodes: Count = 1
    on_loss: Text = ""
    capture: Text = ""
    job: JobName = ""
    node: Text = ""


class RankBegan(msgspec.Struct, frozen=True, kw_only=True, tag="rank", tag_field="kind"):
    """A process became a rank."""

    at_ns: Count
    rank: Rank
    incarnation: Count
    pid: Count


class RankEnded(msgspec.Struct, frozen=True, kw_only=True, tag="ended", tag_field="kind"):
    """A rank's process ended. See `zbmd.actors.cluster.jobs.reports.RankDown` for its fields.

    words: its exit reason, or the last lines of its standard error; cause: type and place of the exception
    that ended it; step: the last that was committed, if ranks report steps.
    """

    at_ns: Count
    rank: Rank
    incarnation: Count
    pid: Count
    code: int
    reason: Text
    cause: Text
    normal: bool
    expected: bool
    no_memory: bool
    words: Texts
    next_step: Text
    step: Count | None = None


class RanksMet(msgspec.Struct, frozen=True, kw_only=True, tag="view", tag_field="kind"):
    """A view was entered."""

    at_ns: Count
    epoch: Count
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=RANKS_MAX)]


class HangFound(msgspec.Struct, frozen=True, kw_only=True, tag="hang", tag_field="kind"):
    """A hang was found, or is over. See `zbmd.actors.hangs.verdict.HangNotice`.

    process: what the first of `ranks` did then: "runs", or the kernel's function that it sleeps in.
    """

    at_ns: Count
    text: Text
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=RANKS_MAX)]
    stack: Texts
    next_step: Text
    over: bool = False
    process: Text = ""
    step: Count | None = None


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag="note", tag_field="kind"):
    """A report of a rank (`rank`) or the launcher (None), such as of an operation that waits in vain."""

    at_ns: Count
    text: Text
    rank: Rank | None = None


class RunFound(msgspec.Struct, frozen=True, kw_only=True, tag="run", tag_field="kind"):
    """A rank takes part in the run of a directory."""

    at_ns: Count
    directory: Text


class LaunchEnded(msgspec.Struct, frozen=True, kw_only=True, tag="end", tag_field="kind"):
    """The last line. outcome: done, failed, stopped or refused; records: where the last ones are.

    cause: type of the error of the launcher itself, if there was one.
    """

    at_ns: Count
    outcome: Text
    reason: Text
    exit_code: int
    restarts: Count = 0
    step: Count | None = None
    records: Text = ""
    cause: Text = ""


LaunchLine = LaunchBegan | RankBegan | RankEnded | RanksMet | HangFound | Noted | RunFound | LaunchEnded
LAUNCH_DECODER: Final[msgspec.json.Decoder[LaunchLine]] = msgspec.json.Decoder(LaunchLine)
"""Of one line. Raises ValueError and RecursionError for one that is damaged."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as far as it has been recorded.

    is_live: whether it goes on, as its node says; None: the process table of its host knows.
    """

    began: LaunchBegan
    lines: tuple[LaunchLine, ...]
    is_live: bool | None = None

    @property
    def shift_ns(self) -> int:
        """Return what turns its times into ns since 1970."""
        return self.began.unix_ns - self.began.monotonic_ns

    @property
    def end(self) -> LaunchEnded | None:
        """Return its end; None while it runs, or if it was killed."""
        return next((line for line in reversed(self.lines) if isinstance(line, LaunchEnded)), None)

    @property
    def last_ns(self) -> int:
        """Return when its last line was written, in ns since 1970."""
        times = [line.at_ns for line in self.lines if not isinstance(line, LaunchBegan)]
        return max(times, default=self.began.monotonic_ns) + self.shift_ns


def cut_text(text: str) -> str:
    """Return the text, short enough for a record."""
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"


def cut_lines(lines: Iterable[str]) -> tuple[str, ...]:
    """Return lines, few and short enough for a record: the first ones and the last."""
    kept = [cut_text(line) for line in lines if line.strip(" ^~")]
    if len(kept) > WORDS_MAX:
        half = WORDS_MAX // 2
        kept = [*kept[:half], f"… {len(kept) - 2 * half} lines …", *kept[-half:]]
    return tuple(kept)


def launches_of_user(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the directory whose `launches` the user's launchers use; None if the user has no home."""
    return user_directory(UserFiles.STATE, environ)


def launch_path(directory: Path, began: LaunchBegan) -> Path:
    """Return the file of a launch that has to do with `directory`."""
    host = re.sub(r"[^\w.-]", "_", began.host)[:64]
    return directory / DIRECTORY / f"{began.unix_ns:019d}-{host}-{began.pid}.jsonl"


def launch_files(directory: Path) -> list[Path]:
    """Return the files of launches of `directory`, the oldest first."""
    return sorted((directory / DIRECTORY).glob("*.jsonl"), key=lambda path: path.name)


def forget_oldest(directory: Path) -> None:
    """Keep `FILES_MAX` files; another launcher may do the same now."""
    for path in launch_files(directory)[:-FILES_MAX]:
        with contextlib.suppress(OSError):
            path.unlink()


def read_launch(path: Path) -> Launch | None:
    """Return a launch; None if not even its first line is whole. Raises `UserError`."""
    lines = list(
        read_json_lines(
            path,
            LAUNCH_DECODER.decode,
            bytes_max=FILE_BYTES_MAX + LINE_BYTES_MAX,
            what="record of a launch",
            advice="delete the file",
        )
    )
    return _launch_of(lines, str(path))


def decode_launch(data: bytes, source: str) -> Launch | None:
    """Return the launch whose record is `data`; as `read_launch`. Raises `UserError`."""
    return _launch_of(list(decode_json_lines(data, LAUNCH_DECODER.decode, source=source)), source)


def _launch_of(lines: Sequence[LaunchLine], source: str) -> Launch | None:
    began = next((line for line in lines if isinstance(line, LaunchBegan)), None)
    if began is None:
        return None
    if began.version != VERSION:
        raise UserError(f"{source} has format {began.version}; this version reads format {VERSION}.")
    return Launch(began, tuple(lines))


def read_beginning(path: Path) -> LaunchBegan | None:
    """Return the first line of a record; None if there is none, or it is damaged."""
    try:
        with path.open("rb") as file:
            line = LAUNCH_DECODER.decode(file.readline(LINE_BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return None
    return line if isinstance(line, LaunchBegan) else None


def read_launches(directory: Path) -> list[Launch]:
    """Return the launches of a directory, the oldest first. Raises `UserError`."""
    found = [read_launch(path) for path in launch_files(directory)]
    return sorted((one for one in found if one is not None), key=lambda one: one.began.unix_ns)


class LaunchWriter:
    """Appends a launch's lines to a file in each of its directories. Raises nothing: no run needs them."""

    def __init__(self, began: LaunchBegan) -> None:
        self._began = began
        self._lines = [msgspec.json.encode(began) + b"\n"]
        self._kept_bytes = len(self._lines[0])
        self._files: dict[Path, int] = {}
        self._is_full = False

    def add(self, directory: Path) -> None:
        """Write into this directory too, from the first line on."""
        path = launch_path(directory, self._began)
        if path in self._files:
            return
        self._files[path] = -1
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            forget_oldest(directory)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
            self._files[path] = os.open(path, flags, 0o644)
            self._write(path, b"".join(self._lines))

    def put(self, line: LaunchLine) -> None:
        """Append a line to each file, unless they are full and it is not the last."""
        data = msgspec.json.encode(line) + b"\n"
        is_last = isinstance(line, LaunchEnded)
        self._is_full |= self._kept_bytes + len(data) > FILE_BYTES_MAX
        if len(data) > LINE_BYTES_MAX or (self._is_full and not is_last):
            return
        self._lines.append(data)
        self._kept_bytes += len(data)
        for path in self._files:
            self._write(path, data)

    def close(self) -> None:
        """Close the files, and keep no lines for more. Idempotent."""
        for path, file in self._files.items():
            if file >= 0:
                os.close(file)
                self._files[path] = -1
        self._lines.clear()

    def _write(self, path: Path, data: bytes) -> None:
        if (file := self._files[path]) < 0:
            return
        try:
            os.write(file, data)
        except OSError:  # a full disk: what is there stays
            os.close(file)
            self._files[path] = -1
