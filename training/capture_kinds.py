"""The machines of this layer as kinds that can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zbmd.training.pipeline.program import StageProgram, format_program, parse_program
from zbmd.training.pipeline.stage import MessageOrder, StageMachine
from zbmd.training.pipeline.stage_events import StageAction, StageEvent
from zbmd.training.pipeline.storage import activations_peak
from zbmd.training.pipeline.verifier import verify
from zbmd.training.redundancy import machine as mirror
from zbmd.training.redundancy.machine import Mirror
from zbmd.training.zero import machine
from zbmd.training.zero.machine import ZeroStep
from zbmd.transport.capture.registry import ActionT, EventT, MachineKind, register
from zbmd.transport.capture.thread_tap import ThreadTap
from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.machine import Machine

if TYPE_CHECKING:
    from zbmd.actors.rank.member import Worker


def stage_config(programs: Sequence[StageProgram], stage: int) -> dict[str, Any]:
    """The arguments that make the like of a `StageMachine` that has taken no event yet."""
    return {"programs": [format_program(program) for program in programs], "stage": stage}


def _build_stage(config: Mapping[str, Any]) -> StageMachine:
    programs, stage = [parse_program(text) for text in config["programs"]], config["stage"]
    verify(programs, activations_max=[activations_peak(program) for program in programs])
    if not 0 <= stage < len(programs):
        raise LocalProtocolError(f"there is no stage {stage} among {len(programs)}")
    return StageMachine(programs, stage)


STAGE: MachineKind[StageEvent, StageAction] = register(
    "pipeline-stage",
    1,
    _build_stage,
    events=StageEvent,
    actions=StageAction,
    states=(StageMachine, MessageOrder),
)


def mirror_config(machine: Mirror, *, outlives: bool = False) -> dict[str, Any]:
    """The arguments that make the like of a `Mirror` that has taken no event yet."""
    return {
        "place": machine.place,
        "ranks": machine.ranks,
        "known": machine.known,
        "own": list(machine.own),
        "outlives": outlives,
    }


def _build_mirror(config: Mapping[str, Any]) -> Mirror:
    first, second = config["own"]
    return Mirror(
        place=config["place"],
        ranks=config["ranks"],
        known=config["known"],
        own=(first, second),
        outlives=config["outlives"],
    )


MIRROR: MachineKind[mirror.Event, mirror.Action] = register(
    "mirror", 1, _build_mirror, events=mirror.Event, actions=mirror.Action, states=(Mirror,)
)


def _build_zero(config: Mapping[str, Any]) -> ZeroStep:
    return ZeroStep(stage=config["stage"], units=config["units"], prefetch=config["prefetch"])


ZERO_STEP: MachineKind[machine.Event, machine.Action] = register(
    "zero-step", 1, _build_zero, events=machine.Event, actions=machine.Action, states=(ZeroStep,)
)


def recorded(
    worker: Worker,
    kind: MachineKind[EventT, ActionT],
    name: str,
    machine: Machine[EventT, ActionT],
    config: Mapping[str, Any],
) -> ThreadTap[EventT, ActionT]:
    """`machine`, for the thread that trains, recorded if the process of `worker` writes a log.

    As the operations of a group, it costs too much for the ring in memory that is always there.
    """
    loop = worker.system.loop
    return ThreadTap(worker.capture.whole, kind, name, machine, config, post=loop.call_soon_threadsafe)
