"""Faults as data: what goes wrong, with whom, when and for how long; printable, parsable, drawn from a seed.

A fault reads as `kind:field=value,...`, a plan as faults separated by `;`, times in the largest unit that
tells them exactly:

    crash:process=rank1,at=1500us,for=20ms;partition:groups=rank0+rank1/rank2,at=3ms,for=1ms

`at` counts from the start of the run. What a fault does to a kind of world is said where it is declared; a
world refuses those that mean nothing to it (`UnsupportedFault`).
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, get_type_hints

from zbmd.transport.errors import LocalProtocolError, UserError
from zbmd.transport.sim.model import Conditions

FAULTS_MAX = 1024
"""The faults of one plan."""
EFFECTS_MAX = 1_000_000
"""The effects after which a `CrashWithin` strikes."""
FOR_NS_MAX = 30_000_000_000
"""The longest that a drawn fault lasts."""


class UnsupportedFault(LocalProtocolError):
    """This kind of world has nothing that the fault could strike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """SIGKILL; restarted after `for_ns`, unless that is 0: then it stays down until something starts it."""

    process: str
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashWithin:
    """SIGKILL between two effects of a machine: after `effects` of those that come of what the process takes
    from `at_ns` on; with 0 it dies of the first stimulus. Restarted `for_ns` later, unless that is 0.

    All that a process does at one stimulus happens at one moment, so no `Crash` can fall in between.
    """

    process: str
    effects: int
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """SIGSTOP, then SIGCONT: what comes for the process waits."""

    process: str
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Every callback of the process takes `factor` times as long."""

    process: str
    factor: float
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """The process's wall clock jumps by `step_ns` and all its clocks run `drift_ppm` fast, for a while."""

    process: str
    step_ns: int
    drift_ppm: int
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Nothing passes between processes of different groups; one that is in no group reaches all.

    Datagrams are lost, what links and machines send waits until it heals.
    """

    groups: tuple[tuple[str, ...], ...]
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Nothing passes from `source` to `target`; the way back is open. Else as `Partition`."""

    source: str
    target: str
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clog:
    """What `source` sends to `target` is held, datagrams too, and then comes in one burst."""

    source: str
    target: str
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NetConditions:
    """Another weather for all; of several the one that began last holds. See `Conditions`."""

    latency_ns: int
    jitter_ns: int
    bandwidth_bytes_per_s: int
    loss: float
    duplicate: float
    reorder: float
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """Every write to the process's disk fails with ENOSPC."""

    process: str
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSlow:
    """Every operation on the process's disk takes `delay_ns` more."""

    process: str
    delay_ns: int
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskReadErrors:
    """Reads from the process's disk fail with EIO, each with the given probability."""

    process: str
    probability: float
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TornWrites:
    """At a crash of the process, its unsynced writes survive in any subset, and torn, not as a prefix."""

    process: str
    at_ns: int
    for_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """The process can hold no more than `limit_bytes`; what it holds already stays."""

    process: str
    limit_bytes: int
    at_ns: int
    for_ns: int


Fault: TypeAlias = (
    Crash
    | CrashWithin
    | Pause
    | Slow
    | Skew
    | Partition
    | Cut
    | Clog
    | NetConditions
    | DiskFull
    | DiskSlow
    | DiskReadErrors
    | TornWrites
    | MemoryLimit
)
FaultPlan: TypeAlias = tuple[Fault, ...]

PROCESS_FAULTS: tuple[type[Fault], ...] = (Crash, Pause, Slow, Skew)
NETWORK_FAULTS: tuple[type[Fault], ...] = (Partition, Cut, Clog, NetConditions)
STORAGE_FAULTS: tuple[type[Fault], ...] = (DiskFull, DiskSlow, DiskReadErrors, TornWrites, MemoryLimit)
WORLD_FAULTS: tuple[type[Fault], ...] = (*PROCESS_FAULTS, *NETWORK_FAULTS, *STORAGE_FAULTS)
"""Those that strike a `World` of programs."""
MACHINE_FAULTS: tuple[type[Fault], ...] = (CrashWithin,)
"""Those that strike machines alone, in a `Simulation`."""
ALL_FAULTS: tuple[type[Fault], ...] = (*WORLD_FAULTS, *MACHINE_FAULTS)


def kind_of(fault: type[Fault]) -> str:
    """The name of a kind of fault in plans: `NetConditions` is `net-conditions`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", fault.__name__).lower()


_KINDS = {kind_of(kind): kind for kind in ALL_FAULTS}
_UNITS = (("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1))
_DURATION = re.compile(r"(?P<number>-?\d{1,18})(?P<unit>ns|us|ms|s)")
_NAME = re.compile(r"[A-Za-z0-9_.#@-]{1,64}")


# --- as text --------------------------------------------------------------------------------------------


def format_fault(fault: Fault) -> str:
    """The fault as `parse_fault` reads it."""
    pairs = (
        f"{_key(field.name)}={_format(field.name, getattr(fault, field.name))}"
        for field in dataclasses.fields(fault)
    )
    return f"{kind_of(type(fault))}:{','.join(pairs)}"


def format_plan(plan: FaultPlan) -> str:
    """The plan as `parse_plan` reads it; empty if it has no faults."""
    return ";".join(map(format_fault, plan))


def parse_plan(text: str) -> FaultPlan:
    """The faults of a plan. Raises `UserError` on text that is none, or beyond `FAULTS_MAX` faults."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    if len(parts) > FAULTS_MAX:
        raise UserError(f"a plan of {len(parts)} faults; {FAULTS_MAX} are the bound")
    return tuple(map(parse_fault, parts))


