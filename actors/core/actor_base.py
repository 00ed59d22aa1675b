"""Actor classes as the runtime sees them: their handlers and bounds, and which of them peers may spawn.

`ActorBase` is the part of `zbmd.actors.core.actor.Actor` that a cell runs. The rest of `Actor` is what its
author calls, which stands on the whole of the core.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, overload

from zbmd.actors.contracts import Contract, fingerprint, older_versions, renewed
from zbmd.actors.core.context import DeferredReply
from zbmd.actors.core.ref import Reason, Signal
from zbmd.actors.errors import ContractError, UnknownActorClass
from zbmd.transport.errors import LocalProtocolError

MAILBOX_MESSAGES = 1024
MAILBOX_MESSAGES_MAX = 1_048_576
MAILBOX_BYTES = 256 << 20
"""Default bound of the bytes that wait in all mailboxes of one system together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxSpec:
    """The bound of a mailbox: so many messages wait, and as many may be stashed.

    Full, the mailbox makes a local sender wait and refuses a remote one with `MailboxFull`. A message of a
    contract that is declared `telemetry=True` takes the place of the oldest one of such a contract instead
    and, if there is none, is dropped itself.
    """

    capacity: int = MAILBOX_MESSAGES

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MAILBOX_MESSAGES_MAX:
            raise LocalProtocolError(f"mailbox capacity {self.capacity}: give 1..{MAILBOX_MESSAGES_MAX}")


STOPPING_S = 5.0


ActorT = TypeVar("ActorT", bound="ActorBase")
MessageT = TypeVar("MessageT", bound="Contract | Signal")
ReplyT = TypeVar("ReplyT", bound="Contract | DeferredReply | None")
HandlerOf = Callable[[ActorT, MessageT], Awaitable[ReplyT]]


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class PooledMark(Protocol):
    """Decorator that marks a plain function as the handler of a message."""

    def __call__(self, function: FunctionT, /) -> FunctionT:
        """Return the function itself."""
        ...


@overload
def on(
    message: type[MessageT],
) -> Callable[[HandlerOf[ActorT, MessageT, ReplyT]], HandlerOf[ActorT, MessageT, ReplyT]]: ...


@overload
def on(message: type[Contract], *, pool: Literal["thread", "process"]) -> PooledMark: ...


def on(message: type[Any], *, pool: Literal["thread", "process"] | None = None) -> Callable[..., Any]:
    """Mark an async method as the handler of one contract or signal.

    The return annotation declares the reply: a contract, None, or a union. With `DeferredReply` in it, the
    handler may defer the reply (`Actor.defer`, `Actor.stash`).

    pool: for handlers that compute. "thread": a plain method, called in a thread; it has the actor for itself
    and must not use the loop, other actors or `clock`. "process": a static method (`@staticmethod` above
    `@on`) of an importable class, called with the message in another process. The next message waits.
    """

    def mark(function: Any) -> Any:
        function.__zbmd_handles__ = message
        if pool is not None:
            function.__zbmd_pool__ = pool
        return function

    return mark


class Handler(NamedTuple):
    """One entry of an actor class's dispatch table."""

    function: Callable[[Any, Any], Awaitable[Any]]
    replies: frozenset[type]
    puts_off: bool
    """Whether it may return `DeferredReply`."""


