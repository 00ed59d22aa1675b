"""One recovery budget, and every deadline that is derived from it.

`recovery_budget` is the time from the death of a process to the first step that is run again. It is the one
knob; every other deadline is a share or a multiple of it, so that they cannot contradict each other:

- A **share** is part of the recovery's path. The shares of a path never add up to more than the budget.
- A **probe** finds out whether a silent peer still lives.
- A **bound** ends what should long be over. It is a multiple of the budget and has limits of its own, because
  whoever it strikes may live and only be starved: to be late is better than to be given up.

`zbmd-node doctor` shows each one with its reason.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import Any, Final

from zbmd.transport.errors import UserError

# Durations as users write and read them: `500ms`, `2s`, `1.5min`.

DAY_S: Final = 24 * 3600.0
DURATION_S_MAX: Final = 7 * DAY_S

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s|min|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_duration(text: str, *, most_s: float = DURATION_S_MAX) -> float:
    """Seconds in a duration such as `500ms` or `1min`, at most `most_s`. Raises `UserError`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{text!r} is not a duration. Write a number and a unit, such as 500ms, 2s or 1min.")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if not 0 < seconds <= most_s:
        days = f"{most_s / DAY_S:,.0f} days"
        raise UserError(f"a duration of {text} is out of range. Give more than 0 and at most {days}.")
    return seconds


def format_duration(duration_ns: int) -> str:
    """`duration_ns` with at most four digits, in a unit that `parse_duration` knows: `250ms`, `1.5s`."""
    for unit, unit_ns in (
        ("h", 3600 * 10**9),
        ("min", 60 * 10**9),
        ("s", 10**9),
        ("ms", 10**6),
        ("us", 10**3),
    ):
        if duration_ns >= unit_ns:
            return f"{duration_ns / unit_ns:.4g}{unit}"
    return f"{duration_ns}ns"


MILLISECOND_NS: Final = 10**6
SECOND_NS: Final = 10**9

RECOVERY_BUDGET_NS_DEFAULT: Final = SECOND_NS
RECOVERY_BUDGET_NS_MIN: Final = 100 * MILLISECOND_NS
"""Below it heartbeats every 5 ms and a suspicion after 40 ms would name hosts that are only busy."""
RECOVERY_BUDGET_NS_MAX: Final = 600 * SECOND_NS
"""With a longer budget the job may as well be restarted."""
KEEPALIVE_PROBES_MIN: Final = 4
"""A network that loses 1 % of its packets leaves one probe in fifty without an answer, and there are dozens
of idle connections between two hosts."""
RECOVERY_BUDGET_VARIABLE: Final = "ZBMD_RECOVERY_BUDGET"

_RULE: Final = "rule"


