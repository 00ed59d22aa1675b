"""Collectives: operations over the arrays of a group of ranks, which survive the death of a member.

This package imports `zbmd.actors` and `zbmd.transport`. Its public API is `__all__`: each name is imported
when it is first used. (`zbmd.group` makes a group: here, `group` is a package.) Inside, each package imports
those before it: `programs`, `algorithms`, `device`, `execution`, `communicator`, `p2p`, `group`, `repair`;
then `elastic`, `scale` and `torch`. Begin with `group/group.py`; for what it runs, with
`programs/program.py`.
"""

from __future__ import annotations

from zbmd.lazy_imports import lazy_imports

with lazy_imports(globals()):
    from zbmd.collectives.blocking_worker import BlockingElasticGroup as BlockingElasticGroup
    from zbmd.collectives.blocking_worker import BlockingGroup as BlockingGroup
    from zbmd.collectives.blocking_worker import BlockingWorker as BlockingWorker
    from zbmd.collectives.blocking_worker import init as init
    from zbmd.collectives.device.windows import DevicePaths as DevicePaths
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
