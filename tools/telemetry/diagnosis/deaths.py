"""Rules for deaths: what ended a rank, and which deaths follow from another one's. Pure."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from zbmd.tools.telemetry.diagnosis.evidence import Death, Failure, Place
from zbmd.tools.telemetry.diagnosis.findings import Cause, Finding

CONSEQUENCES: Final = frozenset(
    {"PeerLost", "MembersLost", "OperationAborted", "LoopLost", "CancelledError", "KeyboardInterrupt"}
)
"""Exceptions that another rank's end, or a request to end, has."""
_TOLD: Final = re.compile(r"\b(PeerLost|MembersLost|OperationAborted): |\bpeer (?:rank)?\d+ lost\b")
_CLOSED: Final = re.compile(r"rank (\d{1,9}) closed the group; (.+?) waits for it")
_CALL: Final = re.compile(
    r"rank (\d{1,9}) called ((\w+)\(([^\[\]()]+)\[(\d{1,18})\], (\w+), root=(\d{1,9})\))"
)
_RANK_TEXT: Final = re.compile(r"\brank (\d{1,9})\b")
_PLACES_TEXT: Final = re.compile(r"places (\d{1,9}) and (\d{1,9}) hold the same state")
_ALONE_TEXT: Final = re.compile(r"at place (\d{1,9}), which alone differs")
_MEMORY_KINDS: Final = frozenset(
    {
        *("MemoryError", "_ArrayMemoryError", "OutOfMemory", "ArenaFull", "StepOutOfMemory"),
        *("OutOfMemoryError", "OutOfDeviceMemory", "ShortOfMemory"),
    }
)
_CRASHES: Final = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP}
)
_MISMATCHES: Final = frozenset({Cause.ORDER, Cause.SHAPE, Cause.DTYPE, Cause.ROOT, Cause.BITS})
"""All ranks raise the same error, and not all are to blame."""
_IMPORTS: Final = frozenset({"ImportError", "ModuleNotFoundError", "SyntaxError", "IndentationError"})
_NO_SPACE: Final = re.compile(r"\[Errno (28|122|27)\]|No space left on device|quota exceeded", re.IGNORECASE)
_NO_ADDRESS: Final = re.compile(r"\[Errno 98\]|[Aa]ddress already in use|port is in use")
_NOT_FINITE: Final = re.compile(r"\b(nan|inf|not finite|non-finite)\b", re.IGNORECASE)
_ERRED: Final = re.compile(r"memory or a (processor|link) has erred|memory has erred")

DO: Final = {
    Cause.KILLED: "find who sent the signal: the scheduler, an operator, the kernel (dmesg); start the run "
    "again, or run with --on-loss replace",
    Cause.CRASHED: "run again with PYTHONFAULTHANDLER=1, which prints the line; look at native extensions",
    Cause.EXCEPTION: "correct the line, and start the run again",
    Cause.IMPORT: "install what is missing on every host, or correct the import",
    Cause.MEMORY: "use a smaller batch, --zero or --recompute on, fewer ranks a host, or a larger limit",
    Cause.EXITED: "search the script for os._exit and sys.exit with this code; see what it printed last",
    Cause.ORDER: "have all ranks make the same calls in the same order: look for a branch on the rank, or on "
    "data that differs, ahead of this line",
    Cause.SHAPE: "have all ranks pass arrays of the same size: look for a batch that is shorter on one rank",
    Cause.DTYPE: "have all ranks pass the same dtype: look for a conversion that one rank alone makes",
    Cause.ROOT: "have all ranks name the same root and reduction",
    Cause.LEFT: "have every rank make the same number of calls: compare the lengths of the ranks' loops",
    Cause.NOT_FINITE: "resume from the last checkpoint with a lower --lr, --clip-norm or another batch; look "
    "at the layer that is named",
    Cause.BITS: "take the host out of service and test its memory; the last committed version is good",
    Cause.DISK: "free some space or raise the quota, then resume: what was committed before is whole",
    Cause.CHECKPOINT: "give --resume the run's directory, so that an older whole checkpoint is used",
    Cause.DIRECTORY: "give the run a directory of its own with --out, or stop the other run",
    Cause.ADDRESS: "leave the port out, and a free one is chosen, or end the process that has it (ss -tlp)",
    Cause.WORLD_SIZE: "start as many ranks as the mesh has, or change the mesh (-1 infers a size)",
    Cause.USAGE: "do what the message says",
}
PROOF: Final = {
    Cause.KILLED: "dmesg and the scheduler's log at that time; without an entry, somebody's kill",
    Cause.CRASHED: "the same step again with PYTHONFAULTHANDLER=1",
    Cause.MEMORY: "memory.peak of the cgroup, or the same step with half of the batch",
    Cause.EXITED: "a search for the exit code in the script and its libraries",
    Cause.BITS: "the same step on other hosts ends with one digest",
    Cause.NOT_FINITE: "the same step from the last checkpoint with the same seed fails again",
}

Classified = tuple[Cause, float, tuple[int, ...], str]
"""Cause, confidence, ranks to blame, and a sentence."""