class DeadlineKind(Enum):
    """The role of a deadline in recovery."""

    SHARE = "share"
    PROBE = "probe"
    BOUND = "bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineRule:
    """The rule by which a deadline follows from the budget: `times / parts` of it, within limits, and why.

    unit_ns: what the value is counted in, rounded up to whole ones unless it is nanoseconds.
    """

    kind: DeadlineKind
    times: int
    parts: int
    reason: str
    least_ns: int = 1
    most_ns: int | None = None
    unit_ns: int = 1

    def value(self, recovery_budget_ns: int) -> int:
        """The deadline for this budget, in units of `unit_ns`."""
        exact_ns = max(self.least_ns, recovery_budget_ns * self.times // self.parts)
        if self.most_ns is not None:
            exact_ns = min(exact_ns, self.most_ns)
        return -(-exact_ns // self.unit_ns)

    def __str__(self) -> str:
        """The rule as a formula: `budget / 50`, `5 x budget, at least 1s`."""
        text = "budget" if self.times == 1 else f"{self.times} x budget"
        text += "" if self.parts == 1 else f" / {self.parts}"
        if self.least_ns > 1:
            text += f", at least {format_duration(self.least_ns)}"
        return text if self.most_ns is None else f"{text}, at most {format_duration(self.most_ns)}"


def _derived(kind: DeadlineKind, times: int, parts: int, reason: str, **limits: int) -> Any:
    """A field whose value follows from the budget; `limits` are those of `DeadlineRule`."""
    rule = DeadlineRule(kind=kind, times=times, parts=parts, reason=reason, **limits)
    return dataclasses.field(metadata={_RULE: rule})


_share = partial(_derived, DeadlineKind.SHARE)
_probe = partial(_derived, DeadlineKind.PROBE)
_bound = partial(_derived, DeadlineKind.BOUND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """One deadline as it is shown. `name` without its unit."""

    name: str
    value_ns: int
    kind: DeadlineKind
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Every deadline that follows from `recovery_budget_ns`. Made by `derive`.

    On one host a recovery is notice, confirmation, replacement, agreement, link_up, resume; for a host that
    has fallen silent it is suspicion, agreement, replacement, link_up, resume.
    """

    recovery_budget_ns: int

    # The path of a recovery.
    notice_ns: int = _share(
        1, 50, "same host: the kernel marks the futexes of the dead before it frees their memory"
    )
    confirmation_ns: int = _share(
        1, 4, "same host: pidfd and EOF come once memory is freed, after about 60 ms a GiB"
    )
    suspicion_ns: int = _share(
        2, 5, "other hosts: eight heartbeats missed; no proof, so a majority must share it"
    )
    agreement_ns: int = _share(1, 10, "the members agree on the next view")
    replacement_ns: int = _share(1, 10, "a fork of the template, which has imported everything, and its join")
    link_up_ns: int = _share(1, 5, "the links of the new view are made, all at once")
    resume_ns: int = _share(3, 20, "a group is made, state pulled from a peer, and the step begins again")

    # What finds the silent.
    heartbeat_ns: int = _probe(
        1, 20, "other hosts: eight of them fit into a suspicion, so lost ones do no harm"
    )
    tcp_keepalive_idle_s: int = _probe(
        1, 1, "an idle connection is probed after it", least_ns=SECOND_NS, unit_ns=SECOND_NS
    )
    tcp_keepalive_interval_s: int = _probe(
        1, 4, "from probe to probe; the kernel counts in seconds", least_ns=SECOND_NS, unit_ns=SECOND_NS
    )
    tcp_user_timeout_ms: int = _probe(
        1,
        1,
        "bytes unacknowledged so long end a connection: after a suspicion, and after a retransmission or two",
        least_ns=SECOND_NS // 2,
        unit_ns=MILLISECOND_NS,
    )

    # What ends that which should long be over. Never so short that a busy machine is taken for a dead one.
    hello_ns: int = _bound(
        5,
        1,
        "to say hello on a connection: a stranger who stalls holds one of few places",
        least_ns=SECOND_NS,
        most_ns=30 * SECOND_NS,
    )
    dial_ns: int = _bound(
        6,
        1,
        "to connect and say hello: longer than a hello, and a lost SYN is repeated after 1 s",
        least_ns=2 * SECOND_NS,
        most_ns=60 * SECOND_NS,
    )
    view_ns: int = _bound(
        10,
        1,
        "all links of a view stand, all who went are confirmed: longer than a dial, so its reason is known",
        least_ns=5 * SECOND_NS,
        most_ns=600 * SECOND_NS,
    )
    flush_ns: int = _bound(
        1,
        2,
        "a rank that leaves waits so long for its last reports",
        least_ns=SECOND_NS // 4,
        most_ns=5 * SECOND_NS,
    )
    stop_grace_ns: int = _bound(
        1,
        1,
        "from SIGTERM to SIGKILL in a run that failed: room for the flush; a stopped one has --stop-grace",
        least_ns=SECOND_NS // 2,
        most_ns=10 * SECOND_NS,
    )
    stop_kill_ns: int = _bound(
        1,
        2,
        "from SIGKILL to the end of the run, even if the kernel is still freeing a process",
        least_ns=SECOND_NS // 4,
        most_ns=5 * SECOND_NS,
    )

    @property
    def same_host_path_ns(self) -> int:
        """The shares of a recovery from a death that the kernel proves, added up."""
        return self.notice_ns + self.confirmation_ns + self._repair_ns

    @property
    def across_hosts_path_ns(self) -> int:
        """The shares of a recovery from a host's silence, added up."""
        return self.suspicion_ns + self._repair_ns

    @property
    def _repair_ns(self) -> int:
        return self.agreement_ns + self.replacement_ns + self.link_up_ns + self.resume_ns

    @property
    def tcp_keepalive_count(self) -> int:
        """Probes without an answer that end an idle connection: as many as span the user timeout, and enough
        that none ends by losses; heartbeats are quicker to find a host that is gone."""
        spanning = -(-self.tcp_user_timeout_ms // (1000 * self.tcp_keepalive_interval_s))
        return max(KEEPALIVE_PROBES_MIN, spanning)

    def explain(self) -> tuple[Derived, ...]:
        """Each deadline with its rule and reason: shares, probes and bounds, in the order of a recovery."""
        return tuple(
            Derived(
                name=name.rpartition("_")[0],
                value_ns=getattr(self, name) * rule.unit_ns,
                kind=rule.kind,
                rule=str(rule),
                reason=rule.reason,
            )
            for name, rule in RULES.items()
        )

    def check_invariants(self) -> None:
        """Raise `AssertionError` if two deadlines contradict each other."""
        budget_ns, user_timeout_ns = self.recovery_budget_ns, self.tcp_user_timeout_ms * MILLISECOND_NS
        assert all(getattr(self, name) > 0 for name in RULES), f"a deadline is not positive: {self}"
        assert self.same_host_path_ns <= budget_ns, f"{self.same_host_path_ns} of {budget_ns} ns on one host"
        assert self.across_hosts_path_ns <= budget_ns, f"{self.across_hosts_path_ns} of {budget_ns} ns"
        for order in (
            (self.heartbeat_ns, self.suspicion_ns, user_timeout_ns),
            (self.notice_ns, self.confirmation_ns, self.suspicion_ns),
            (self.link_up_ns, self.view_ns),
            (self.hello_ns, self.dial_ns, self.view_ns),
            (self.flush_ns, self.stop_grace_ns),
        ):
            assert all(a < b for a, b in pairwise(order)), f"not in order: {order}"
        assert 4 * self.heartbeat_ns <= self.suspicion_ns, "a suspicion must outlive lost heartbeats"
        probed_s = self.tcp_keepalive_idle_s + self.tcp_keepalive_count * self.tcp_keepalive_interval_s
        # tcp(7): with both set the user timeout overrides the count, so it must not exceed the probes' time.
        assert user_timeout_ns <= probed_s * SECOND_NS, "the user timeout exceeds the probes' time"
        assert self.tcp_keepalive_count <= 127 and self.tcp_keepalive_idle_s <= 32767, (
            "beyond the kernel's limits"
        )


RULES: Final[dict[str, DeadlineRule]] = {
    field.name: field.metadata[_RULE] for field in dataclasses.fields(Deadlines) if _RULE in field.metadata
}
"""By the field's name in `Deadlines`."""


def derive(recovery_budget_ns: int = RECOVERY_BUDGET_NS_DEFAULT) -> Deadlines:
    """Every deadline for a budget in ns. Raises `UserError` if the budget is out of range."""
    if not RECOVERY_BUDGET_NS_MIN <= recovery_budget_ns <= RECOVERY_BUDGET_NS_MAX:
        raise UserError(
            f"a recovery budget of {format_duration(recovery_budget_ns)} is out of range. "
            f"Give {format_duration(RECOVERY_BUDGET_NS_MIN)} to {format_duration(RECOVERY_BUDGET_NS_MAX)}."
        )
    values = {name: rule.value(recovery_budget_ns) for name, rule in RULES.items()}
    deadlines = Deadlines(recovery_budget_ns=recovery_budget_ns, **values)
    deadlines.check_invariants()
    return deadlines


def parse_recovery_budget(text: str) -> int:
    """The budget in ns from text such as `1s` or `500ms`. Raises `UserError` on another text or its range."""
    recovery_budget_ns = round(parse_duration(text) * SECOND_NS)
    return derive(recovery_budget_ns).recovery_budget_ns
