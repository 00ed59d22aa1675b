"""The machines of this layer as kinds that can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from zbmd.actors import view
from zbmd.actors.directory import events as directory
from zbmd.actors.directory.machine import DirectoryMachine
from zbmd.actors.host.membership import MembershipMachine
from zbmd.actors.supervision import events as supervision
from zbmd.actors.supervision.events import AutoShutdown, BackOff, ChildPolicy, Strategy
from zbmd.actors.supervision.machine import SupervisionMachine
from zbmd.actors.upgrade import events as upgrade
from zbmd.actors.upgrade import ledger as ledger
from zbmd.actors.upgrade.agent import UpgradeAgent
from zbmd.actors.upgrade.coordinator import UpgradeMachine
from zbmd.actors.view import OnLoss
from zbmd.transport.capture.registry import MachineKind, register

_FIRST_GRACE_NS, _FIRST_KILL_NS, _FIRST_RELINK_NS = (
    1_000_000_000,
    500_000_000,
    100_000_000,
)  # of logs that do not name them


def _build_membership(config: Mapping[str, Any]) -> MembershipMachine:
    return MembershipMachine(
        config["world_size"],
        on_loss=OnLoss(config["on_loss"]),
        restarts_max=config["restarts_max"],
        period_ns=config["period_ns"],
        grace_ns=config.get("grace_ns", _FIRST_GRACE_NS),
        kill_ns=config.get("kill_ns", _FIRST_KILL_NS),
        relink_ns=config.get("relink_ns", _FIRST_RELINK_NS),
    )


MEMBERSHIP: MachineKind[view.Event, view.Action] = register(
    "membership",
    2,
    _build_membership,
    events=view.Event,
    actions=view.Action,
    states=(MembershipMachine, SupervisionMachine),
)
"""Its configuration: the arguments of `MembershipMachine`."""


def _build_supervision(config: Mapping[str, Any]) -> SupervisionMachine:
    return SupervisionMachine(
        msgspec.convert(config["children"], list[ChildPolicy]),
        strategy=Strategy(config["strategy"]),
        intensity=config["intensity"],
        period_ns=config["period_ns"],
        back_off=msgspec.convert(config.get("back_off"), BackOff | None),
        auto_shutdown=AutoShutdown(config.get("auto_shutdown", "never")),
    )


SUPERVISION: MachineKind[supervision.Event, supervision.Action] = register(
    "supervision",
    1,
    _build_supervision,
    events=supervision.Event,
    actions=supervision.Action,
    states=(SupervisionMachine,),
)
"""Its configuration: the arguments of `SupervisionMachine`."""


def _build_directory(config: Mapping[str, Any]) -> DirectoryMachine:
    return DirectoryMachine(msgspec.convert(config["me"], tuple[str, int]))


DIRECTORY: MachineKind[directory.Event, directory.Action] = register(
    "directory",
    1,
    _build_directory,
    events=directory.Event,
    actions=directory.Action,
    states=(DirectoryMachine,),
)
"""Its configuration: `me`, the process's name and incarnation."""


def _build_upgrade(config: Mapping[str, Any]) -> UpgradeMachine:
    return UpgradeMachine(
        config["stages"], answer_ns=config["answer_ns"], probation_ns=config["probation_ns"]
    )


UPGRADE: MachineKind[upgrade.Event, upgrade.Action] = register(
    "upgrade", 1, _build_upgrade, events=upgrade.Event, actions=upgrade.Action, states=(UpgradeMachine,)
)
"""Whoever leads a change of code; its configuration: the arguments of `UpgradeMachine`."""


def _build_upgrade_agent(config: Mapping[str, Any]) -> UpgradeAgent:
    return UpgradeAgent(config["me"], config["processes"])


UPGRADE_AGENT: MachineKind[upgrade.LocalEvent, upgrade.LocalAction] = register(
    "upgrade-agent",
    1,
    _build_upgrade_agent,
    events=upgrade.LocalEvent,
    actions=upgrade.LocalAction,
    states=(UpgradeAgent,),
)
"""One process's part in it; its configuration: the arguments of `UpgradeAgent`."""


def _build_upgrade_ledger(_: Mapping[str, Any]) -> ledger.CodeLedger:
    return ledger.CodeLedger()


UPGRADE_LEDGER: MachineKind[ledger.Event, ledger.Action] = register(
    "upgrade-ledger",
    1,
    _build_upgrade_ledger,
    events=ledger.Event,
    actions=ledger.Action,
    states=(ledger.CodeLedger,),
)
"""The changes that one process knows to be in force; it has no configuration."""
