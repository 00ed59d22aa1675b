"""Errors of the interpreter, by what is wrong with the kernel."""

from __future__ import annotations

from zbmd.transport.errors import ZbmdError


class PtxError(ZbmdError):
    """A kernel cannot be interpreted, or does what the hardware leaves undefined."""


class PtxSyntaxError(PtxError):
    """The text is not PTX that the interpreter knows."""


class MemoryFault(PtxError):
    """An access is out of bounds, misaligned, or writes to what is read-only."""


class UninitialisedRead(PtxError):
    """A register or memory is read that nothing has written."""


class RaceFound(PtxError):
    """Two accesses, one of them a write, have no order, or an asynchronous operation is under way."""


class DivergentThreads(PtxError):
    """Threads that must execute an instruction together do not."""


class Deadlock(PtxError):
    """Threads wait for what no thread does any more."""
