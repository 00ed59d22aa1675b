"""Collectives: operations over the arrays of a group of ranks, which survive the death of a member.

This package imports `zbmd.actors` and `zbmd.transport`. Its public API is `__all__`: each name is imported
when it is first used. (`zbmd.group` makes a group: here, `group` is a package.) Inside, each package imports
those before it: `programs`, `device`, `algorithms`, `execution`, `communicator`, `p2p`, `group`, `repair`;
then `elastic`, `commit`, `scale` and `torch`. Begin with `group/group.py`; for what it runs, with
`programs/program.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zbmd.collectives.blocking_worker import BlockingElasticGroup as BlockingElasticGroup
    from zbmd.collectives.blocking_worker import BlockingGroup as BlockingGroup
    from zbmd.collectives.blocking_worker import BlockingWorker as BlockingWorker
    from zbmd.collectives.blocking_worker import init as init
    from zbmd.collectives.elastic.group import ElasticBlocking as ElasticBlocking
    from zbmd.collectives.elastic.group import ElasticGroup as ElasticGroup
    from zbmd.collectives.elastic.group import elastic_group as elastic_group
    from zbmd.collectives.elastic.operations import Result as Result
    from zbmd.collectives.errors import CollectiveError as CollectiveError
    from zbmd.collectives.errors import Desynchronised as Desynchronised
    from zbmd.collectives.errors import EpochExhausted as EpochExhausted
    from zbmd.collectives.errors import Flaw as Flaw
    from zbmd.collectives.errors import InputsOverwritten as InputsOverwritten
    from zbmd.collectives.errors import MembersLost as MembersLost
    from zbmd.collectives.errors import NotReplaced as NotReplaced
    from zbmd.collectives.errors import OperationAborted as OperationAborted
    from zbmd.collectives.errors import ProgramError as ProgramError
    from zbmd.collectives.errors import VerificationError as VerificationError
    from zbmd.collectives.group.group import Group as Group
    from zbmd.collectives.group.group import GroupBlocking as GroupBlocking
    from zbmd.collectives.p2p.tagged import Received as Received

__all__ = [
    "BlockingElasticGroup",
    "BlockingGroup",
    "BlockingWorker",
    "CollectiveError",
    "Desynchronised",
    "ElasticBlocking",
    "ElasticGroup",
    "EpochExhausted",
    "Flaw",
    "Group",
    "GroupBlocking",
    "InputsOverwritten",
    "MembersLost",
    "NotReplaced",
    "OperationAborted",
    "ProgramError",
    "Received",
    "Result",
    "VerificationError",
    "elastic_group",
    "init",
]

_HOMES = {
    "zbmd.collectives.blocking_worker": ("BlockingElasticGroup", "BlockingGroup", "BlockingWorker", "init"),
    "zbmd.collectives.elastic.group": ("ElasticBlocking", "ElasticGroup", "elastic_group"),
    "zbmd.collectives.elastic.operations": ("Result",),
    "zbmd.collectives.errors": (
        "CollectiveError",
        "Desynchronised",
        "EpochExhausted",
        "Flaw",
        "InputsOverwritten",
        "MembersLost",
        "NotReplaced",
        "OperationAborted",
        "ProgramError",
        "VerificationError",
    ),
    "zbmd.collectives.group.group": ("Group", "GroupBlocking"),
    "zbmd.collectives.p2p.tagged": ("Received",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
