"""Stragglers of a loop: the driver of `StragglerMachine` over steps of PyTorch.

Each rank measures its steps and sends a sample with its vote for the next one, so that all ranks have all
samples and run the same machine over them. A step's time belongs to one phase after the other (`phase`);
waits for operations within a phase are time of `COMM`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.work import WAITS
from zbmd.training.autograd import spans
from zbmd.training.autograd.spans import Span
from zbmd.training.job.slow_ranks import NOTHING_IN_LOOPS, done_about, end_if_replaced, report
from zbmd.training.job.stragglers.delays import delay_path, wait_for_data
from zbmd.training.job.stragglers.machine import Entered, Stepped, StragglerAction, StragglerMachine
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.job.stragglers.samples import Sampler
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.torch.votes import samples_of
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

CHOICES: Final = (OnStraggler.WARN.value, OnStraggler.REPLACE.value)


def require_choice(given: str) -> OnStraggler:
    """Return the policy of that name. Raises `UserError` for one that a loop has not."""
    if given not in CHOICES:
        also = ": a rank's share of a batch is the script's" if given == OnStraggler.REBALANCE.value else ""
        raise UserError(
            f"zbmd.torch.resilient(on_straggler=…): expected {' or '.join(CHOICES)}, got {given!r}{also}"
        )
    return OnStraggler(given)


class SlowLoopRanks:
    """Stragglers of a loop, as one rank sees them, and its profile; for the thread that trains.

    out: has the profile; None: nothing is written.
    """

    def __init__(self, worker: Worker, out: Path | None, on_straggler: OnStraggler) -> None:
        self._worker, self._on_straggler = worker, on_straggler
        self._delay = "" if out is None else os.fspath(delay_path(out, worker.rank))
        self._out = out
        self._profiler: Profiler | None = None
        self._machine = StragglerMachine()
        self._sampler: Sampler | None = None
        self._reports = False
        self._phase: Span | None = None
        self._since_ns = self._step = 0
        self._begun = False
        self._actions: list[StragglerAction] = []
        self.sample: tuple[float, ...] = ()
        """Of the step before the one under way, for the vote."""

    def enter(self, group: Group, passes: tuple[int, ...]) -> None:
        """Go on with these ranks; the first step is not measured. passes: of a step, of each rank."""
        self._leave()
        if self._profiler is None:
            self._profiler = open_profiler(self._out, None, sequences=1)
        ranks = tuple(group.members)
        self._machine.handle(Entered(ranks=ranks, shards=passes, alike=(0,) * len(ranks)))
        self._reports = group.rank == 0
        if group.size > 1:
            self._sampler = Sampler(self._worker.incarnation)
        WAITS.is_on = True
        WAITS.take()

    def _leave(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._sampler, self._phase, self._begun, self._step = None, None, False, 0
        self.sample, self._actions = (), []

    def close(self) -> None:
        """Measure no longer, and close the profile. Idempotent."""
        WAITS.is_on = False
        self._leave()
        if self._profiler is not None:
            self._profiler.close()
            self._profiler = None

    def begin(self, step: int) -> None:
        """Step `step` begins, before its batch is drawn; again, nothing happens."""
        profiler, sampler = self._profiler, self._sampler
        if step == self._step or profiler is None:
            return
        self._step = step
        line = profiler.begin_step(step)
        if sampler is not None and self._begun and line is not None:
            self.sample = tuple(sampler.sample(line).tolist())
        elif sampler is not None:
            self.sample = ()
            sampler.restart()
        self._begun = True
        if self._delay:
            self.phase(spans.DATA)
            wait_for_data(self._delay)
            self.phase(None)

    def phase(self, span: Span | None) -> None:
        """The phase under way ends here, and another one begins; None: what follows is of no phase."""
        now = now_ns()
        waits, at, profiler = WAITS.take(), self._since_ns, self._profiler
        if self._phase is not None and profiler is not None:
            for begin, end in waits:
                if begin < at or end > now:
                    continue
                profiler.add(self._phase, at, begin)
                profiler.add(spans.COMM, begin, end)
                at = end
            profiler.add(self._phase, at, now)
        self._phase, self._since_ns = span, now

    def voted(self, step: int, rows: Sequence[bytes]) -> None:
        """All ranks of this view have voted for `step`, with these votes. Raises `RemoteProtocolError`."""
        if self._sampler is not None:
            self._actions = self._machine.handle(Stepped(step, samples_of(rows)))

    def stepped(self) -> None:
        """The step has ended: report who is slow, and do what is asked for; a replaced rank ends here."""
        actions, self._actions, profiler = self._actions, [], self._profiler
        for action in actions:
            done = done_about(action, self._on_straggler, NOTHING_IN_LOOPS)
            if self._reports and profiler is not None:
                report(self._worker, profiler, action, done)
            end_if_replaced(self._worker, action, done)
