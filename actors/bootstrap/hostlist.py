"""Sans-I/O: lists of hosts as Slurm writes them: `a[001-003,7]-ib,b12,c[1-2][3-4]`.

Names are separated by commas; a bracket holds numbers and ranges of numbers, whose lower bound's leading
zeros give the width; several brackets in a name are all of their combinations, the last varying fastest. What
Slurm's own tools write is a part of this. Source: `hostlist` in Slurm's src/common/hostlist.c and the manual
of scontrol.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from zbmd.transport.errors import UserError

TEXT_CHARACTERS_MAX = 1 << 18
HOSTS_MAX = 1 << 16
NAME_CHARACTERS_MAX = 253
"""Of a name in DNS (RFC 1035)."""
BRACKETS_MAX = 8
DIGITS_MAX = 18

_PLAIN = re.compile(r"[A-Za-z0-9_.\-]*", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_LAST_NUMBER = re.compile(r"(.*?)([0-9]{1,18})([^0-9]*)", re.ASCII)


def parse_hostlist(text: str, *, hosts_max: int = HOSTS_MAX) -> tuple[str, ...]:
    """The hosts in the order in which they are listed, repeated ones too.

    Raises `UserError` on what is no list of hosts, and on one of more than `hosts_max` hosts, which is found
    before it is spread out.
    """
    if len(text) > TEXT_CHARACTERS_MAX:
        raise UserError(f"a list of hosts of {len(text)} characters: at most {TEXT_CHARACTERS_MAX} are read.")
    hosts: list[str] = []
    for name in _names(text):
        parts = _parts(name, text)
        count = 1
        for part in parts:
            count *= sum(last - first + 1 for first, last, _ in part) if isinstance(part, list) else 1
        if len(hosts) + count > hosts_max:
            raise UserError(f"the list of hosts {_shown(text)} has more than {hosts_max} hosts.")
        hosts += _spread(parts, text)
    return tuple(hosts)


_Ranges = list[tuple[int, int, int]]
"""First, last, and the width that numbers are padded to with zeros."""


def _names(text: str) -> Iterator[str]:
    """Yield the names between commas outside of brackets; an empty one is skipped."""
    start, inside = 0, False
    for at, character in enumerate(text):
        if character == "[":
            if inside:
                raise UserError(f"the list of hosts {_shown(text)} has a [ inside of brackets.")
            inside = True
        elif character == "]":
            if not inside:
                raise UserError(f"the list of hosts {_shown(text)} has a ] without a [.")
            inside = False
        elif character == "," and not inside:
            if at > start:
                yield text[start:at]
            start = at + 1
    if inside:
        raise UserError(f"the list of hosts {_shown(text)} has a [ without a ].")
    if len(text) > start:
        yield text[start:]


def _parts(name: str, text: str) -> list[str | _Ranges]:
    """The plain parts of a name and its brackets, in turn."""
    pieces = re.split(r"[\[\]]", name)
    if len(pieces) // 2 > BRACKETS_MAX:
        raise UserError(
            f"the list of hosts {_shown(text)} has a name with more than {BRACKETS_MAX} brackets."
        )
    parts: list[str | _Ranges] = []
    for at, piece in enumerate(pieces):
        if at % 2:
            parts.append([_range(part, text) for part in piece.split(",")])
        elif _PLAIN.fullmatch(piece) is None:
            raise UserError(
                f"{piece[:64]!r} in the list of hosts {_shown(text)} is no part of a host's name."
            )
        else:
            parts.append(piece)
    return parts


def _range(part: str, text: str) -> tuple[int, int, int]:
    found = _RANGE.fullmatch(part)
    if found is None:
        raise UserError(
            f"{part[:64]!r} in the list of hosts {_shown(text)} is neither a number nor a range of numbers."
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise UserError(f"the range {part} in the list of hosts {_shown(text)} ends before it begins.")
    return first, last, _width(found[1])


def _width(digits: str) -> int:
    return len(digits) if digits.startswith("0") else 1


def _spread(parts: Sequence[str | _Ranges], text: str) -> Iterator[str]:
    choices = [[part] if isinstance(part, str) else _numbers(part) for part in parts]
    for combination in itertools.product(*choices):
        host = "".join(combination)
        if len(host) > NAME_CHARACTERS_MAX:
            raise UserError(f"the list of hosts {_shown(text)} has a name of more than 253 characters.")
        yield host


def _numbers(ranges: _Ranges) -> list[str]:
    return [f"{n:0{width}d}" for first, last, width in ranges for n in range(first, last + 1)]


def format_hostlist(hosts: Sequence[str]) -> str:
    """The shortest list that this folding finds: neighbours that differ in their last number share a bracket.

    `parse_hostlist` reads the same hosts in the same order. Raises `UserError` on what is no host's name.
    """
    out: list[str] = []
    for (before, after, numbered), group in itertools.groupby(map(_split, hosts), lambda split: split[:3]):
        numbers = [digits for *_, digits in group]
        if not numbered or len(numbers) == 1:
            out += [f"{before}{digits}{after}" for digits in numbers]
        else:
            out.append(f"{before}[{','.join(_fold(numbers))}]{after}")
    return ",".join(out)


def _split(host: str) -> tuple[str, str, bool, str]:
    """Return the parts before and after its last number, whether there is one, and the number."""
    if not host or len(host) > NAME_CHARACTERS_MAX or _PLAIN.fullmatch(host) is None:
        raise UserError(f"{host[:64]!r} is no host's name.")
    found = _LAST_NUMBER.fullmatch(host)
    return (found[1], found[3], True, found[2]) if found is not None else (host, "", False, "")


def _fold(numbers: Sequence[str]) -> list[str]:
    """Numbers as ranges, in their order."""
    runs: list[list[str]] = []
    for digits in numbers:
        run = runs[-1] if runs else None
        if run is not None and digits == f"{int(run[-1]) + 1:0{_width(run[0])}d}":
            run.append(digits)
        else:
            runs.append([digits])
    return [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _shown(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:80]}…")