def is_consequence(death: Death) -> bool:
    """Whether a rank ended for another one's end, or was asked to."""
    failure = death.failure
    if failure is not None:
        return failure.kind in CONSEQUENCES or (
            failure.kind != "Desynchronised" and _TOLD.search(failure.message) is not None
        )
    return death.expected or death.normal


def primary(deaths: Sequence[Death]) -> list[Death]:
    """Return the deaths that are no other's consequence: those that nobody had asked for first."""
    own = [death for death in deaths if not is_consequence(death) and not death.normal]
    return sorted(own, key=lambda death: (death.expected, death.at_ns))


def finding_of(death: Death, batch: Sequence[Death]) -> Finding:
    """Return the finding of a death that is no consequence. batch: all that came with it, itself too."""
    cause, confidence, ranks, summary = _classified(death, batch)
    of_rank = next((one for one in batch if ranks and one.rank == ranks[0]), death)
    place = _place(of_rank)
    evidence = [f"rank {death.rank} (incarnation {death.incarnation}) ended: {death.reason}"]
    if death.failure is not None:
        evidence.append(f"{death.failure.kind}: {_short(death.failure.message)}")
    elif death.words:
        evidence.append(f"its last line: {_short(death.words[-1])}")
    if death.step is not None:
        evidence.append(f"the last committed step was {death.step}")
    same = sorted({one.rank for one in batch if one is not death and _is_same(one, death)})
    if same and cause not in _MISMATCHES:
        evidence.append(f"the same on {named(same)}")
    return Finding(
        cause=cause,
        summary=summary,
        ranks=tuple(sorted({*ranks, *(same if ranks and cause not in _MISMATCHES else ())})),
        place="" if place is None else str(place),
        step=death.step,
        at_ns=death.at_ns,
        confidence=confidence,
        evidence=tuple(evidence),
        do=DO.get(cause, "see the rank's output"),
        proof=PROOF.get(cause, ""),
    )


def left_early(batch: Sequence[Death]) -> Finding | None:
    """Return the finding of a rank that left in order while others waited for it in an operation."""
    ended = {death.rank: death for death in batch}
    for death in batch:
        failure = death.failure
        found = None if failure is None else _CLOSED.search(failure.message)
        if found is None:
            continue
        rank, operation = int(found[1]), found[2]
        of_rank = ended.get(rank)
        if of_rank is not None and of_rank.failure is not None:
            continue
        place = _place(death)
        return Finding(
            cause=Cause.LEFT,
            summary=f"rank {rank} made fewer calls than the others: {operation} waited for it in vain",
            ranks=(rank,),
            place="" if place is None else str(place),
            step=death.step,
            at_ns=death.at_ns if of_rank is None else of_rank.at_ns,
            # One that was ended before it could say why may have had an error of its own.
            confidence=0.9 if of_rank is not None and of_rank.normal else 0.6,
            evidence=(
                f"rank {rank} closed the group{'' if of_rank is None else f', and ended: {of_rank.reason}'}",
                f"rank {death.rank}: {_short(failure.message if failure is not None else '')}",
            ),
            do=DO[Cause.LEFT],
            proof=f"the number of calls of rank {rank} beside another rank's (zbmd flights)",
        )
    return None


def describe(death: Death) -> str:
    """Return a line on a death, for what followed."""
    failure = death.failure
    if failure is not None:
        return f"rank {death.rank}: {failure.kind}: {_short(failure.message)}"
    return f"rank {death.rank}: {death.reason}{' (asked to end)' if death.expected else ''}"


def _classified(death: Death, batch: Sequence[Death]) -> Classified:
    own, failure = (death.rank,), death.failure
    who = f"rank {death.rank}"
    if death.no_memory:
        return Cause.MEMORY, 0.98, own, f"{who} was ended by the kernel for want of memory"
    if failure is not None and failure.kind != "SystemExit":
        return _of_failure(death, failure, batch)
    if death.code < 0:
        return _of_signal(death)
    return Cause.EXITED, 0.85, own, f"{who} ended itself with exit code {death.code}, and no error"


def _of_signal(death: Death) -> Classified:
    own, who = (death.rank,), f"rank {death.rank}"
    number = -death.code
    name = signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
    if number in _CRASHES:
        return Cause.CRASHED, 0.95, own, f"{who} crashed in native code ({name})"
    sure = 0.95 if number != signal.SIGKILL else 0.9
    return Cause.KILLED, sure, own, f"{who} was killed from outside ({name})"


def _of_failure(death: Death, failure: Failure, batch: Sequence[Death]) -> Classified:
    own, who = (death.rank,), f"rank {death.rank}"
    for rule in _RULES:
        if (found := rule(death, failure, batch)) is not None:
            return found
    message = _short(failure.message)
    return Cause.EXCEPTION, 0.95, own, f"{who} raised {failure.kind}{f': {message}' if message else ''}"


