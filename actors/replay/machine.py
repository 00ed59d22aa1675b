"""Replaying actors: a recorded incarnation as a machine, like any other that is captured.

An actor's code is found by the name of its class. A log is data from anywhere, so nothing in it makes us
import a module: the class's module must have been imported already, or be allowed by `allow_modules`.
"""

from __future__ import annotations

import importlib
import sys
import weakref
from collections.abc import Mapping
from typing import Any

import msgspec

from zbmd.actors.contracts import Contract, contract_tag, fingerprint
from zbmd.actors.core.actor import Actor
from zbmd.actors.core.actor_base import handler_table, remote_class_id
from zbmd.actors.core.wire import RefData
from zbmd.actors.replay.events import ActorAction, ActorEvent
from zbmd.actors.replay.stage import Stage
from zbmd.actors.replay.traced import unpack_arguments
from zbmd.actors.system import ActorSystem
from zbmd.transport.capture.errors import CaptureMismatch

MODULES_ALLOWED_MAX = 1024

_allowed: set[str] = set()


class _Declared(msgspec.Struct, frozen=True):
    """The declaration of a stream of the kind `actor`."""

    actor_class: str
    arguments: bytes
    unreplayable: str
    process: str
    process_incarnation: int
    actor: str
    incarnation: int
    contracts: dict[str, str]
    seed: int
    now_ns: int
    wall_ns: int


def allow_modules(*names: str) -> None:
    """Let a replay import these modules, and those below them, to find the classes of actors.

    Raises `CaptureMismatch` if too many are allowed.
    """
    if len(_allowed) + len(names) > MODULES_ALLOWED_MAX:
        raise CaptureMismatch(f"{MODULES_ALLOWED_MAX} modules may be imported already")
    _allowed.update(names)


def find_actor_class(name: str) -> type[Actor]:
    """Return the class called `module:qualified.name`. Raises `CaptureMismatch` if it may not be had."""
    module_name, _, qualified = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        if not any(module_name == allowed or module_name.startswith(f"{allowed}.") for allowed in _allowed):
            raise CaptureMismatch(
                f"the actor's module {module_name} is not imported, and a log may not make us import it: "
                "import it, or allow it, before the replay"
            )
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise CaptureMismatch(f"the actor's module {module_name}: {error!r}") from error
    found: object = module
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Actor)):
        raise CaptureMismatch(f"{module_name} has no actor class {qualified} any more")
    return found


class ActorReplay:
    """One recorded incarnation of an actor: give it the recorded events, and it does what its code does now.

    suspects: what the actor used, so far, whose results are not recorded: "the time module at job.py:12 in
    tick".
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # The actor's tasks are still waiting when the log is at its end.
        weakref.finalize(self, stage.close)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> ActorReplay:
        """Return what a stream declares. Raises `CaptureMismatch` if it cannot be replayed, and why."""
        declared = msgspec.convert(config, _Declared)
        if declared.unreplayable:
            raise CaptureMismatch(f"{declared.actor_class} can only be shown: {declared.unreplayable}")
        actor_class = find_actor_class(declared.actor_class)
        _check_contracts(actor_class, declared.contracts)

        def make(system: ActorSystem) -> tuple[type[Actor], list[Any], dict[str, Any]]:
            args, kwargs = unpack_arguments(declared.arguments, system._bind, system.codec.decode_contract)
            return actor_class, args, kwargs

        ref = RefData(declared.process, declared.process_incarnation, declared.actor, declared.incarnation)
        return cls(Stage(ref, declared.seed, declared.now_ns, declared.wall_ns, make))

    def handle(self, event: ActorEvent, *, now_ns: int) -> list[ActorAction]:
        """One turn: see `events`. Raises what the actor's constructor raises."""
        return self._stage.play(event, now_ns)

    def check_invariants(self) -> None:
        """Raise `AssertionError` if something ran outside of a turn."""
        self._stage.check_invariants()

    @property
    def suspects(self) -> tuple[str, ...]:
        """See the class."""
        return tuple(self._stage.suspects)


def _check_contracts(actor_class: type[Actor], recorded: Mapping[str, str]) -> None:
    table = handler_table(actor_class)
    for contract in {*table, *(reply for handler in table.values() for reply in handler.replies)}:
        if not issubclass(contract, Contract):
            continue
        tag = contract_tag(contract)
        if recorded.get(tag, fingerprint(contract)) != fingerprint(contract):
            raise CaptureMismatch(
                f"{remote_class_id(actor_class)}: the contract {tag} has changed since it was recorded; "
                "replay with the release that wrote the log"
            )
