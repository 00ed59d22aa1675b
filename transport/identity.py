"""The identity that a process proves to each peer before a link stands, and the sides of a link.

Everything above hello and link names peers by these types; they depend on nothing else of the transport.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, TypeAlias

import msgspec

MAX_CONTRACTS = 1024

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.@#-]{1,64}\Z")]
_Natural = Annotated[int, msgspec.Meta(ge=0)]
_ContractKey = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,64}\Z")]
_Fingerprint = Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,32}\Z")]


class Side(Enum):
    """One of the two ends of a connection."""

    DIALER = "dialer"
    LISTENER = "listener"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The identity that a process states in its hello.

    Later releases may add fields: unknown ones are skipped.
    name: as in addresses ("rank0", "node"). pid, uid: as the process itself sees them. incarnation, job: u64;
    a process of job 0 belongs to no job (a tool) and may connect to any. contracts: "id/version" ->
    fingerprint of its schema.
    """

    name: _Name
    pid: _Natural
    uid: _Natural
    incarnation: _Natural
    job: _Natural = 0
    contracts: Annotated[dict[_ContractKey, _Fingerprint], msgspec.Meta(max_length=MAX_CONTRACTS)] = {}


PeerInfo: TypeAlias = Identity
"""The identity of a peer, once the peer has proved that it holds the cookie."""
