"""Targets of what a profiled run leaves behind: the lines of its steps, and the rings of its spans."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import numpy as np

from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.tools.runs.profile import table_of
from zbmd.training.pipeline.program import (
    ScheduleError,
    ScheduleFlawed,
    Shape,
    format_program,
    parse_programs,
)
from zbmd.training.pipeline.rings import RingOffer, decode_offers, encode_offers
from zbmd.training.pipeline.schedules import programs_of
from zbmd.training.pipeline.simulate import Costs, simulate
from zbmd.training.pipeline.verifier import verify
from zbmd.training.profiler.lines import (
    IDLE,
    VERSION,
    Overlap,
    RunLine,
    StepLine,
    UnitLine,
    lines_path,
    read_profiles,
)
from zbmd.training.profiler.peak import MachineDescription, decode_peaks
from zbmd.training.profiler.ring import (
    MAGIC,
    RECORD,
    RING_AT,
    RING_BYTES,
    GroupLine,
    OperationLine,
    decode_ring,
)
from zbmd.training.profiler.summary import summary_of
from zbmd.transport.errors import RemoteProtocolError, UserError
from zbmd.transport.memory.region import RegionHandle

# ---- pipelines: programs as text, and the rings that a stage offers


def _offers(data: bytes) -> None:
    found = decode_offers(data, 1)
    offers = [RingOffer(*boundary, handle) for boundary, handle in found.items()]
    if decode_offers(encode_offers(offers), 1) != found:
        raise Broken(f"{found}")


def _offer_seeds() -> tuple[bytes, ...]:
    handle = RegionHandle(slot=1, incarnation=2, offset=4096, nbytes=1024, writable=True)
    return (encode_offers([RingOffer(False, 1, handle), RingOffer(True, 0, handle)]),)


def _pipeline(data: bytes) -> None:
    programs = parse_programs(data.decode(errors="replace"))
    if parse_programs("".join(map(format_program, programs))) != programs:
        raise Broken(f"{programs}")
    shape = programs[0].shape
    verify(programs, activations_max=(shape.chunks * shape.microbatches,) * len(programs))
    costs = Costs.even(shape.parts, forward=1, input_gradient=1, weight_gradient=1, transfer=1)
    timeline = simulate(programs, costs)
    if timeline.makespan < max(timeline.busy):
        raise Broken(f"{timeline}")


def _seeds() -> tuple[bytes, ...]:
    shapes = (("1f1b", 2, 2, 2), ("zb-h1", 3, 1, 3), ("gpipe", 1, 2, 1))
    return tuple(
        "".join(map(format_program, programs_of(name, Shape(stages=p, chunks=v, microbatches=m)))).encode()
        for name, p, v, m in shapes
    )


PIPELINES_TARGETS = (
    Target(
        name="pipeline",
        what="the programs of a pipeline's stages as text",
        allowed=(ScheduleError, ScheduleFlawed),
        seeds=_seeds,
        run=_pipeline,
    ),
    Target(
        name="pipeline.rings",
        what="where a stage says that its rings lie",
        allowed=(RemoteProtocolError,),
        seeds=_offer_seeds,
        run=_offers,
    ),
)
"""Targets of the training layer's pipelines."""


BETWEEN = b"\nring\n"
"""Between the text and the ring of a seed, so that mutations need not find their way through zeros."""
MACHINE = MachineDescription(processor="p", processors=2, blas="b")
RUN = RunLine(
    version=VERSION,
    rank=0,
    incarnation=1,
    world_size=1,
    host="h",
    boot_id="b",
    pid=1,
    monotonic_ns=1,
    unix_ns=2,
    ranks_on_host=1,
    machine=MACHINE,
    peak=1e9,
    units=(UnitLine("embed", 0, 0, 0, 0), UnitLine("head", 2, 0, 4, 0)),
)
STEP = StepLine(
    step=1,
    begin_ns=10,
    end_ns=20,
    ns={"forward": 4, "comm": 2, IDLE: 4},
    unit_ns={"forward": (1, 3)},
    passes={"forward": (1, 1)},
    flops=2,
    hardware_flops=2,
    overlap=Overlap(under_way_ns=4, waited_ns=2, hidden_ns=1),
)


def _lines(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="zbmd-fuzz-") as made:
        path = lines_path(Path(made), 0, 1)
        path.parent.mkdir()
        path.write_bytes(data)
        table_of(summary_of(read_profiles(Path(made)), lambda machine: None))


def _line_seeds() -> tuple[bytes, ...]:
    run, step = msgspec.json.encode(RUN), msgspec.json.encode(STEP)
    return (b"\n".join((run, step, step, run, step, b"")), run)


def _ring(data: bytes) -> None:
    text, _, ring = data.partition(BETWEEN)
    decode_ring(text.ljust(RING_AT, b"\0")[:RING_AT] + ring.ljust(RING_BYTES, b"\0")[:RING_BYTES], "ring")


def _ring_seeds() -> tuple[bytes, ...]:
    lines = (RUN, GroupLine(channel=0, epoch=1, members=(0,)), OperationLine(name="all_reduce"))
    text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
    records = np.zeros(2, RECORD)
    records["begin_ns"], records["end_ns"], records["track"] = 5, 9, (0, 1)
    ring = len(records).to_bytes(8, "little") + records.tobytes()
    return (MAGIC + len(text).to_bytes(8, "little") + text + BETWEEN + ring,)


def _peaks(data: bytes) -> None:
    decode_peaks(data)


TARGETS = (
    *PIPELINES_TARGETS,
    Target(
        name="profile.lines",
        what="the lines of a profiled rank, and their table",
        allowed=(UserError,),
        seeds=_line_seeds,
        run=_lines,
    ),
    Target(
        name="profile.spans",
        what="the spans of a profiled rank",
        allowed=(UserError,),
        seeds=_ring_seeds,
        run=_ring,
    ),
    Target(
        name="profile.peaks",
        what="the peaks of machines that were measured before",
        allowed=(),
        seeds=lambda: (
            msgspec.json.encode([{"machine": msgspec.to_builtins(MACHINE), "flops_per_s": 1e11}]),
        ),
        run=_peaks,
    ),
)