def parse_fault(text: str) -> Fault:
    """One fault. Raises `UserError` that says what is wrong with it."""
    name, _, rest = text.strip().partition(":")
    kind = _KINDS.get(name)
    if kind is None:
        raise UserError(f"{name!r} is no kind of fault; there are {', '.join(_KINDS)}")
    hints = get_type_hints(kind)
    fields = {_key(field.name): field.name for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        field = fields.get(key.strip())
        if field is None or field in values:
            raise UserError(f"{text!r}: write {name}:{','.join(f'{key}=…' for key in fields)}")
        values[field] = _parse(text, field, hints[field], value.strip())
    if len(values) != len(fields):
        missing = ", ".join(key for key, field in fields.items() if field not in values)
        raise UserError(f"{text!r} does not say {missing}")
    if min(_time(values, "at_ns"), _time(values, "for_ns")) < 0:
        raise UserError(f"{text!r}: at and for are not below 0")
    if kind is CrashWithin and not 0 <= values["effects"] <= EFFECTS_MAX:
        raise UserError(f"{text!r}: effects are 0 to {EFFECTS_MAX}")
    return kind(**values)


def _time(values: dict[str, Any], field: str) -> int:
    value = values[field]
    assert isinstance(value, int)
    return value


def _key(field: str) -> str:
    return field.removesuffix("_ns")


def _format(field: str, value: object) -> str:
    if isinstance(value, tuple):
        return "/".join("+".join(group) for group in value)
    if field.endswith("_ns") and isinstance(value, int):
        unit, scale = next((unit, scale) for unit, scale in _UNITS if value % scale == 0)
        return f"{value // scale}{unit}" if value else "0ns"
    return str(value)


def _parse(text: str, field: str, hint: object, value: str) -> object:
    try:
        if field.endswith("_ns"):
            match = _DURATION.fullmatch(value)
            if match is None:
                raise ValueError("a time is written like 1500us")
            return int(match["number"]) * dict(_UNITS)[match["unit"]]
        if hint is str:
            return _name(value)
        if hint is float:
            return _probability(field, float(value))
        if hint is int:
            return int(value)
    except ValueError as error:
        raise UserError(f"{text!r}: {field}={value!r}: {error}") from None
    return tuple(tuple(_name(name) for name in group.split("+")) for group in value.split("/"))


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise UserError(f"{value!r} is no name of a process")
    return value


def _probability(field: str, value: float) -> float:
    if not 0.0 <= value <= (1.0 if field != "factor" else 1e9):
        raise ValueError("out of range")
    return value


# --- drawn ----------------------------------------------------------------------------------------------


def draw_plan(
    rng: random.Random,
    names: Sequence[str],
    span_ns: int,
    kinds: Sequence[type[Fault]] = WORLD_FAULTS,
    count: int = 8,
    *,
    restart: bool = True,
) -> FaultPlan:
    """`count` faults of the given kinds that strike `names` within `span_ns`, in the order of their time.

    Without `restart` a crash lasts until something else starts the process again. Raises
    `LocalProtocolError` if there is nobody or no time to strike, or beyond `FAULTS_MAX`.
    """
    usable = [kind for kind in kinds if len(names) > 1 or kind not in (Partition, Cut, Clog)]
    if not names or span_ns < 1 or not 0 <= count <= FAULTS_MAX or (count and not usable):
        raise LocalProtocolError(
            f"cannot draw {count} faults of {len(usable)} kinds for {len(names)} processes in {span_ns} ns"
        )
    plan = [_draw(rng, rng.choice(usable), list(names), span_ns, restart) for _ in range(count)]
    return tuple(sorted(plan, key=lambda fault: fault.at_ns))


def _draw(rng: random.Random, kind: type[Fault], names: list[str], span_ns: int, restart: bool) -> Fault:
    at_ns = rng.randrange(span_ns)
    # Short ones as often as long ones: many bugs need a fault that ends while its effects are under way.
    for_ns = min(FOR_NS_MAX, 1 + int(span_ns * 10 ** rng.uniform(-3, -0.3)))
    if kind in (Crash, CrashWithin) and not restart:
        for_ns = 0
    made: Fault = kind(**_DRAWN[kind](rng, names), at_ns=at_ns, for_ns=for_ns)
    return made


def _victim(rng: random.Random, names: list[str]) -> dict[str, Any]:
    return {"process": rng.choice(names)}


def _pair(rng: random.Random, names: list[str]) -> dict[str, Any]:
    source, target = rng.sample(names, 2)
    return {"source": source, "target": target}


def _groups(rng: random.Random, names: list[str]) -> dict[str, Any]:
    shuffled = rng.sample(names, len(names))
    at = rng.randint(1, len(names) - 1)
    return {"groups": (tuple(sorted(shuffled[:at])), tuple(sorted(shuffled[at:])))}


def _weather(rng: random.Random, names: list[str]) -> dict[str, Any]:
    calm = Conditions()
    return {
        "latency_ns": int(calm.latency_ns * 10 ** rng.uniform(0, 2)),
        "jitter_ns": int(calm.jitter_ns * 10 ** rng.uniform(0, 2)),
        "bandwidth_bytes_per_s": int(calm.bandwidth_bytes_per_s * 10 ** rng.uniform(-3, 0)),
        "loss": round(rng.uniform(0, 0.3), 3),
        "duplicate": round(rng.uniform(0, 0.1), 3),
        "reorder": round(rng.uniform(0, 0.3), 3),
    }


_DRAWN: dict[type[Fault], Callable[[random.Random, list[str]], dict[str, Any]]] = {
    Crash: _victim,
    CrashWithin: lambda rng, names: {**_victim(rng, names), "effects": int(10 ** rng.uniform(0, 2)) - 1},
    Pause: _victim,
    Slow: lambda rng, names: {**_victim(rng, names), "factor": round(10 ** rng.uniform(0.3, 3), 1)},
    Skew: lambda rng, names: {
        **_victim(rng, names),
        "step_ns": rng.randint(-(10**9), 10**9),
        "drift_ppm": rng.randint(-200, 200),
    },
    Partition: _groups,
    Cut: _pair,
    Clog: _pair,
    NetConditions: _weather,
    DiskFull: _victim,
    DiskSlow: lambda rng, names: {**_victim(rng, names), "delay_ns": int(10 ** rng.uniform(5, 9))},
    DiskReadErrors: lambda rng, names: {**_victim(rng, names), "probability": round(rng.uniform(0.05, 1), 2)},
    TornWrites: _victim,
    MemoryLimit: lambda rng, names: {**_victim(rng, names), "limit_bytes": rng.choice((0, 1 << 16, 1 << 20))},
}


def weaker(fault: Fault) -> tuple[Fault, ...]:
    """Simpler faults that might do instead, the simplest first: for the shrinker."""
    found: list[Fault] = []
    if fault.for_ns > 1:
        found += [dataclasses.replace(fault, for_ns=for_ns) for for_ns in (1, fault.for_ns // 2)]
    match fault:
        case CrashWithin(process=process, effects=effects):
            found.append(Crash(process=process, at_ns=fault.at_ns, for_ns=fault.for_ns))
            found += [dataclasses.replace(fault, effects=n) for n in sorted({0, effects // 2}) if n < effects]
        case NetConditions():
            calm = Conditions()
            for field in ("loss", "duplicate", "reorder", "latency_ns", "jitter_ns", "bandwidth_bytes_per_s"):
                if getattr(fault, field) != getattr(calm, field):
                    found.append(dataclasses.replace(fault, **{field: getattr(calm, field)}))
        case Skew(step_ns=step_ns, drift_ppm=drift_ppm) if step_ns and drift_ppm:
            found += [dataclasses.replace(fault, step_ns=0), dataclasses.replace(fault, drift_ppm=0)]
        case Partition(groups=groups):
            found += [
                Cut(source=a, target=b, at_ns=fault.at_ns, for_ns=fault.for_ns)
                for left, right in ((groups[0], groups[-1]), (groups[-1], groups[0]))
                for a in left[:1]
                for b in right[:1]
                if len(groups) > 1
            ]
        case _:
            pass
    return tuple(found)


def names_of(fault: Fault) -> frozenset[str]:
    """The processes that a fault names."""
    match fault:
        case Partition(groups=groups):
            return frozenset(name for group in groups for name in group)
        case Cut(source=source, target=target) | Clog(source=source, target=target):
            return frozenset((source, target))
        case NetConditions():
            return frozenset()
        case _:
            return frozenset((fault.process,))


def renamed(fault: Fault, names: Mapping[str, str]) -> Fault | None:
    """The same fault with processes renamed; None if it then makes no sense, such as a cut from a to a."""
    match fault:
        case Partition(groups=groups):
            taken: set[str] = set()
            kept: list[tuple[str, ...]] = []
            for group in groups:
                new = {names.get(name, name) for name in group} - taken
                taken |= new
                kept += [tuple(sorted(new))] if new else []
            return dataclasses.replace(fault, groups=tuple(kept)) if len(kept) > 1 else None
        case Cut(source=source, target=target) | Clog(source=source, target=target):
            source, target = names.get(source, source), names.get(target, target)
            return None if source == target else dataclasses.replace(fault, source=source, target=target)
        case NetConditions():
            return fault
        case _:
            return dataclasses.replace(fault, process=names.get(fault.process, fault.process))