class ActorBase:
    """The part of an actor that its cell runs: handlers, bounds, and the hooks at its start and end."""

    captured: ClassVar[bool] = True
    """Whether it is recorded where a recorder is attached. False if it only forwards."""

    trap_exit: ClassVar[bool] = False
    """Receive `Exited` when a linked actor ends, instead of ending too."""
    mailbox: ClassVar[MailboxSpec] = MailboxSpec()
    """Bounds of the mailbox, unless `spawn` gives others."""
    stopping_s: float = STOPPING_S
    """Time limit of `stopping()`, seconds."""
    version: ClassVar[int] = 1
    """Version of its code, set by `class Counter(Actor, version=2)`. See `code_change`."""
    progress_deadline_s: ClassVar[float | None] = None
    """Time for which a handler may await one thing before it is reported, s; None: the process's."""

    _handlers: ClassVar[dict[type, Callable[[Any, Any], Awaitable[Any]]]] = {}
    _table: ClassVar[Mapping[type, Handler] | None] = None
    _cell: Any = None
    """The `ActorCell` that runs it, once it is spawned."""

    def __init_subclass__(cls, *, remote: bool = False, version: int | None = None, **kwargs: Any) -> None:
        """Register the handlers of a class. remote: other processes may spawn it; version: of its code."""
        super().__init_subclass__(**kwargs)
        if version is not None:
            cls.version = version
        cls._table = None
        cls._handlers = {}
        for base in reversed(cls.__mro__):
            for value in vars(base).values():
                function = value.__func__ if isinstance(value, staticmethod) else value
                message = getattr(function, "__zbmd_handles__", None)
                if message is not None:
                    cls._handlers[message] = function
        if remote:
            register_remote(cls)

    async def started(self) -> None:
        """Run once, before the first message. If it raises, `spawn` raises `ActorStartFailed`."""

    async def stopping(self, reason: Reason) -> None:
        """Run once, after the last message, also after a crash; limited to `stopping_s` seconds."""

    @property
    def is_alive(self) -> bool:
        """Return whether it has not ended."""
        alive: bool = self._cell.is_alive
        return alive

    # Changes of code: see `ActorSystem.upgrade`.

    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Convert the attributes of `from_version` to this version, when a living actor is upgraded.

        A class that overrides it overrides `code_change_back`, too.
        """
        return state

    @classmethod
    def code_change_back(cls, state: dict[str, Any], to_version: int) -> dict[str, Any]:
        """Convert the attributes of this version back to `to_version`, when this one crashed on probation."""
        return state

    def code_state(self) -> dict[str, Any]:
        """Return a copy of its attributes, which is restored if a new version crashes in the next message.

        Called before each message while a new version is on probation. Override it if deep copies of the
        attributes are impossible: the copy must not change when the actor changes its state.
        """
        cell = self._cell
        apart = {id(one): one for one in (self, cell, cell.system, cell.system.loop)}
        return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_cell"}, apart)


def handler_table(cls: type[ActorBase]) -> Mapping[type, Handler]:
    """Return the dispatch table of an actor class, made at its first spawn. Raises `ContractError`."""
    if cls._table is None:
        table: dict[type, Handler] = {}
        for message, function in cls._handlers.items():
            replies = _reply_types(cls, function)
            runs = pooled(cls, function) if hasattr(function, "__zbmd_pool__") else function
            table[message] = Handler(runs, replies - {DeferredReply}, DeferredReply in replies)
        for contract in {*table, *(reply for handler in table.values() for reply in handler.replies)}:
            if issubclass(contract, Contract):
                fingerprint(contract)  # raises here, not in a peer
        for contract in [c for c in table if issubclass(c, Contract)]:
            for older in older_versions(contract):
                table.setdefault(older, _renewing(contract, table[contract]))
        cls._table = table
    return cls._table


def _renewing(contract: type[Contract], handler: Handler) -> Handler:
    """Return a handler of an older version of `contract`, which `contract` says that it stands for."""

    async def run(actor: Any, message: Contract) -> Any:
        return await handler.function(actor, renewed(message, contract))

    return handler._replace(function=run)


def pooled(cls: type[ActorBase], function: Callable[..., Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    """Return a coroutine function that runs `function` in its pool. Raises `ContractError`."""
    in_process = getattr(function, "__zbmd_pool__", None) == "process"
    where = f"{cls.__qualname__}.{function.__name__}"
    if inspect.iscoroutinefunction(function):
        raise ContractError(f"{where} runs in a pool, without an event loop: declare it with `def`")
    if in_process and not isinstance(inspect.getattr_static(cls, function.__name__, None), staticmethod):
        raise ContractError(f"{where} runs in another process, without the actor: make it static")
    if in_process and ("<locals>" in function.__qualname__ or function.__module__ == "__main__"):
        raise ContractError(f"{where} runs in another process, which cannot import it: move it to a module")
    function_id = f"{function.__module__}:{function.__qualname__}"

    async def run(actor: ActorBase, message: Contract) -> Any:
        cell = actor._cell
        if cell.traced is not None and cell.traced.replays:
            await asyncio.sleep(0)  # the turn in which the pool was done comes later
            return function(message) if in_process else function(actor, message)
        if in_process:
            return await cell.system.pools.in_process(function_id, message)
        return await cell.system.pools.in_thread(function, actor, message)

    return run


def _reply_types(cls: type[ActorBase], function: Callable[..., Any]) -> frozenset[type]:
    where = f"{cls.__qualname__}.{function.__name__}"
    try:
        annotation = typing.get_type_hints(function).get("return", Any)
    except NameError as error:
        raise ContractError(f"{where}: {error}; define its contracts at module level") from error
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    found = frozenset(typing.get_args(annotation) if union else (annotation,))
    for reply in found:
        if reply in (types.NoneType, DeferredReply):
            continue
        if not (isinstance(reply, type) and issubclass(reply, Contract)):
            raise ContractError(f"{where} must be annotated to return contracts or None, not {annotation}")
    return found


REMOTE_CLASSES_MAX = 1024
_remote_classes: dict[str, type[ActorBase]] = {}


def remote_class_id(cls: type[ActorBase] | str) -> str:
    """Return the name under which other processes ask for the class; a name is its own."""
    return cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}"


def register_remote(cls: type[ActorBase]) -> None:
    """Let other processes spawn `cls`; it must be importable there under the same name."""
    if len(_remote_classes) >= REMOTE_CLASSES_MAX:
        raise LocalProtocolError(f"{REMOTE_CLASSES_MAX} classes for remote spawns are registered at most")
    _remote_classes[remote_class_id(cls)] = cls


def find_remote_class(class_id: str) -> type[ActorBase] | None:
    """Return the class that other processes may spawn under that name, if it is here; nothing is imported."""
    cls = _remote_classes.get(class_id)
    return _class_in_module(class_id) if cls is None and may_import_for_peers(class_id) else cls


REMOTE_MODULES_MAX = 256
_remote_modules: list[str] = []
_CLASS_ID = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)


def allow_remote_modules(*modules: str) -> None:
    """Let other processes spawn every actor class of these modules and packages, imported when asked for."""
    fresh = [module for module in modules if module not in _remote_modules]
    if len(_remote_modules) + len(fresh) > REMOTE_MODULES_MAX:
        raise LocalProtocolError(f"{REMOTE_MODULES_MAX} modules are allowed for remote spawns at most")
    if wrong := [module for module in fresh if not _CLASS_ID.fullmatch(f"{module}:x")]:
        raise LocalProtocolError(f"{wrong[0]!r} is not the name of a module or package")
    _remote_modules.extend(fresh)


def may_import_for_peers(class_id: str) -> bool:
    """Whether `"module:Class"` is of a module that `allow_remote_modules` has named, or is below it."""
    if not _CLASS_ID.fullmatch(class_id):
        return False
    module = class_id.partition(":")[0]
    return any(module == allowed or module.startswith(f"{allowed}.") for allowed in _remote_modules)


def import_remote_class(class_id: str) -> type[ActorBase]:
    """Import a class that other processes may spawn; blocks. Raises `UnknownActorClass`."""
    if not may_import_for_peers(class_id):
        raise UnknownActorClass(f"{class_id} may not be spawned remotely: see allow_remote_modules")
    try:
        importlib.import_module(class_id.partition(":")[0])
    except Exception as error:
        raise UnknownActorClass(f"{class_id}: {type(error).__name__}: {error}") from error
    cls = _class_in_module(class_id)
    if cls is None:
        raise UnknownActorClass(f"{class_id} is not an actor class of that module")
    return cls


def _class_in_module(class_id: str) -> type[ActorBase] | None:
    module, _, qualified = class_id.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    is_actor = isinstance(found, type) and issubclass(found, ActorBase)
    return found if is_actor and remote_class_id(found) == class_id else None
