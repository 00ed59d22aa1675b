"""zbmd: an asyncio message-passing protocol stack for training jobs that must not die.

import zbmd

async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        total = await group.all_reduce(numpy.ones(4))

zbmd.run(main())
"""

from __future__ import annotations

import importlib
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from zbmd.actors.cluster.session_routes import connect
    from zbmd.actors.contracts import Contract
    from zbmd.actors.core.actor import on
    from zbmd.actors.core.ref import Down, Exited, Ref, Undelivered
    from zbmd.actors.errors import ActorFailed, DeadActor, MailboxFull, UpgradeRefused, UpgradeUndone
    from zbmd.actors.rank.member import Worker, join
    from zbmd.actors.session import Session
    from zbmd.actors.supervision.events import BackOff, Restart, Strategy
    from zbmd.actors.supervision.supervisor import ChildSpec
    from zbmd.actors.system import Actor, ActorSystem
    from zbmd.collectives.blocking_worker import (
        BlockingElasticGroup,
        BlockingGroup,
        BlockingWorker,
        init,
    )
    from zbmd.collectives.elastic.group import ElasticGroup, elastic_group
    from zbmd.collectives.errors import InputsOverwritten, NotReplaced, OperationAborted
    from zbmd.collectives.group.group import Group, group
    from zbmd.training.model_actors.layer_actor import LayerActor
    from zbmd.training.model_actors.model_actors import ModelActors, SupervisorActor
    from zbmd.training.model_actors.operator_actor import OperatorActor
    from zbmd.training.model_actors.slot import ActorSlot, RestartsExhausted, SlotActor
    from zbmd.training.model_actors.tensor_actor import OptimizerActor, TensorActor
    from zbmd.transport.errors import DeadlineExceeded, PeerLost, UserError, ZbmdError
    from zbmd.transport.memory.arena import empty, from_array

__version__ = "0.1.0"

__all__ = [
    "Actor",
    "ActorFailed",
    "ActorSystem",
    "BackOff",
    "BlockingElasticGroup",
    "BlockingGroup",
    "BlockingWorker",
    "ChildSpec",
    "Contract",
    "DeadActor",
    "DeadlineExceeded",
    "Down",
    "Exited",
    "ElasticGroup",
    "RestartsExhausted",
    "Group",
    "InputsOverwritten",
    "LayerActor",
    "MailboxFull",
    "ModelActors",
    "Worker",
    "NotReplaced",
    "OperationAborted",
    "OperatorActor",
    "OptimizerActor",
    "PeerLost",
    "Ref",
    "Restart",
    "ActorSlot",
    "SlotActor",
    "Session",
    "Strategy",
    "SupervisorActor",
    "TensorActor",
    "Undelivered",
    "UpgradeRefused",
    "UpgradeUndone",
    "UserError",
    "ZbmdError",
    "__version__",
    "connect",
    "elastic_group",
    "empty",
    "from_array",
    "group",
    "init",
    "join",
    "on",
    "run",
]

# A name is imported when it is first used: a tool that needs one layer does not load the others.
_HOMES = {
    "zbmd.actors.core.actor": ("on",),
    "zbmd.actors.core.ref": ("Down", "Exited", "Ref", "Undelivered"),
    "zbmd.actors.cluster.session_routes": ("connect",),
    "zbmd.actors.contracts": ("Contract",),
    "zbmd.actors.errors": ("ActorFailed", "DeadActor", "MailboxFull", "UpgradeRefused", "UpgradeUndone"),
    "zbmd.actors.rank.member": ("Worker", "join"),
    "zbmd.actors.session": ("Session",),
    "zbmd.actors.supervision.events": ("BackOff", "Restart", "Strategy"),
    "zbmd.actors.supervision.supervisor": ("ChildSpec",),
    "zbmd.actors.system": ("Actor", "ActorSystem"),
    "zbmd.collectives.elastic.group": ("ElasticGroup", "elastic_group"),
    "zbmd.collectives.errors": ("InputsOverwritten", "NotReplaced", "OperationAborted"),
    "zbmd.collectives.blocking_worker": (
        "BlockingElasticGroup",
        "BlockingGroup",
        "BlockingWorker",
        "init",
    ),
    "zbmd.collectives.group.group": ("Group", "group"),
    "zbmd.training.model_actors.layer_actor": ("LayerActor",),
    "zbmd.training.model_actors.model_actors": ("ModelActors", "SupervisorActor"),
    "zbmd.training.model_actors.operator_actor": ("OperatorActor",),
    "zbmd.training.model_actors.slot": ("RestartsExhausted", "ActorSlot", "SlotActor"),
    "zbmd.training.model_actors.tensor_actor": ("OptimizerActor", "TensorActor"),
    "zbmd.transport.errors": ("DeadlineExceeded", "PeerLost", "UserError", "ZbmdError"),
    "zbmd.transport.memory.arena": ("empty", "from_array"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_ResultT = TypeVar("_ResultT")


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


def run(main: Coroutine[Any, Any, _ResultT]) -> _ResultT:
    """Run a coroutine to its end on a new uvloop event loop, as `asyncio.run` does.

    What zbmd has to warn of goes to standard error, unless the program has set structlog up itself.
    """
    importlib.import_module("zbmd.actors.process.log").log_to_stderr()
    uvloop = importlib.import_module("uvloop")
    result: _ResultT = uvloop.run(main)
    return result
