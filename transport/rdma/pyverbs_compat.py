"""The verbs that are used, by pyverbs: the one place that knows how its releases differ.

pyverbs is imported when the first device is opened. Its release goes with the distribution's rdma-core; the
constants have been in two modules so far, and its completion channel does not tell its descriptor.
"""

from __future__ import annotations

import contextlib
import os
from functools import cache
from importlib import import_module
from typing import Any, Final

from zbmd.transport.errors import UserError

INSTALL: Final = (
    "RDMA needs pyverbs: install the distribution's python3-pyverbs, for the distribution's own Python, or "
    "pip install 'zbmd[rdma]' where libibverbs and its headers are."
)
CHANNEL_NAME: Final = "infinibandevent"


class Verbs:
    """The classes and constants."""

    def __init__(self) -> None:
        try:
            self.c: Any = import_module("pyverbs.libibverbs_enums")
        except ImportError:
            self.c = import_module("pyverbs.enums")
        self.Context: Any = import_module("pyverbs.device").Context
        self.PD: Any = import_module("pyverbs.pd").PD
        self.MR: Any = import_module("pyverbs.mr").MR
        cq, qp = import_module("pyverbs.cq"), import_module("pyverbs.qp")
        self.CQ: Any = cq.CQ
        self.CompChannel: Any = cq.CompChannel
        self.QP: Any = qp.QP
        self.QPCap: Any = qp.QPCap
        self.QPInitAttr: Any = qp.QPInitAttr
        self.QPAttr: Any = qp.QPAttr
        addr, wr, srq = (import_module(f"pyverbs.{name}") for name in ("addr", "wr", "srq"))
        self.AHAttr: Any = addr.AHAttr
        self.GID: Any = addr.GID
        self.GlobalRoute: Any = addr.GlobalRoute
        self.SGE: Any = wr.SGE
        self.SendWR: Any = wr.SendWR
        self.RecvWR: Any = wr.RecvWR
        self.SRQ: Any = srq.SRQ
        self.SrqInitAttr: Any = srq.SrqInitAttr
        self.SrqAttr: Any = srq.SrqAttr
        self.Error: type[Exception] = import_module("pyverbs.pyverbs_error").PyverbsError


@cache
def verbs() -> Verbs:
    """Raises `UserError` where pyverbs is not, or does not fit this Python."""
    try:
        return Verbs()
    except ImportError as error:
        raise UserError(f"{INSTALL} ({error})") from error


def open_channel(context: Any) -> tuple[Any, int]:
    """A completion channel that never blocks, and its descriptor."""
    before = _channels()
    channel = verbs().CompChannel(context)
    found = _channels() - before
    if len(found) != 1:
        channel.close()
        raise UserError(f"the descriptor of a completion channel cannot be told: {len(found)} new ones.")
    fd = found.pop()
    os.set_blocking(fd, False)
    return channel, fd


def _channels() -> set[int]:
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if CHANNEL_NAME in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
    return found
