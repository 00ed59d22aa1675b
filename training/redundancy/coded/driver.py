"""Parities at other ranks: encode those of the group during the passes, rebuild the own shard after a loss.

As a buddy does, a rank reads its peers' shards where they lie, on a thread of its own. What it keeps is not a
copy, but the parities of the stripes that it has no data in.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import structlog
from numpy.typing import NDArray

from zbmd.collectives.group.group import Group
from zbmd.training.native._kernels import code
from zbmd.training.redundancy import machine as zm
from zbmd.training.redundancy.buddy import (
    COPY_MIDDLE_POINT,
    COPY_POINT,
    RESTORE_MIDDLE_POINT,
    RESTORE_POINT,
    RESTORED_POINT,
    BuddyReplica,
)
from zbmd.training.redundancy.coded.field import flat, parity_matrix, rebuilding_matrix
from zbmd.training.redundancy.coded.machine import Code, CodedHeld, CodedMirror, EnteredCoded, Rebuild
from zbmd.training.redundancy.coded.placement import described, shortage
from zbmd.training.redundancy.failures import Cancellation
from zbmd.training.redundancy.holdings import SLOTS, Copy, Held
from zbmd.training.redundancy.holdings_row import VERSION_MAX
from zbmd.training.redundancy.pull import pull
from zbmd.training.redundancy.stamped import digest_of
from zbmd.transport import kill_points as faults
from zbmd.transport.errors import PeerLost, RemoteProtocolError, UserError
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.native._native import now_ns

log: Final = structlog.stdlib.get_logger("zbmd.redundancy")

SCRATCH_BYTES: Final = 1 << 20
"""For pieces of all shards of a stripe at once."""
_HEAD: Final = 5
_HANDLES: Final = 2 * SLOTS
Bytes = NDArray[np.uint8]


def row_numbers(ranks: int) -> int:
    """Return the numbers of a report in a job of so many ranks."""
    return _HEAD + 2 * SLOTS + (SLOTS + 2) * ranks + 2 * _HANDLES


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRow:
    """The report of one rank. handles: its slots, then its parities, where peers read them."""

    held: CodedHeld
    handles: tuple[RegionHandle, ...]

    def encoded(self, ranks: int) -> NDArray[np.uint64]:
        """Return (row_numbers,): versions and domains are incremented by one, 0 means none."""
        held = self.held.held
        numbers = [0 if version is None else version + 1 for version in held.own]
        numbers += [held.known, held.first, held.digest]
        for copy in held.copies:
            numbers += [0, 0] if copy is None else [copy.version + 1, copy.digest]
        for domains in self.held.domains:
            numbers += [one + 1 for one in domains] or [0] * ranks
        for digests in (self.held.digests, self.held.voted):
            numbers += list(digests) or [0] * ranks
        for handle in self.handles:
            numbers += [handle.offset, handle.nbytes]
        return np.array(numbers + [0] * (row_numbers(ranks) - len(numbers)), np.uint64)

    @classmethod
    def decoded(
        cls, row: NDArray[np.uint64], *, ranks: int, place: int, slot: int, incarnation: int
    ) -> CodedRow:
        """Return the report of a rank. Raises `RemoteProtocolError`: the numbers are a peer's."""
        numbers = [int(number) for number in row]
        if len(numbers) != row_numbers(ranks):
            raise RemoteProtocolError(
                f"place {place} reports {len(numbers)} numbers, not {row_numbers(ranks)}"
            )
        own = [None if number == 0 else number - 1 for number in numbers[:SLOTS]]
        known, first, digest = numbers[SLOTS:_HEAD]
        copies: list[Copy | None] = []
        for at in range(_HEAD, _HEAD + 2 * SLOTS, 2):
            version, found = numbers[at : at + 2]
            copies.append(None if version == 0 else Copy(ward=place, version=version - 1, digest=found))
        said = [(at, version) for at, version in enumerate(own) if version is not None]
        said += [(at, copy.version) for at, copy in enumerate(copies) if copy is not None]
        if max(known, first) > VERSION_MAX or any(v > VERSION_MAX or v % SLOTS != at for at, v in said):
            raise RemoteProtocolError(f"place {place} reports impossible versions: {numbers[: _HEAD + 4]}")
        at = _HEAD + 2 * SLOTS
        lists = [numbers[at + part * ranks : at + (part + 1) * ranks] for part in range(SLOTS + 2)]
        *domains, digests, voted = lists
        if any(one > ranks for listed in domains for one in listed):
            raise RemoteProtocolError(f"place {place} reports domains beyond the {ranks} that there can be")
        found_domains = [tuple(one - 1 for one in listed) if all(listed) else () for listed in domains]
        places = numbers[at + (SLOTS + 2) * ranks :]
        if max(places) >= 1 << 63:
            raise RemoteProtocolError(f"place {place} reports memory at impossible addresses")
        handles = tuple(
            RegionHandle(slot=slot, incarnation=incarnation, offset=offset, nbytes=nbytes, writable=False)
            for offset, nbytes in zip(places[::2], places[1::2], strict=True)
        )
        held = Held(
            own=(own[0], own[1]), known=known, copies=(copies[0], copies[1]), first=first, digest=digest
        )
        coded = CodedHeld(
            held=held,
            domains=(found_domains[0], found_domains[1]),
            digests=tuple(digests) if any(digests) else (),
            voted=tuple(voted) if any(voted) else (),
        )
        return cls(held=coded, handles=handles)


