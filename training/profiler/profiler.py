"""The profiler of one rank: records spans per step and writes their sums to the run's directory.

It is always on unless ZBMD_PROFILE is `off`: a span costs about 0.2 µs, and a step's line about 20 µs. A
write that fails is logged once and ends the profile, but not the run.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from zbmd.actors.cluster.local_deaths import boot_id, started
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.group.group import Group
from zbmd.training.autograd._spans import CATEGORIES, PER_UNIT, SpanRecorder
from zbmd.training.autograd.op_watch import watching
from zbmd.training.autograd.spans import Span
from zbmd.training.model.gpt import GPT
from zbmd.training.profiler import metrics
from zbmd.training.profiler.lines import (
    IDLE,
    LINES_BYTES_MAX,
    VERSION,
    ActivationPeak,
    CutLine,
    Death,
    Line,
    OpsLine,
    Overlap,
    RunLine,
    StepLine,
    StragglerLine,
    UnitLine,
    lines_path,
    old_path,
)
from zbmd.training.profiler.operations import OpSampler
from zbmd.training.profiler.peak import device_machine, known, this_machine
from zbmd.training.profiler.ring import (
    RING_BYTES,
    GroupLine,
    OperationLine,
    RingFile,
    forget_rings,
    ring_path,
)
from zbmd.transport.cuda.api import CudaFault
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from zbmd.training.autograd._spans import EndedStep
    from zbmd.training.ops.cuda.executor import Executor
    from zbmd.training.ops.cuda.timing import Timer


TABLES = frozenset({"embed.weight", "positions.weight"})
"""Parameters that the first unit looks up; in a tied head the first of them is a matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFlops:
    """The FLOPs of one pass of a unit over one logical shard, on this rank.

    `attention`: the part of `forward` that is attention. `again`: what the backward pass recomputes by
    itself, the scores of attention.
    """

    name: str
    forward: int
    attention: int
    backward: int
    again: int


