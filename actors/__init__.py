"""Actors: typed contracts, bounded mailboxes, references, supervision, upgrades, clusters.

This package imports `zbmd.transport` alone. Its public API is `__all__`: each name is imported when it is
first used. Inside, each package imports the packages before it: `core` (cells, references, systems, links),
`directory`, `routing`, `supervision` and `upgrade`, `hangs`, `system` (the core with its services), `replay`;
then hosts, ranks, process pools and clusters. Begin reading at `core/actor.py` and `system.py`.
"""

from __future__ import annotations

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals()):
    from zbmd.actors.cluster.node.client import connect as connect
    from zbmd.actors.contracts import Contract as Contract
    from zbmd.actors.core.actor import on as on
    from zbmd.actors.core.actor_base import MailboxSpec as MailboxSpec
    from zbmd.actors.core.actor_base import allow_remote_modules as allow_remote_modules
    from zbmd.actors.core.context import ActorClock as ActorClock
    from zbmd.actors.core.context import Deferred as Deferred
    from zbmd.actors.core.context import DeferredReply as DeferredReply
    from zbmd.actors.core.context import deadline_ns as deadline_ns
    from zbmd.actors.core.context import sender_process as sender_process
    from zbmd.actors.core.context import trace_id as trace_id
    from zbmd.actors.core.ref import Down as Down
    from zbmd.actors.core.ref import Exited as Exited
    from zbmd.actors.core.ref import Monitor as Monitor
    from zbmd.actors.core.ref import Reason as Reason
    from zbmd.actors.core.ref import ReasonKind as ReasonKind
    from zbmd.actors.core.ref import Ref as Ref
    from zbmd.actors.core.ref import Signal as Signal
    from zbmd.actors.core.ref import Undelivered as Undelivered
    from zbmd.actors.core.system import ActorInfo as ActorInfo
    from zbmd.actors.core.timers import Timer as Timer
    from zbmd.actors.directory.driver import GroupChange as GroupChange
    from zbmd.actors.directory.events import GroupNews as GroupNews
    from zbmd.actors.errors import ActorError as ActorError
    from zbmd.actors.errors import ActorFailed as ActorFailed
    from zbmd.actors.errors import ActorStartFailed as ActorStartFailed
    from zbmd.actors.errors import ChildExists as ChildExists
    from zbmd.actors.errors import ContractError as ContractError
    from zbmd.actors.errors import ContractMismatch as ContractMismatch
    from zbmd.actors.errors import DeadActor as DeadActor
    from zbmd.actors.errors import InvalidMessage as InvalidMessage
    from zbmd.actors.errors import MailboxFull as MailboxFull
    from zbmd.actors.errors import MailboxMemoryFull as MailboxMemoryFull
    from zbmd.actors.errors import MissingDeadline as MissingDeadline
    from zbmd.actors.errors import NameInUse as NameInUse
    from zbmd.actors.errors import NameTaken as NameTaken
    from zbmd.actors.errors import NoReply as NoReply
    from zbmd.actors.errors import NoSuchChild as NoSuchChild
    from zbmd.actors.errors import NotUnderstood as NotUnderstood
    from zbmd.actors.errors import StashFull as StashFull
    from zbmd.actors.errors import SystemStopped as SystemStopped
    from zbmd.actors.errors import TooManyPending as TooManyPending
    from zbmd.actors.errors import UnknownActorClass as UnknownActorClass
    from zbmd.actors.errors import UnknownContract as UnknownContract
    from zbmd.actors.errors import UpgradeRefused as UpgradeRefused
    from zbmd.actors.errors import UpgradeUndone as UpgradeUndone
    from zbmd.actors.hangs.loop_watch import HeldNotice as HeldNotice
    from zbmd.actors.process_pool.devices import CpuCore as CpuCore
    from zbmd.actors.process_pool.devices import Device as Device
    from zbmd.actors.process_pool.devices import DeviceSpec as DeviceSpec
    from zbmd.actors.process_pool.devices import DeviceWorker as DeviceWorker
    from zbmd.actors.process_pool.devices import ProcessPool as ProcessPool
    from zbmd.actors.process_pool.devices import cpu_cores as cpu_cores
    from zbmd.actors.process_pool.process_actor import NodeProcess as NodeProcess
    from zbmd.actors.process_pool.process_actor import node_child as node_child
    from zbmd.actors.rank.member import Worker as Worker
    from zbmd.actors.rank.member import join as join
    from zbmd.actors.session import Session as Session
    from zbmd.actors.supervision.events import AutoShutdown as AutoShutdown
    from zbmd.actors.supervision.events import BackOff as BackOff
    from zbmd.actors.supervision.events import Restart as Restart
    from zbmd.actors.supervision.events import Strategy as Strategy
    from zbmd.actors.supervision.supervisor import AddChild as AddChild
    from zbmd.actors.supervision.supervisor import Children as Children
    from zbmd.actors.supervision.supervisor import ChildrenFailed as ChildrenFailed
    from zbmd.actors.supervision.supervisor import ChildSpec as ChildSpec
    from zbmd.actors.supervision.supervisor import ChildUp as ChildUp
    from zbmd.actors.supervision.supervisor import DeleteChild as DeleteChild
    from zbmd.actors.supervision.supervisor import RestartChild as RestartChild
    from zbmd.actors.supervision.supervisor import Supervisor as Supervisor
    from zbmd.actors.supervision.supervisor import TerminateChild as TerminateChild
    from zbmd.actors.supervision.supervisor import WhichChildren as WhichChildren
    from zbmd.actors.system import Actor as Actor
    from zbmd.actors.system import ActorGroup as ActorGroup
    from zbmd.actors.system import ActorSystem as ActorSystem
    from zbmd.actors.upgrade.driver import Upgraded as Upgraded