@dataclass(frozen=True, slots=True)
class _ShardAt:
    """A shard of a stripe: its number there, and where it lies in a peer's memory, up to `end`."""

    number: int
    place: int
    handle: RegionHandle
    offset: int
    end: int


class CodedReplica(BuddyReplica):
    """`Redundancy` of what `own` holds, by parities at other ranks. Arguments as of `BuddyReplica`.

    copies: `SLOTS` arrays of `code.room` bytes, uint8. A domain is a name that users gave, or a host.
    """

    def __init__(self, *arguments: Any, code: Code, **more: Any) -> None:
        self._code = code
        self._peers: list[CodedRow] = []
        super().__init__(*arguments, **more)

    def _machine_of(self, **arguments: Any) -> zm.Mirror:
        """See `BuddyReplica`."""
        del arguments["replicas"], arguments["beside"]
        return CodedMirror(**arguments, code=self._code)

    @property
    def _coded(self) -> CodedMirror:
        machine = self._machine
        assert isinstance(machine, CodedMirror), "it was made here"
        return machine

    def meet(
        self, group: Group, keys: Sequence[int] = (), known: int = 0, *, everyone: Group | None = None
    ) -> int:
        """See `Redundancy`. To this rank all shards differ."""
        self._group, self._cancellation = group, Cancellation()
        self._settle()
        ranks, domains = group.size, group.view.domains(group.members)
        report = self._coded.coded_report(known, self._digests_now())
        row = CodedRow(held=report, handles=self._bank.handles).encoded(ranks)
        every = group.blocking.all_gather(row).reshape(ranks, row_numbers(ranks))
        self._peers = []
        for place, rank in enumerate(group.members):
            slot, incarnation = self._whose(rank)
            one = CodedRow.decoded(every[place], ranks=ranks, place=place, slot=slot, incarnation=incarnation)
            self._peers.append(one)
        self._require_domains(group.view.domain_names(group.members), domains)
        self._perform_coded(self._handle(EnteredCoded(held=self._reports(), domains=domains)))  # type: ignore[arg-type]
        return self._machine.version

    def _require_domains(self, names: Sequence[str], domains: Sequence[int]) -> None:
        """Raise `UserError` before the first step if these failure domains do not protect all ranks.

        Later, when a host is replaced by one in another domain, the run goes on and says so.
        """
        code, room = self._code, self._code.room
        begins = all(one.held.known <= one.held.first for one in self._reports())
        text = shortage(names, data=code.data, parity=code.parity)
        if text and begins:
            raise UserError(
                f"--redundancy {text}. Give fewer parities, or start hosts in other domains (--domain)."
            )
        least = min(group.parity for group in code.groups(domains))
        if least < code.parity:
            why = text or f"the {room} bytes that ranks have for parities are not enough for these domains"
            log.warning("fewer losses at once are survived", expected=code.parity, found=least, why=why)
        elif self._coded.place == 0 and begins:
            text = described(names, data=code.data, parity=code.parity)
            print(f"redundancy ec:{code}: {text}", file=sys.stderr, flush=True)

    def _digests_now(self) -> tuple[int, int]:
        """Return the digests of the parities in both slots, as they are in memory; 0 without any."""
        held = self._coded.copies
        first, second = (
            0 if copy is None else digest_of(array[: self._bank.lengths[slot]])
            for slot, (copy, array) in enumerate(zip(held, self._bank.copies, strict=True))
        )
        for slot, found in enumerate((first, second)):
            copy = held[slot]
            if copy is not None and copy.digest != found:
                log.warning(
                    "parities in memory are damaged, and are encoded again",
                    version=copy.version,
                    digest=f"{found:016x}",
                    expected=f"{copy.digest:016x}",
                )
        return first, second

    def _reports(self) -> tuple[CodedHeld, ...]:
        return tuple(one.held for one in self._peers)

    def _perform_coded(self, actions: Sequence[Any]) -> None:
        for action in actions:
            if isinstance(action, Rebuild):
                self._perform(self._handle(self._rebuilt(action)))
            else:
                self._perform([action])

    # ---- shards of peers

    def _filled(self, into: Bytes, place: int, handle: RegionHandle, offset: int, end: int) -> None:
        """Fill `into` from byte `offset` of a peer's memory, with zeros from byte `end` on."""
        assert self._group is not None
        count = max(0, min(len(into), end - offset))
        into[count:] = 0
        if not count:
            return
        rank = self._group.members[place]
        peer = self._worker.peers.get(rank)
        if peer is None:
            raise PeerLost(rank, "it is no peer any more")
        region = peer.memory.open_region(handle, self._worker.segment)
        pull(region, peer.memory, into[:count], offset, self._cancellation, source=rank)

    def _scratch(self, count: int) -> list[Bytes]:
        """Return room for pieces of so many shards."""
        each = max(4096, SCRATCH_BYTES // count // 4096 * 4096)
        whole = self._worker.segment.arena.empty(count * each, np.uint8)
        return [whole[at * each : (at + 1) * each] for at in range(count)]

    def _copy(self, work: zm.CopyWard | None) -> tuple[int, int | None]:
        """See `BuddyReplica`: encode the parities that this rank has."""
        began_ns, copied = now_ns(), None
        if work is not None:
            faults.hit(COPY_POINT)
            self._encode(work.version)
            copied = digest_of(self._bank.copies[work.slot][: self._bank.lengths[work.slot]])
        own = self._digest_of_own()
        self.busy_ns += now_ns() - began_ns
        return own, copied

    def _encode(self, version: int) -> None:
        slot, group = version % SLOTS, self._coded.group
        stripes = group.parities_of(self._coded.place)
        self._bank.lengths[slot] = len(stripes) * group.block_bytes(self._code.nbytes)
        if not stripes:
            return
        size, room = group.block_bytes(self._code.nbytes), self._bank.copies[slot]
        matrix, pieces = parity_matrix(group.data, group.parity), self._scratch(group.data)
        self._worker.segment.arena.ready(room)
        for number, at_stripe in enumerate(stripes):
            stripe = group.stripe(at_stripe)
            factors = flat((matrix[stripe.parity.index(self._coded.place)],))
            for at in range(0, size, len(pieces[0])):
                self._cancellation.check()
                count = min(len(pieces[0]), size - at)
                for (place, block), piece in zip(stripe.data, pieces, strict=True):
                    handle = self._peers[place].handles[slot]
                    self._filled(piece[:count], place, handle, block * size + at, handle.nbytes)
                into = room[number * size + at : number * size + at + count]
                code([into], [piece[:count] for piece in pieces], factors)
            if number == len(stripes) // 2:
                faults.hit(COPY_MIDDLE_POINT)

    def _rebuilt(self, work: Rebuild) -> zm.Restored:
        """Rebuild the own shard, block by block, from the shards of its stripes that are left."""
        faults.hit(RESTORE_POINT)
        chosen, me = work.chosen, self._coded.place
        slot = chosen.version % SLOTS
        self._begin_slot(slot)
        group = next(one for one in chosen.groups if me in one.members)
        shard = self._own.slots[slot]
        self._worker.segment.arena.ready(shard)
        whole, size = shard.view(np.uint8), group.block_bytes(self._code.nbytes)
        *pieces, result = self._scratch(group.data + 1)
        for block in range(group.data):
            left = self._left(work, block)
            have = [shard_at.number for shard_at in left]
            factors = flat(rebuilding_matrix(group.data, group.parity, have, [block]))
            for at in range(0, size, len(result)):
                self._cancellation.check()
                count, begin = min(len(result), size - at), block * size + at
                if begin >= len(whole):
                    break
                for one, piece in zip(left, pieces, strict=True):
                    self._filled(piece[:count], one.place, one.handle, one.offset + at, one.end)
                code([result[:count]], [piece[:count] for piece in pieces], factors)
                whole[begin : begin + count] = result[: min(count, len(whole) - begin)]
            if block == group.data // 2:
                faults.hit(RESTORE_MIDDLE_POINT)
        faults.hit(RESTORED_POINT)
        return zm.Restored(digest=self._digest(shard))

    def _left(self, work: Rebuild, block: int) -> list[_ShardAt]:
        """Return as many shards as are needed of those left in the stripe of a block of the own shard."""
        chosen, me = work.chosen, self._coded.place
        slot = chosen.version % SLOTS
        group = next(one for one in chosen.groups if me in one.members)
        size, number = group.block_bytes(self._code.nbytes), group.stripe_of(me, block)
        stripe, found = group.stripe(number), list[_ShardAt]()
        for at, (place, other) in enumerate(stripe.data):
            if place not in chosen.lost:
                handle = self._peers[place].handles[slot]
                found.append(_ShardAt(at, place, handle, other * size, handle.nbytes))
        for at, place in enumerate(stripe.parity):
            if place in chosen.parities:
                handle = self._peers[place].handles[SLOTS + slot]
                offset = group.parities_of(place).index(number) * size
                found.append(_ShardAt(group.data + at, place, handle, offset, offset + size))
        return found[: group.data]