def unit_flops(model: GPT, *, sequences: int, length: int) -> tuple[UnitFlops, ...]:
    """Return the FLOPs of each unit of `model` (embedding, blocks, head), for `sequences` of `length` tokens.

    For a model that is divided over ranks, those of this rank's part: `model.layout` defines it. A product of
    (m, k) by (k, n) has 2 m k n; the backward pass has two of that size for each. Causal attention computes
    each pair of a query and an earlier or equal key, T (T + 1) / 2 of them: two products forwards, four
    backwards. Norms, activations, softmax and table look-ups are not counted, as in A. Chowdhery and others,
    "PaLM: Scaling Language Modeling with Pathways", 2022, arXiv:2204.02311, appendix B, which counts all T²
    pairs.
    """
    slots, rows, last = model.layout.slots, sequences * length, model.config.layers + 1
    made: list[UnitFlops] = []
    for number, name in enumerate(model.unit_names):
        shapes = {slots[index].name: slots[index].shape for index in model.unit_parameters(number)}
        linear = sum(
            2 * rows * shape[0] * shape[1]
            for one, shape in shapes.items()
            if len(shape) == 2 and (number == last or one not in TABLES)
        )
        packed = shapes.get(f"{name}.attn.qkv.weight", (0, 0))[1]
        product = 2 * sequences * (length * (length + 1) // 2) * (packed // 3)
        made.append(
            UnitFlops(
                name=name,
                forward=linear + 2 * product,
                attention=2 * product,
                backward=2 * linear + 4 * product,
                again=product,
            )
        )
    return tuple(made)


_NO_WATCH: Final = nullcontext()
log: Final = structlog.stdlib.get_logger("zbmd.training.profiler")

VARIABLE: Final = "ZBMD_PROFILE"


class Profiler:
    """Profiles the rank of `run` into `directory`/profile; without files if `directory` is None.

    For one thread at a time: the one that is in `recording()`, and others between its spans. ops_every: the
    ops of each so-many-th step are sampled; 0: of none. timer: of the device that computes, if one does.
    """

    def __init__(
        self, directory: Path | None, run: RunLine, *, ops_every: int = 0, timer: Timer | None = None
    ) -> None:
        self.run = run
        self.last: StepLine | None = None
        """The step that ended last."""
        self._held: ActivationPeak | None = None
        self._records_metrics = directory is not None
        self._followed: dict[int, tuple[int, Group]] = {}
        self._file: RingFile | None = None
        self._lines: int | None = None
        self._path = Path()
        self._size = 0
        if directory is not None:
            self._open(directory)
            metrics.record_to(directory)
        buffer = bytearray(RING_BYTES) if self._file is None else self._file.ring
        self._recorder = SpanRecorder(buffer, len(run.units))
        self._named = 0
        self._ops_every = ops_every if directory is not None else 0
        self.sampler = OpSampler(self._recorder, timer)
        self.samples = False
        """Whether the step under way is sampled."""
        self._sampled: int | None = None
        """The step whose ops are to be written, once a device has done them."""

    def _open(self, directory: Path) -> None:
        self._path = lines_path(directory, self.run.rank, self.run.incarnation)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = _appended(self._path)
            self._size = os.fstat(self._lines).st_size
            forget_rings(directory, self.run.rank, self.run.incarnation)
            self._file = RingFile(ring_path(directory, self.run.rank, self.run.incarnation))
            self._file.put(self.run)
        except OSError as error:
            self._give_up(error)
        self._put(self.run)

    def recording(self) -> AbstractContextManager[None]:
        """Attribute the spans of the current thread to this rank, within the context."""
        return self._recorder.recording()

    def follow(self, *groups: Group | None) -> None:
        """Record the operations of these groups from now on, and of no others; cheap if none is new."""
        wanted = {id(group): group for group in groups if group is not None}
        if wanted.keys() == self._followed.keys():
            return
        for key in self._followed.keys() - wanted.keys():
            self._recorder.forget(self._followed.pop(key)[0])
        for key in wanted.keys() - self._followed.keys():
            group = wanted[key]
            number = self._recorder.follow(group.communicator.flight.ring)
            self._followed[key] = number, group
            if number >= 0 and self._file is not None:
                channel, members = group.communicator.channel, tuple(group.members)
                self._file.put(GroupLine(channel=channel, epoch=group.epoch, members=members))

    def begin_step(self, step: int) -> StepLine | None:
        """Begin step `step`; return the line of the step that this ends, if any."""
        line = self._take(self._recorder.begin_step(step))
        if self._ops_every and step % self._ops_every == 0:
            self._put_ops(waits=True)
            self.samples = True
            self.sampler.start([group.communicator.flight for _, group in self._followed.values()])
        return line

    def operations(self) -> AbstractContextManager[None]:
        """Enter the result around the computation of a step; its ops are watched if the step is sampled."""
        return watching(self.sampler) if self.samples else _NO_WATCH

    def end_step(self) -> StepLine | None:
        """End the step without beginning another; return its line."""
        return self._take(self._recorder.end_step())

    def add(self, span: Span, begin_ns: int, end_ns: int) -> None:
        """Add a span of another thread, from a time when no span was open here."""
        self._recorder.add(span.category, begin_ns, end_ns)

    def cut(self, at_ns: int, deaths: Sequence[Death]) -> None:
        """Note that the step under way ended at `at_ns`, without its result, because of `deaths`."""
        self._put(CutLine(at_ns=at_ns, deaths=tuple(deaths)))

    def straggler(self, line: StragglerLine) -> None:
        """Note that a rank of the run is slow, or is no longer."""
        self._put(line)

    def held(self, most: ActivationPeak | None) -> None:
        """Set the peak of activations of the current step."""
        self._held = most

    def mfu(self, line: StepLine) -> float | None:
        """Return the model FLOPs utilisation of a step on this rank: a fraction of its share of the peak, or
        None.
        """
        if self.run.peak is None or line.wall_ns == 0:
            return None
        return line.flops / (line.wall_ns / 1e9 * self.run.peak)

    def close(self) -> None:
        """End the step and close the files. Idempotent."""
        with suppress(CudaFault):  # of a device that has failed nothing more is known
            self.end_step()
            self._put_ops(waits=True)
        if self._records_metrics:
            self._records_metrics = False
            metrics.stop()
        self._recorder.release()
        if self._file is not None:
            self._file.close()
            self._file = None
        self._close_lines()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, ended: EndedStep | None) -> StepLine | None:
        if ended is None:
            return None
        line = step_line(ended, self.run.units, self._held)
        self._held, self.last = None, line
        self._put(line)
        if self.samples:
            self.samples, self._sampled = False, line.step
            self.sampler.end()
        self._put_ops(waits=False)
        if self._file is not None:
            for name in self._recorder.names[self._named :]:
                self._file.put(OperationLine(name=name))
            self._named = len(self._recorder.names)
        return line

    def _put_ops(self, *, waits: bool) -> None:
        """Write the ops of the last sampled step, if that has not been done and the device is done with it.

        waits: for the device, since its events are needed again. Raises `CudaFault`.
        """
        if self._sampled is not None and (waits or self.sampler.is_done):
            step, self._sampled = self._sampled, None
            self._put(OpsLine(step=step, ops=self.sampler.rows()))

    def _put(self, line: Line) -> None:
        if self._lines is None:
            return
        data = msgspec.json.encode(line) + b"\n"
        try:
            if self._size + len(data) > LINES_BYTES_MAX:
                self._begin_file()
            os.write(self._lines, data)
            self._size += len(data)
        except OSError as error:
            self._give_up(error)

    def _begin_file(self) -> None:
        self._close_lines()
        os.replace(self._path, old_path(self._path))
        self._lines = _appended(self._path)
        self._size = os.write(self._lines, msgspec.json.encode(self.run) + b"\n")

    def _close_lines(self) -> None:
        if self._lines is not None:
            os.close(self._lines)
            self._lines = None

    def _give_up(self, error: OSError) -> None:
        # Not a warning: a run on a full disk reports that itself, or continues without a profile.
        log.info("profiling stopped: cannot write", path=str(self._path), error=str(error))
        self._close_lines()


