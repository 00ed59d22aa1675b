"""Collect the evidence of a run from what its launcher printed, where nothing else is left."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Final

from zbmd.tools.telemetry.diagnosis.evidence import Death, Evidence, Hang, Launcher, failure_of, place_of
from zbmd.transport.errors import UserError

LOG_BYTES_MAX: Final = 64 << 20
"""Of a longer file the end is read."""
LINES_KEPT_MAX: Final = 4000
"""Of each rank."""
_LINE: Final = re.compile(r"^(?:.*?)\[(rank(\d{1,9})|zbmd)\]: ?(.*)$")
_LAUNCHER: Final = re.compile(r"^zbmd-node: (.+)$")
_FAILED: Final = re.compile(r"^rank (\d{1,9}) \(pid (\d+), incarnation (\d{1,9})\) failed: (.+)$")
_FIRST: Final = re.compile(r"The first failure was rank (\d{1,9})'s: (.+)$")
_REASON: Final = re.compile(r"(exit code (\d{1,9})|killed \((SIG\w+)\))(.*)")
_NAMED: Final = re.compile(r"\branks? (\d{1,9})\b(?! (?:waits|wait))|\brank(\d{1,9})\b")
_SIGNALS: Final = {number.name: int(number) for number in signal.Signals}
_NOTE: Final = re.compile(r"^zbmd-node: \d+ ranks? with ")


def read_log_text(path: Path) -> Evidence:
    """Return the evidence in the output of a launcher. Raises `UserError` if there is none in it."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES_MAX))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    found = evidence_in(lines, str(path))
    if found is None:
        raise UserError(f"{path} has no line of zbmd-node run ([zbmd]: …): give what a launcher has printed.")
    return found


def evidence_in(lines: list[str], source: str) -> Evidence | None:
    """Return the evidence in lines of a launcher's output; None if there are none of them."""
    said, own, refused = _sorted_out(lines)
    if not said and not own and refused is None:
        return None
    hangs, deaths, end = _hangs(own), list[Death](), ""
    for number, text in enumerate(own):
        if (failed := _FAILED.match(text)) is not None:
            deaths.append(_death(int(failed[1]), failed[4], said, at_ns=number, incarnation=int(failed[3])))
        elif text.startswith(("the run failed: ", "rank ")) and (first := _FIRST.search(text)) is not None:
            deaths.append(_death(int(first[1]), first[2], said, at_ns=number))
        if text.startswith(("the run failed: ", "stopped: ")):
            end = text
    known = {death.rank for death in deaths}
    for rank, words in said.items():
        failure = failure_of(words)
        if rank not in known and failure is not None and "Traceback (most recent call last):" in words:
            deaths.append(_death(rank, "exit code 1", said, at_ns=len(own), expected=True))
    outcome = "failed" if end.startswith("the run failed") else "stopped" if end else ""
    reason = end.partition(": ")[2]
    if refused is not None and not said and not own:
        outcome, reason = "refused", refused
    launcher = Launcher(
        host="", pid=0, command="", began_ns=0, last_ns=0, outcome=outcome, reason=reason, exit_code=1
    )
    return Evidence(launchers=(launcher,), deaths=tuple(deaths), hangs=tuple(hangs), sources=(source,))


def _sorted_out(lines: list[str]) -> tuple[dict[int, list[str]], list[str], str | None]:
    """Return the lines of each rank, those of zbmd, and the last of the launcher's own."""
    said, own, refused = dict[int, list[str]](), list[str](), None
    for line in lines:
        if (found := _LINE.match(line)) is None:
            if (told := _LAUNCHER.match(line)) is not None and _NOTE.match(line) is None:
                refused = told[1]
        elif found[2] is None:
            own.append(found[3])
        else:
            words = said.setdefault(int(found[2]), [])
            words.append(found[3])
            del words[:-LINES_KEPT_MAX]
    return said, own, refused


def _death(
    rank: int,
    reason: str,
    said: dict[int, list[str]],
    *,
    at_ns: int,
    incarnation: int = 1,
    expected: bool = False,
) -> Death:
    found = _REASON.search(reason)
    code = 1 if found is None else int(found[2]) if found[2] else -_SIGNALS.get(found[3], 1)
    words = tuple(said.get(rank, ()))
    if code > 0 and failure_of(words) is None and found is not None and found[4].startswith(": "):
        words = ("Traceback (most recent call last):", found[4][2:].split("; ")[0])
    return Death(
        rank=rank,
        incarnation=incarnation,
        at_ns=at_ns,
        code=code,
        reason=reason.partition(": ")[0],
        next_step="",
        expected=expected,
        no_memory="memory" in reason and code < 0,
        failure=failure_of(words) if code > 0 else None,
        words=words,
    )


def _hangs(own: list[str]) -> list[Hang]:
    hangs: list[Hang] = []
    for number, text in enumerate(own):
        if text.startswith("no progress: "):
            told = text.removeprefix("no progress: ").rpartition("; ")[0]
            frames = list[str]()
            for line in own[number + 1 :]:
                if not line.startswith("   "):
                    break
                frames.append(line)
            root = told.rpartition("; ")[2] if told.rpartition("; ")[2].startswith("rank") else told
            named = _NAMED.search(root)
            ranks = () if named is None else (int(named[1] or named[2]),)
            stack = tuple(place for frame in frames if (place := place_of(frame)) is not None)
            hangs.append(Hang(at_ns=number, text=told, ranks=ranks, stack=stack))
    return hangs
