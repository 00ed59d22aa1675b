"""Targets of pipelines: programs as text, and the rings that a stage offers."""

from __future__ import annotations

from zbmd.tools.fuzzing.target import Broken, Target
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
from zbmd.transport.errors import RemoteProtocolError
from zbmd.transport.memory.region import RegionHandle


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


TARGETS = (
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
