"""The actors of the soak: a ledger in each process that is killed, and the books of what it acknowledged."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on

VIOLATIONS_MAX: Final = 16


class Entry(Contract, id="zbmd.soak.entry"):
    """Write down the `number`-th entry of a client; answered by `Written`."""

    client: str
    number: int


class Written(Contract, id="zbmd.soak.written"):
    """It is written, by that life of the process; `entries`: of this client in this life."""

    process: str
    life: int
    number: int
    entries: int


class Audit(Contract, id="zbmd.soak.audit"):
    """What has this life written?"""


class Books(Contract, id="zbmd.soak.books"):
    """Its entries, by client, in the order in which they were written."""

    process: str
    life: int
    entries: dict[str, list[int]]


class Ledger(Actor):
    """Writes entries down. Its memory goes with its process: only this life can vouch for what it wrote."""

    def __init__(self) -> None:
        self._entries: dict[str, list[int]] = defaultdict(list)

    @on(Entry)
    async def entry(self, entry: Entry) -> Written:
        """Write it down."""
        written = self._entries[entry.client]
        written.append(entry.number)
        return Written(self.system.name, self.system.incarnation, entry.number, len(written))

    @on(Audit)
    async def audit(self, _: Audit) -> Books:
        """Show the books."""
        entries = {client: list(numbers) for client, numbers in self._entries.items()}
        return Books(self.system.name, self.system.incarnation, entries)


@dataclass(slots=True)
class Account:
    """Messages that one incarnation of a process was sent, and those that it acknowledged."""

    sent: list[int] = field(default_factory=list[int])
    acknowledged: list[int] = field(default_factory=list[int])


class Bookkeeper:
    """Every message is accounted for: sent to one life, acknowledged by that life or unknown, written once.

    Of a life that lives, what it has written holds all that it acknowledged, each once and in order, and
    nothing that was not sent to it. Of a life that is dead no acknowledgement comes any more.
    """

    def __init__(self) -> None:
        self.accounts: dict[tuple[str, int, str], Account] = defaultdict(Account)
        self.over: set[tuple[str, int]] = set()
        """Lives that the kernel has confirmed to be over, by process and incarnation."""
        self.violations: list[str] = []
        self.sent = self.acknowledged = self.unknown = self.audits = 0

    def send(self, process: str, life: int, client: str, number: int) -> None:
        """A message goes out."""
        self.accounts[process, life, client].sent.append(number)
        self.sent += 1

    def acknowledge(
        self, life: int, client: str, number: int, written: Written, *, sent_after_end: bool
    ) -> None:
        """An acknowledgement has come of what was sent to that life."""
        account = self.accounts[written.process, written.life, client]
        where = f"{client} {number} to {written.process}#{life}"
        if (written.life, written.number) != (life, number):
            self._violate(f"{where} was answered by {written}")
        if sent_after_end:
            self._violate(f"{where} was handled by a life that was over before it was sent")
        account.acknowledged.append(number)
        if written.entries > len(account.sent):
            self._violate(f"{where}: {written.entries} are written, {len(account.sent)} were sent")
        self.acknowledged += 1

    def lose(self) -> None:
        """Note a message without an answer: it may have been written or not, and its client knows that."""
        self.unknown += 1

    def audit(self, books: Books) -> None:
        """Compare what a living life has written with what it was sent and has acknowledged."""
        for client, written in books.entries.items():
            account = self.accounts[books.process, books.life, client]
            where = f"{books.process}#{books.life} of {client}"
            if written != sorted(set(written)):
                self._violate(f"{where}: not each once and in order: {written[-10:]}")
            if strangers := set(written) - set(account.sent):
                self._violate(f"{where}: written and never sent there: {sorted(strangers)[:10]}")
            if lost := set(account.acknowledged) - set(written):
                self._violate(f"{where}: acknowledged and not written: {sorted(lost)[:10]}")
        self.audits += 1

    def _violate(self, what: str) -> None:
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(what)
