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
from typing import Any, TypeVar

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals(), "__version__", "run"):
    from zbmd.actors.cluster.node.client import connect as connect
    from zbmd.actors.contracts import Contract as Contract
    from zbmd.actors.core.actor import on as on
    from zbmd.actors.core.ref import Down as Down
    from zbmd.actors.core.ref import Exited as Exited
    from zbmd.actors.core.ref import Ref as Ref
    from zbmd.actors.core.ref import Undelivered as Undelivered
    from zbmd.actors.errors import ActorFailed as ActorFailed
    from zbmd.actors.errors import DeadActor as DeadActor
    from zbmd.actors.errors import MailboxFull as MailboxFull
    from zbmd.actors.errors import UpgradeRefused as UpgradeRefused
    from zbmd.actors.errors import UpgradeUndone as UpgradeUndone
    from zbmd.actors.rank.member import Worker as Worker
    from zbmd.actors.rank.member import join as join
    from zbmd.actors.session import Session as Session
    from zbmd.actors.supervision.events import BackOff as BackOff
    from zbmd.actors.supervision.events import Restart as Restart
    from zbmd.actors.supervision.events import Strategy as Strategy
    from zbmd.actors.supervision.supervisor import ChildSpec as ChildSpec
    from zbmd.actors.system import Actor as Actor
    from zbmd.actors.system import ActorSystem as ActorSystem
    from zbmd.collectives.blocking_worker import BlockingElasticGroup as BlockingElasticGroup
    from zbmd.collectives.blocking_worker import BlockingGroup as BlockingGroup
    from zbmd.collectives.blocking_worker import BlockingWorker as BlockingWorker
    from zbmd.collectives.blocking_worker import init as init
    from zbmd.collectives.elastic.group import ElasticGroup as ElasticGroup
    from zbmd.collectives.elastic.group import elastic_group as elastic_group
    from zbmd.collectives.errors import InputsOverwritten as InputsOverwritten
    from zbmd.collectives.errors import NotReplaced as NotReplaced
    from zbmd.collectives.errors import OperationAborted as OperationAborted
    from zbmd.collectives.group.group import Group as Group
    from zbmd.collectives.group.group import group as group
    from zbmd.training.model_actors.actors import ComputingActor as ComputingActor
    from zbmd.training.model_actors.actors import LayerActor as LayerActor
    from zbmd.training.model_actors.actors import OperatorActor as OperatorActor
    from zbmd.training.model_actors.actors import TensorActor as TensorActor
    from zbmd.training.model_actors.model_actors import ModelActors as ModelActors
    from zbmd.training.model_actors.model_actors import SupervisorActor as SupervisorActor
    from zbmd.training.model_actors.slot import ActorSlot as ActorSlot
    from zbmd.training.model_actors.slot import RestartsExhausted as RestartsExhausted
    from zbmd.training.model_actors.slot import SlotActor as SlotActor
    from zbmd.training.profiler import metrics as metrics
    from zbmd.transport.errors import DeadlineExceeded as DeadlineExceeded
    from zbmd.transport.errors import PeerLost as PeerLost
    from zbmd.transport.errors import UserError as UserError
    from zbmd.transport.errors import ZbmdError as ZbmdError
    from zbmd.transport.memory.arena import empty as empty
    from zbmd.transport.memory.arena import from_array as from_array

__version__ = "0.1.0"

_ResultT = TypeVar("_ResultT")


def run(main: Coroutine[Any, Any, _ResultT]) -> _ResultT:
    """Run a coroutine to its end on a new uvloop event loop, as `asyncio.run` does.

    Warnings go to standard error, unless the program has set structlog up itself.
    """
    importlib.import_module("zbmd.actors.process.log").log_to_stderr()
    uvloop = importlib.import_module("uvloop")
    result: _ResultT = uvloop.run(main)
    return result
