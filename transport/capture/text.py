"""A capture as text, to be kept beside a test: a line `# path` for each file, then its bytes in base64."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from zbmd.transport.capture.errors import NotACapture

LINE_CHARS = 100
TEXT_CHARS_MAX = 64 << 20
_PATH = re.compile(r"[A-Za-z0-9_.#@-]+(/[A-Za-z0-9_#@-][A-Za-z0-9_.#@-]*)*\.zlog")


def capture_to_text(directory: Path) -> str:
    """Return the capture in `directory` as text, without its indexes, which are made again from the logs."""
    lines: list[str] = []
    for file in sorted(directory.rglob("*.zlog")):
        text = base64.b64encode(file.read_bytes()).decode()
        lines.append(f"# {file.relative_to(directory).as_posix()}")
        lines += [text[start : start + LINE_CHARS] for start in range(0, len(text), LINE_CHARS)]
    return "\n".join(lines) + "\n"


def text_to_capture(text: str, directory: Path) -> None:
    """Write the capture that `text` holds into `directory`. Raises `NotACapture` if it holds none."""
    for path, data in _files(text):
        if not _PATH.fullmatch(path) or ".." in path:
            raise NotACapture(
                f"the text names a file {path!r}, which no capture has: was it changed by hand?"
            )
        file = directory / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        except OSError as error:  # a name too long, say, or one that is a file and a directory
            raise NotACapture(f"{file} cannot be written: {error.strerror}") from error


def _files(text: str) -> Iterator[tuple[str, bytes]]:
    if len(text) > TEXT_CHARS_MAX:
        raise NotACapture(f"the text has {len(text)} characters; {TEXT_CHARS_MAX} are the bound")
    path = ""
    for is_name, lines in groupby(text.splitlines(), key=lambda line: line.startswith("# ")):
        if is_name:
            path = list(lines)[-1][2:]
            continue
        try:
            data = base64.b64decode("".join(lines), validate=True)
        except ValueError as error:  # binascii.Error, or text that is not ASCII
            raise NotACapture(f"the text of {path or 'a file without a name'} is damaged: {error}") from None
        yield path, data
