"""One run of a script with a resilient PyTorch loop, for `chaos.loops`."""

from __future__ import annotations

import hashlib
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.process.early_template import EarlyTemplate
from zbmd.actors.view import OnLoss
from zbmd.tools.bench.run_ranks import RanksOutput
from zbmd.tools.chaos import small_job
from zbmd.tools.chaos.small_job import RESTARTS_MAX, RUN_S_MAX, JobOutcome, ended_within, failures_of
from zbmd.tools.node.run import LOOP_PRELOADS, snapshot_keeper
from zbmd.tools.runs.commands import audit_run
from zbmd.training.run.audit import LoopAudit, Proof
from zbmd.training.run.ledger import LOG_NAME, loss_of, read_log
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import UserError

ARENA_BYTES: Final = 32 << 20
SAVED_EVERY: Final = 4
"""Steps from one checkpoint to the next, beside the loop."""
ENDS: Final = "ends with "
LOSSES: Final = "losses of the log: "
HELD_S: Final = 30.0
"""The time for which the state outlives a run that fails."""
LINES_MAX: Final = 4096
"""Of all ranks together: three lines for each step are some hundred."""
PRELOAD: Final = (*LOOP_PRELOADS, "torch.distributed.fsdp", "zbmd.torch")
"""The worker imports these once, before it forks."""


class LoopCase(msgspec.Struct, frozen=True, kw_only=True, tag="loop"):
    """A script, its variable MODE, and the kills. counts: as of `JobCase`; out: of its log and checkpoints.

    shrinks: it goes on with the ranks that are left. newcomers: so many of the ranks are of a node
    that joins in the loop; see `growing_case`. environment: more variables. held: whether each step is
    kept in memory that outlives the ranks.
    """

    program: Path
    mode: str
    fault: str
    ranks: int
    counts: Path | None = None
    out: Path | None = None
    shrinks: bool = False
    newcomers: int = 0
    held: bool = False
    environment: dict[str, str] = {}
    variables: dict[str, str] = {}


def environment_of(case: LoopCase) -> dict[str, str]:
    """Return the variables of its ranks."""
    fault = {faults.FAULT_VARIABLE: case.fault} if case.fault else {}
    saves = {"OUT": str(case.out), "EVERY": str(SAVED_EVERY)} if case.out else {}
    return {"MODE": case.mode, **fault, **saves, **case.environment}


async def run_loop(case: LoopCase, template: EarlyTemplate | None) -> JobOutcome:
    """Run it once. The digest is that of what ranks print of their final state, in the order of ranks.

    Of a loop that shrinks the log is checked, and its losses are added to what ranks said. Raises `UserError`
    if the run fails, with what ranks said, or if the log does not prove that each sample came once.
    """
    output = RanksOutput(lines=deque(maxlen=LINES_MAX))
    target, arguments, is_module = str(case.program), list[str](), False
    if case.counts is not None:
        target, arguments, is_module = small_job.__name__, [str(case.counts), target], True
    config = HostConfig(
        target=target,
        is_module=is_module,
        arguments=tuple(arguments),
        world_size=case.ranks,
        on_loss=OnLoss.SHRINK if case.shrinks else OnLoss.REPLACE,
        max_restarts=RESTARTS_MAX,
        arena_bytes=ARENA_BYTES,
        environment=environment_of(case),
        preload=PRELOAD,
    )
    keeper = None
    if case.held:  # of this run alone, whatever others hold of the same script
        config = replace(config, arguments=(*arguments, secrets.token_hex(8)))
        keeper = snapshot_keeper(config, HELD_S, output.lines.append)
    host = Host(config, output=output, observer=output, template=template, snapshots=keeper)
    ended = await ended_within(host, RUN_S_MAX)
    told = "\n".join(output.lines)
    if ended.exit_code != 0:
        raise UserError(f"with {case.fault!r} the loop did not finish: {ended.reason}\n{told}")
    return outcome_of(case, output.lines, failures_of(ended.failures))


def outcome_of(case: LoopCase, lines: Sequence[str], failures: tuple[str, ...]) -> JobOutcome:
    """Return what became of a run that has succeeded; see `run_loop`. lines: of its ranks."""
    finals, told = sorted(line for line in lines if "final rank" in line), "\n".join(lines)
    if case.shrinks and case.out is not None:
        finals, told = sorted(ends_in(lines)), f"{told}\n{LOSSES}{_losses(case)}"
    digest = hashlib.sha256("\n".join(finals).encode()).hexdigest()
    return JobOutcome(digest=digest, failures=failures, told=told)


def ends_in(lines: Iterable[str]) -> list[str]:
    """Return the digests of the whole state that ranks say they end with."""
    return [line.partition(ENDS)[2] for line in lines if ENDS in line]


def _losses(case: LoopCase) -> str:
    assert case.out is not None
    found = audit_run(case.out)
    if not isinstance(found, LoopAudit) or not found.is_whole or found.proves is not Proof.SAMPLES:
        raise UserError(f"with {case.fault!r} the ledger does not balance: {found}")
    return " ".join(repr(loss_of(record)) for record in read_log(case.out / LOG_NAME)[1])
