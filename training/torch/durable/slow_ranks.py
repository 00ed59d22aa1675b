"""Stragglers of a loop: the driver of `StragglerMachine` over steps of PyTorch.

Each rank measures its steps and sends a sample with its vote for the next one, so that all ranks have all
samples and run the same machine over them. A step's time belongs to one phase after the other (`phase`);
waits for operations within a phase are time of `COMM`.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import Worker
from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY
from zbmd.collectives.torch.work import WAITS
from zbmd.training.autograd import spans
from zbmd.training.autograd.spans import Span
from zbmd.training.job.slow_ranks import NOTHING_IN_LOOPS, done_about, end_if_replaced, hosts_of, report
from zbmd.training.job.stragglers.delays import delay_path, wait_for_data
from zbmd.training.job.stragglers.machine import (
    TIMES,
    Entered,
    Stepped,
    StragglerAction,
    StragglerMachine,
)
from zbmd.training.job.stragglers.policy import OnStraggler
from zbmd.training.job.stragglers.samples import Sampler
from zbmd.training.ops.cuda.timing import Timer
from zbmd.training.profiler.profiler import Profiler, open_profiler
from zbmd.training.torch.durable.cuda_events import TorchEvents
from zbmd.training.torch.durable.operations import OpMode
from zbmd.training.torch.votes import samples_of
from zbmd.transport.errors import UserError
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")

ResultT = TypeVar("ResultT")

WATCHED: Final = (spans.FORWARD, spans.BACKWARD, spans.GRAD_CLIP, spans.OPTIMIZER)
"""The phases in which the script computes."""
TOGETHER_NS: Final = 240e6
"""Shorter steps are judged several at a time, one after the other: a step has filled the caches, so the first
judgement takes 0.6 ms, and the next ones 0.13 ms."""
TOGETHER_MAX: Final = 16
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

    out: has the profile; None: nothing is written. profile_ops: the ops of each so-many-th step are sampled.
    """

    def __init__(
        self, worker: Worker, out: Path | None, on_straggler: OnStraggler, profile_ops: int = 0
    ) -> None:
        self._worker, self._on_straggler, self._ops_every = worker, on_straggler, profile_ops
        self._delay = "" if out is None else os.fspath(delay_path(out, worker.rank))
        launched = RankEnvironment.read(os.environ)
        self._out, self._ranks_per_host = out, 1 if launched is None else launched.ranks_per_host
        self._profiler: Profiler | None = None
        self._machine = StragglerMachine()
        self._sampler: Sampler | None = None
        self._reports, self._thread = False, 0
        self._phase: Span | None = None
        self._ops: OpMode | None = None
        """Watches the ops, if any step is sampled."""
        self._phases = ScriptPhases(self)
        self._since_ns = self._step = 0
        self._begun = False
        self._actions: list[StragglerAction] = []
        self._unjudged: list[Stepped] = []
        """Steps whose samples are here, and that are judged with the next ones."""
        self._unjudged_ns = 0.0
        self.sample: tuple[float, ...] = ()
        """Of the step before the one under way, for the vote."""

    def enter(self, group: Group, passes: tuple[int, ...]) -> None:
        """Go on with these ranks; the first step is not measured. passes: of a step, of each rank."""
        self._leave()
        if self._profiler is None:
            timer = Timer(TorchEvents(), 0) if self._ops_every and torch.cuda.is_initialized() else None
            self._profiler = open_profiler(
                self._out, None, sequences=1, ops_every=self._ops_every, timer=timer
            )
            self._ops = OpMode(self._profiler.sampler) if self._ops_every else None
            self._phases.install()
        self._profiler.follow(*(each.made for each in CONTINUITY.groups))
        ranks = tuple(group.members)
        hosts = hosts_of(self._worker, ranks)
        self._machine.handle(Entered(ranks=ranks, shards=passes, alike=(0,) * len(ranks), hosts=hosts))
        self._reports, self._thread = group.rank == 0, threading.get_ident()
        if group.size > 1:
            links = len({rank // self._ranks_per_host for rank in ranks}) > 1
            self._sampler = Sampler(self._worker.incarnation, links=links)
        WAITS.is_on = True
        WAITS.take()

    def _leave(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._watch(None)
        self._sampler, self._phase, self._begun, self._step = None, None, False, 0
        self.sample, self._actions = (), []
        self._unjudged, self._unjudged_ns = [], 0.0

    def close(self) -> None:
        """Measure no longer, and close the profile. Idempotent."""
        WAITS.is_on = False
        self._phases.remove()
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
        self._watch(span)
        self._phase, self._since_ns = span, now

    def _watch(self, span: Span | None) -> None:
        """Watch the ops of a phase, if it is the script's and the step is sampled."""
        if self._ops is not None and self._profiler is not None:
            self._ops.watch(is_on=self._profiler.samples and span in WATCHED)

    def part(self, span: Span, call: Callable[[], ResultT]) -> ResultT:
        """Make a part of the script's computation, which is a phase of its own."""
        if self._phase is not spans.FORWARD or threading.get_ident() != self._thread:
            return call()
        self.phase(span)
        try:
            return call()
        finally:
            if self._phase is span:
                self.phase(spans.FORWARD)

    def voted(self, step: int, rows: Sequence[bytes]) -> None:
        """All ranks of this view have voted for `step`, with these votes. Raises `RemoteProtocolError`."""
        if self._sampler is None:
            return
        samples = samples_of(rows)
        self._unjudged.append(Stepped(step, samples))
        self._unjudged_ns += float(samples[:, TIMES].sum(axis=1).max())
        if self._unjudged_ns >= TOGETHER_NS or len(self._unjudged) >= TOGETHER_MAX:
            steps, self._unjudged, self._unjudged_ns = self._unjudged, [], 0.0
            self._actions = [action for each in steps for action in self._machine.handle(each)]

    def stepped(self) -> None:
        """The step has ended: report who is slow, and do what is asked for; a replaced rank ends here."""
        actions, self._actions, profiler = self._actions, [], self._profiler
        for action in actions:
            done = done_about(action, self._on_straggler, NOTHING_IN_LOOPS)
            if self._reports and profiler is not None:
                report(self._worker, profiler, action, done)
            end_if_replaced(self._worker, action, done)


class ScriptPhases:
    """Parts of a script's step that PyTorch knows: the backward pass, and the clipping of gradients.

    Its functions note them while a loop goes on: `Tensor.backward` and what frameworks call look them up by
    these names. The parts of `clip_grad_norm_` are noted, since scripts have imported that itself.
    """

    def __init__(self, slow: SlowLoopRanks) -> None:
        clip: Any = importlib.import_module("torch.nn.utils.clip_grad")
        self._slow = slow
        self._parts = (
            (torch.autograd, "backward", spans.BACKWARD),
            (clip, "_get_total_norm", spans.GRAD_CLIP),
            (clip, "_clip_grads_with_norm_", spans.GRAD_CLIP),
        )
        self._made: list[tuple[Any, str, Any, Any]] = []
        """Module, name, what it was, and what it is meanwhile."""

    def install(self) -> None:
        """Note them from now on."""
        for module, name, span in self._parts:
            call = getattr(module, name, None)  # private names may go
            if call is not None:
                noted = self._noted(call, span)
                setattr(module, name, noted)
                self._made.append((module, name, call, noted))

    def _noted(self, call: Callable[..., Any], span: Span) -> Callable[..., Any]:
        slow, is_compiling = self._slow, torch.compiler.is_compiling

        @functools.wraps(call)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return call(*args, **kwargs)
            return slow.part(span, lambda: call(*args, **kwargs))

        return noted

    def remove(self) -> None:
        """Note them no longer. Idempotent."""
        for module, name, call, noted in self._made:
            if getattr(module, name) is noted:  # and nobody has put something of its own there
                setattr(module, name, call)
        self._made.clear()
