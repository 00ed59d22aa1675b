"""The slots of a state that is updated before the vote: what is committed stays beside what is not.

An optimizer that communicates in `step()` needs all ranks until its update is done, so the update is made
first, and voted on afterwards. Until the commit a rank holds four things: its own part as last committed, to
go back to; its own part as updated; and both of its ward, whose rank it stands in for. Imports nothing of
PyTorch.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from zbmd.transport.errors import LocalProtocolError

PartT = TypeVar("PartT")


class Slots(Generic[PartT]):
    """Those of one rank. A part is whatever stands for one; None: there is none."""

    def __init__(self) -> None:
        self.own: PartT | None = None
        """This rank's part as last committed; None: it is what the rank computes with, and not copied yet."""
        self.ward: PartT | None = None
        """The ward's part as last committed."""
        self.next_own: PartT | None = None
        self.next_ward: PartT | None = None
        self.updating = False
        """Whether the part that this rank computes with may differ from the committed one."""

    def begin(self, own: PartT) -> None:
        """An update begins. own: a copy of this rank's part before it."""
        if self.updating:
            raise LocalProtocolError("an update begins in another one")
        self.own, self.updating = own, True

    def hold(self, own: PartT, ward: PartT) -> None:
        """The update is made, here and by the ward; it does not count yet."""
        if not self.updating:
            raise LocalProtocolError("an updated part came, and no update has begun")
        self.next_own, self.next_ward = own, ward

    def commit(self) -> None:
        """The transaction counts, and with it the update, if it has one."""
        if self.updating:
            self.own, self.next_own = self.next_own, None
            self.ward = self.ward if self.next_ward is None else self.next_ward
            self.next_ward = None
            self.updating = False

    def go_back(self) -> PartT | None:
        """The transaction is to be repeated: return the part to load again; None: it was not written."""
        own = self.own if self.updating else None
        self.next_own = self.next_ward = None
        self.updating = False
        return own

    def keep(self, ward: PartT | None) -> None:
        """Hold the ward's part, as it is committed; None: this rank has no ward."""
        self.ward, self.next_ward = ward, None

    def replace(self) -> None:
        """This rank's part has come from elsewhere, and is committed."""
        self.own = self.next_own = None
        self.updating = False

    def check_invariants(self) -> None:
        """Raise `AssertionError` for a state that no sequence of calls may reach."""
        assert self.updating or (self.next_own is None and self.next_ward is None), "an update without begin"
        assert not self.updating or self.own is not None, "an update that cannot be undone"