def _mismatch(_: Death, failure: Failure, batch: Sequence[Death]) -> Classified | None:
    if failure.kind != "Desynchronised":
        return None
    calls: dict[int, tuple[str, ...]] = {}
    for one in batch:
        text = "" if one.failure is None else one.failure.message
        for found in _CALL.finditer(text):
            calls[int(found[1])] = (found[2], found[3], found[4], found[5], f"{found[6]} {found[7]}")
    if not calls:
        return Cause.ORDER, 0.6, (), f"ranks made different calls: {_short(failure.message)}"
    counted = Counter(call for call in calls.values())
    usual, most = counted.most_common(1)[0]
    odd = sorted(rank for rank, call in calls.items() if call != usual)
    is_tie = len(counted) > 1 and most == counted.most_common(2)[1][1]
    unusual = sorted({one.rank for one in batch if one.unusual} & calls.keys())
    if is_tie and unusual and len(unusual) < len(calls):
        is_tie, odd = False, unusual
        usual = next(call for rank, call in calls.items() if rank not in unusual)
    blamed = sorted(calls) if is_tie else odd
    other = calls[odd[0]] if odd else usual
    kinds = (Cause.ORDER, Cause.DTYPE, Cause.SHAPE, Cause.ROOT)
    cause = next((kinds[n] for n in range(4) if usual[n + 1] != other[n + 1]), Cause.ORDER)
    others = "another" if is_tie else "the others"
    summary = f"{named(odd or blamed)} called {other[0]} where {others} called {usual[0]}"
    return cause, 0.7 if is_tie else 0.95, tuple(blamed), summary


def _memory(death: Death, failure: Failure, _: Sequence[Death]) -> Classified | None:
    if failure.kind not in _MEMORY_KINDS:
        return None
    return Cause.MEMORY, 0.95, (death.rank,), f"rank {death.rank} had no memory: {_short(failure.message)}"


def _import(death: Death, failure: Failure, _: Sequence[Death]) -> Classified | None:
    if failure.kind not in _IMPORTS:
        return None
    return (
        Cause.IMPORT,
        0.97 if not death.met else 0.85,
        (death.rank,),
        f"rank {death.rank} could not import: {failure.kind}: {_short(failure.message)}",
    )


def _diverged(_: Death, failure: Failure, __: Sequence[Death]) -> Classified | None:
    if _ERRED.search(failure.message):
        found = _ALONE_TEXT.search(failure.message) or _PLACES_TEXT.search(failure.message)
        blamed = () if found is None else tuple(int(number) for number in found.groups())
        return Cause.BITS, 0.95, blamed, f"ranks hold different bits of one state: {_short(failure.message)}"
    if failure.kind in ("TrainingDiverged", "Diverged", "FloatingPointError") or (
        failure.kind == "ZbmdError" and _NOT_FINITE.search(failure.message)
    ):
        told = _RANK_TEXT.search(failure.message)
        ranks = () if told is None else (int(told[1]),)
        return Cause.NOT_FINITE, 0.95, ranks, f"training diverged: {_short(failure.message)}"
    return None


def _files(death: Death, failure: Failure, _: Sequence[Death]) -> Classified | None:
    own, text = (death.rank,), _short(failure.message)
    if failure.kind == "DiskFull" or _NO_SPACE.search(failure.message):
        return Cause.DISK, 0.97, own, f"rank {death.rank} could not write: {text}"
    if failure.kind == "Damaged":
        return Cause.CHECKPOINT, 0.97, (), f"the checkpoint is damaged: {text}"
    if failure.kind == "DirectoryTaken":
        return Cause.DIRECTORY, 0.97, (), text
    if failure.kind == "PortInUse" or _NO_ADDRESS.search(failure.message):
        return Cause.ADDRESS, 0.95, own, f"rank {death.rank} could not listen: {text}"
    return None


def _asked_for(death: Death, failure: Failure, _: Sequence[Death]) -> Classified | None:
    if failure.kind == "WrongWorldSize":
        return Cause.WORLD_SIZE, 0.97, (), _short(failure.message)
    if failure.kind == "UserError" or death.code == 2:
        return Cause.USAGE, 0.9, (), _short(failure.message)
    return None


Rule = Callable[[Death, Failure, Sequence[Death]], Classified | None]
_RULES: Final[tuple[Rule, ...]] = (_mismatch, _memory, _import, _diverged, _files, _asked_for)


def refusal(kind: str, message: str) -> tuple[Cause, float]:
    """Return the cause of an error of the launcher itself, by its type and message."""
    none = Death(rank=0, incarnation=0, at_ns=0, code=2, reason="", next_step="")
    failure = Failure(kind, message)
    for rule in (_files, _asked_for):
        if (found := rule(none, failure, ())) is not None:
            return found[0], found[1]
    return Cause.USAGE, 0.8


def _is_same(one: Death, other: Death) -> bool:
    if one.failure is None or other.failure is None:
        return False
    return (one.failure.kind, one.failure.place) == (other.failure.kind, other.failure.place)


def _place(death: Death) -> Place | None:
    return None if death.failure is None else death.failure.place


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 240 else f"{line[:239]}…"


def named(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
