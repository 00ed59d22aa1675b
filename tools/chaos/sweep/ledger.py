"""Ledger of a sweep of kills: a file that an interrupted sweep resumes from, and its table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

import msgspec

from zbmd.tools.chaos.sweep.cases import name_of
from zbmd.transport.errors import UserError

# The file of a sweep: one line for each kill, so that an interrupted sweep can resume.

LineT = TypeVar("LineT")


class KillLines(Generic[LineT]):
    """JSON lines, in the file at `path` or, without one, nowhere. The last may be cut off: it is left out.

    Raises `UserError` for a line that `decoder` does not take.
    """

    def __init__(self, path: Path | None, decoder: msgspec.json.Decoder[LineT]) -> None:
        self.path = path
        self.found: list[LineT] = []
        """What was there."""
        if path is None or not path.exists():
            return
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                self.found.append(decoder.decode(line))
            except (ValueError, RecursionError) as error:  # text that is no UTF-8 is no MsgspecError
                raise UserError(
                    f"line {number} of {path} is not of a ledger of kills, or damaged ({error}): begin "
                    "another ledger."
                ) from None
        if len(whole) < len(data):
            path.write_bytes(whole)

    def add(self, line: LineT) -> None:
        """Add one."""
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")


Verdict = Literal["same bits", "other bits", "failed"]


class CaseVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a case. reached: whether every kill of it took place; told: why it is not as it should
    be, and the end of what ranks said."""

    setting: str
    fault: str
    verdict: Verdict
    reached: bool
    took_s: Annotated[float, msgspec.Meta(ge=0)]
    told: str = ""


class Calm(msgspec.Struct, frozen=True, kw_only=True, tag="calm"):
    """The weights of a setting that nothing disturbs."""

    setting: str
    digest: str


class _Found(CaseVerdict, frozen=True, kw_only=True, tag="found"):
    """A line of the file."""


_decoder: msgspec.json.Decoder[Calm | _Found] = msgspec.json.Decoder(Calm | _Found)


class Ledger:
    """Findings by setting and case, the last one of each; kept in the file at `path`, if there is one.

    Raises `UserError` if that is damaged, but for a last line that was cut off.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.found: dict[tuple[str, str], CaseVerdict] = {}
        self.calm: dict[str, str] = {}
        self._lines = KillLines(path, _decoder)
        for one in self._lines.found:
            self._take(one)

    def _take(self, one: Calm | CaseVerdict) -> None:
        if isinstance(one, Calm):
            self.calm[one.setting] = one.digest
        else:
            self.found[one.setting, one.fault] = one

    def _put(self, one: Calm | _Found) -> None:
        self._take(one)
        self._lines.add(one)

    def begin(self, setting: str, digest: str) -> None:
        """A setting's weights when nothing disturbs it. Raises `UserError` if they were others before."""
        before = self.calm.get(setting, digest)
        if before != digest:
            raise UserError(
                f"{setting} ends with {digest[:16]} here, and with {before[:16]} in {self._lines.path}: that "
                "was another version. Begin another ledger."
            )
        if setting not in self.calm:
            self._put(Calm(setting=setting, digest=digest))

    def add(self, finding: CaseVerdict) -> None:
        """Note a case that was run."""
        self._put(_Found(**msgspec.structs.asdict(finding)))

    def is_done(self, setting: str, fault: str) -> bool:
        """Whether a case has ended well, and need not be run again."""
        finding = self.found.get((setting, fault))
        return finding is not None and finding.verdict == "same bits"

    @property
    def wrong(self) -> list[CaseVerdict]:
        """What is not as it should be."""
        return [one for one in self.found.values() if one.verdict != "same bits"]


def table(findings: Iterable[CaseVerdict], planned: Sequence[tuple[str, str]]) -> str:
    """A row for each setting and point, as a table in Markdown: kills, cases run and planned, and faults."""
    run: Counter[tuple[str, str]] = Counter()
    reached: Counter[tuple[str, str]] = Counter()
    wrong: Counter[tuple[str, str]] = Counter()
    cases = Counter((setting, name_of(fault)) for setting, fault in set(planned))
    for one in findings:
        key = one.setting, name_of(one.fault)
        run[key] += 1
        reached[key] += one.reached
        wrong[key] += one.verdict != "same bits"
    lines = ["| setting | point | killed | run | cases | not the same bits |", "|---|---|---|---|---|---|"]
    for key in sorted(cases | run):
        setting, name = key
        lines.append(f"| {setting} | `{name}` | {reached[key]} | {run[key]} | {cases[key]} | {wrong[key]} |")
    total = f"{reached.total()} | {run.total()} | {cases.total()} | {wrong.total()}"
    return "\n".join([*lines, f"| all | | {total} |"])