def step_line(ended: EndedStep, units: tuple[UnitLine, ...], held: ActivationPeak | None = None) -> StepLine:
    """Return the line of a step, whose passes were of `units`."""
    step, begin_ns, end_ns, totals, by_unit, overlap = ended
    ns = {name: total for name, total in zip(CATEGORIES, totals, strict=True) if total}
    ns[IDLE] = end_ns - begin_ns - sum(totals)
    unit_ns = {
        CATEGORIES[category]: tuple(times)
        for category, (times, _) in zip(PER_UNIT, by_unit, strict=True)
        if any(times)
    }
    passes = {
        CATEGORIES[category]: tuple(counts)
        for category, (_, counts) in zip(PER_UNIT, by_unit, strict=True)
        if any(counts)
    }
    flops = again = 0
    for unit, forward, backward, recompute in zip(units, *(counts for _, counts in by_unit), strict=True):
        flops += forward * unit.forward + backward * unit.backward
        again += backward * unit.again + recompute * unit.forward
    return StepLine(
        step=step,
        begin_ns=begin_ns,
        end_ns=end_ns,
        ns=ns,
        unit_ns=unit_ns,
        passes=passes,
        flops=flops,
        hardware_flops=flops + again,
        overlap=None if overlap is None else _overlap(overlap),
        held=held,
    )


def _overlap(told: tuple[int, int, int]) -> Overlap:
    under_way_ns, waited_ns, hidden_ns = told
    return Overlap(under_way_ns=under_way_ns, waited_ns=waited_ns, hidden_ns=hidden_ns)


def open_profiler(
    directory: Path | None,
    model: GPT | None,
    *,
    sequences: int,
    dtype: str = "float32",
    ops_every: int = 0,
    executor: Executor | None = None,
    timer: Timer | None = None,
    environ: Mapping[str, str] | None = None,
) -> Profiler:
    """Return the profiler of this rank, whose passes are of `model` over `sequences` of its context's length.

    directory: None: it writes no files. model: None: none whose operations are known. ops_every: see
    `Profiler`. executor: the device that computes, if one does. timer: of a device that another library
    computes on.

    Raises `UserError` for a ZBMD_PROFILE that is neither on nor off.
    """
    environ = os.environ if environ is None else environ
    wanted = environ.get(VARIABLE, "on")
    if wanted not in ("on", "off"):
        raise UserError(f'{VARIABLE} is "{wanted}": set it to "on" or "off".')
    launched = RankEnvironment.read(environ)
    ranks_on_host = 1 if launched is None else launched.ranks_per_host
    if executor is None:
        machine, sharing = this_machine(parallel=ranks_on_host, dtype=dtype, environ=environ), ranks_on_host
    else:
        machine, sharing = device_machine(executor.name, sharing=executor.sharing), executor.sharing
    peak = known(machine)
    run = RunLine(
        version=VERSION,
        rank=0 if launched is None else launched.rank,
        incarnation=1 if launched is None else launched.incarnation,
        world_size=1 if launched is None else launched.world_size,
        host=socket.gethostname()[:256],
        boot_id=boot_id(),
        pid=os.getpid(),
        monotonic_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
        process_ns=started(os.getpid()) * 1_000_000_000 // os.sysconf("SC_CLK_TCK"),
        ranks_on_host=ranks_on_host,
        machine=machine,
        peak=None if peak is None else peak.flops_per_s / sharing,
        units=() if model is None else _unit_lines(model, sequences),
        stream=None if peak is None or peak.bytes_per_s is None else peak.bytes_per_s / sharing,
    )
    timer = timer if executor is None else executor.timer
    return Profiler(directory if wanted == "on" else None, run, ops_every=ops_every, timer=timer)


def _unit_lines(model: GPT, sequences: int) -> tuple[UnitLine, ...]:
    return tuple(
        UnitLine(unit.name, unit.forward, unit.attention, unit.backward, unit.again)
        for unit in unit_flops(model, sequences=sequences, length=model.config.context)
    )


def _appended(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
