"""A rank's optimizer state in a file: masters and moments, in two memory-mapped slots.

Data that is not in use is on disk: each unit's part is loaded ahead of its update, and paged out after it.
The file outlives the process, so the replacement of a killed rank on the same host finds its state there: a
slot is stamped with its version, and with a digest that was computed while its parts were written.

The kernel's page cache outlives a process, but not a host: nothing is synced.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import xxhash

from zbmd.training.autograd.array_module import Array
from zbmd.training.autograd.parameter_layout import ParameterLayout, ParameterSlot, padded
from zbmd.training.optim import (
    HeldMatrices,
    OptimizerConfig,
    arrays_of,
    optimizer_for,
    whole_parameters,
)
from zbmd.training.optim.elementwise import AdamWState, Shard, StateArray, slot_blocks
from zbmd.training.redundancy.stamped import (
    NAME,
    NO_NOTE,
    NOTE_NUMBERS,
    FoundState,
    Note,
    StampedSlots,
    StateName,
    damage_logged,
)
from zbmd.transport.errors import UserError
from zbmd.transport.host.topology.cpus import counted
from zbmd.transport.memory.memfd import in_words
from zbmd.transport.native._native import address_of

# ---- paging: load what an update needs, and page it out afterwards

RUN_ELEMENTS: Final = 1 << 20
"""Parameters that are updated at once if the state is in a file."""


def state_in(state: AdamWState, span: slice) -> AdamWState:
    """Return views of these parameters."""
    return AdamWState(state.weights[span], state.mean[span], state.square[span])


class Paging:
    """Tells `file` which parts of a state, made of `names`, are in use; does nothing without a file."""

    def __init__(self, file: StateFile | None, names: Sequence[StateArray]) -> None:
        self._file, self._names = file, names

    def arrays(self, state: AdamWState) -> list[Array]:
        """Return all arrays of a state, in the order in which it is written."""
        return [getattr(state, name) for name in self._names]

    def bring_in(self, state: AdamWState) -> None:
        """Announce that the state is needed soon."""
        if self._file is not None:
            self._file.will_need(self.arrays(state))

    def let_go(self, old: AdamWState, new: AdamWState) -> None:
        """Note that `new` has been written: add it to the digest, and page both versions out."""
        if self._file is not None:
            self._file.wrote(self.arrays(new))
            self._file.rest([*self.arrays(old), *self.arrays(new)])

    def wrote(self, rest: Array) -> None:
        """Note that the end of a slot has been written, after all runs."""
        if self._file is not None:
            self._file.wrote([rest])


class PagedUpdate:
    """The optimizer of flat arrays of `layout`: run by run if they lie in `file`, otherwise at once.

    The bits are the same. `held` as in `Muon`.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        layout: ParameterLayout,
        file: StateFile | None,
        held: HeldMatrices | None = None,
    ) -> None:
        self.paging = Paging(file, arrays_of(config))
        if file is None:
            self._runs = [slice(0, layout.size)]
            self._optimizers = [optimizer_for(config, layout, held=held)]
            return
        held = HeldMatrices.whole(layout) if held is None else held
        shards = list(_runs_of(layout, whole_parameters(config, layout)))
        self._runs = [span for span, _ in shards]
        self._optimizers = [
            optimizer_for(config, layout, shard=shard, held=held.within(span)) for span, shard in shards
        ]

    def parts_of(self, state: AdamWState) -> Iterator[list[Array]]:
        """Yield views of all of a state, in the order in which `update` writes them."""
        for span in self._runs:
            yield self.paging.arrays(state_in(state, span))

    def update(
        self,
        old: AdamWState,
        new: AdamWState,
        grads: Array,
        *,
        step: int,
        learning_rate: float,
        grad_scale: float,
    ) -> None:
        """Update the state; see `Optimizer`."""
        for number, (span, optimizer) in enumerate(zip(self._runs, self._optimizers, strict=True)):
            for ahead in self._runs[number + 1 : number + 2]:
                self.paging.bring_in(state_in(old, ahead))
            before, behind = state_in(old, span), state_in(new, span)
            optimizer.update(
                before,
                behind,
                grads[span],
                step=step,
                learning_rate=learning_rate,
                grad_scale=grad_scale,
            )
            self.paging.let_go(before, behind)


def _runs_of(layout: ParameterLayout, whole: Sequence[ParameterSlot]) -> Iterator[tuple[slice, Shard]]:
    """Yield runs of at least `RUN_ELEMENTS` parameters, except for the last, and what to update in each.

    No run ends within one of `whole`, which are not in the result: they are updated as a whole.
    """
    begin, held = 0, list[tuple[slice, bool]]()
    for slot in layout.slots:
        for block, decayed in slot_blocks(slot):
            if slot not in whole:
                held.append((slice(block.start - begin, block.stop - begin), decayed))
            at_end = block.stop == slot.offset + padded(slot.size)
            is_long = block.stop - begin >= RUN_ELEMENTS and (at_end or slot not in whole)
            if is_long or block.stop == layout.size:
                yield slice(begin, block.stop), Shard(block.stop - begin, held)
                begin, held = block.stop, []


def run_shards(size: int, blocks: Sequence[tuple[slice, bool]]) -> Iterator[tuple[slice, Shard]]:
    """Yield the same of `size` elements that are updated in `blocks`, in order; the last run has the rest."""
    begin, held = 0, list[tuple[slice, bool]]()
    for number, (block, decayed) in enumerate(blocks):
        held.append((slice(block.start - begin, block.stop - begin), decayed))
        is_last = number == len(blocks) - 1
        if is_last or block.stop - begin >= RUN_ELEMENTS:
            end = size if is_last else block.stop
            yield slice(begin, end), Shard(end - begin, held)
            begin, held = end, []
    if not blocks:
        yield slice(0, size), Shard(size, [])


_WILL_NEED, _PAGE_OUT = 3, 21  # of madvise(2); Python has no name for the second


class StateFile(StampedSlots):
    """The state of one rank in `folder`. For one thread.

    `again`: this is a replacement, which takes over an existing file of the same name. made: not 0 for a
    state that is recut, the epoch in which the file is made. Raises `UserError` if the folder cannot be
    written, or its disk is full.
    """

    def __init__(self, folder: Path, name: StateName, *, again: bool, made: int = 0) -> None:
        when = f"-{made}" if made else ""
        self.path, self.name = folder / f"zero-{name.place}-of-{name.ranks}{when}.state", name
        try:
            fd = self._opened(name) if again else None
            if fd is None:
                fd = self._made(folder, name)
        except OSError as error:
            raise _cannot(folder, name.nbytes, error.strerror) from error
        try:
            self._map = mmap.mmap(fd, name.nbytes)
        finally:
            os.close(fd)
        super().__init__(self._map, name)
        if made:
            self.made = made
        self._begin = address_of(self.head)
        self._hash = xxhash.xxh3_64()

    def _opened(self, name: StateName) -> int | None:
        """Return the existing file, if it is this rank's of this run and complete."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(fd).st_size == name.nbytes and os.pread(fd, NAME.size, 0) == name.encoded():
            return fd
        os.close(fd)
        return None

    def _made(self, folder: Path, name: StateName) -> int:
        """Return a new file that replaces any existing one, which another run may still have mapped."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(fd, 0, name.nbytes)  # a full disk shows here, not by a SIGBUS later
        except BaseException:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise
        return fd

    # ---- what is whole

    def begin(self, slot: int) -> None:
        """Mark the slot as incomplete."""
        super().begin(slot)
        self._hash.reset()

    def written(self, slot: int, version: int, note: Note = NO_NOTE) -> None:
        """Mark the slot as complete, with the digest of what was written since `begin`.

        `note`: what a later reader needs to know of the version.
        """
        self.put_note(slot, note)
        self.end(slot, version, self._hash.intdigest())

    def drop_damaged(self, slot: int, parts: Iterable[Sequence[Array]]) -> None:
        """Verify what a predecessor has left: mark the slot as incomplete if its digest does not match."""
        self.name_damage(slot)
        version = self.version_in(slot)
        if version is None:
            return
        found, stamped = self.computed(parts), self.digest_in(slot)
        if found != stamped:
            self.begin(slot)
            damage_logged(version, found, stamped)

    def computed(self, parts: Iterable[Sequence[Array]]) -> int:
        """Return the digest of a slot, from its parts in their order, while none is written."""
        self._hash.reset()
        for part in parts:
            self.wrote(part)
        return self._hash.intdigest()

    # ---- what is in memory

    def wrote(self, arrays: Iterable[Array]) -> None:
        """Add parts of a slot to its digest, always in one order, while they are in the cache."""
        for array in arrays:
            self._hash.update(array.data)

    def will_need(self, arrays: Iterable[Array]) -> None:
        """Have them loaded."""
        self._advise(arrays, _WILL_NEED)

    def rest(self, arrays: Iterable[Array]) -> None:
        """Let them be paged out: they are not needed for some time."""
        self._advise(arrays, _PAGE_OUT)

    def _advise(self, arrays: Iterable[Array], advice: int) -> None:
        for array in arrays:
            start = address_of(array) - self._begin
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):  # an older kernel; then it decides alone
                self._map.madvise(advice, first, start + array.nbytes - first)

    def resident_bytes(self) -> int:
        """Return the bytes of the file that are in this process's memory now, according to the kernel."""
        return counted(self._begin, len(self._map), "Rss")

    def remove(self) -> None:
        """Delete the file: nobody needs it any more. Idempotent."""
        self.path.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Delete this file, and others of the run in its folder, when the run is over. Idempotent."""
        self.remove()
        for other in found_in(self.path.parent, self.name.run) if self.made else ():
            other.path.unlink(missing_ok=True)


class FoundFile(FoundState):
    """A state file of any rank of a run, to be read. Slots are read-only."""

    def __init__(self, path: Path, memory: mmap.mmap, name: StateName) -> None:
        self.path = path
        super().__init__(memory, name)
        self.release = lambda: path.unlink(missing_ok=True)


def found_in(folder: Path, run: int) -> list[FoundFile]:
    """Return the state files of a run that are in `folder` now, of states that are recut, by name."""
    found: list[FoundFile] = []
    for path in sorted(folder.glob("zero-*-of-*.state")):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
            name = StateName.decoded(file.read(NAME.size))
            if name is not None and name.run == run and os.fstat(file.fileno()).st_size == name.nbytes:
                memory = mmap.mmap(file.fileno(), name.nbytes, prot=mmap.PROT_READ)
                found.append(FoundFile(path, memory, name))
    return [one for one in found if one.made]


def require_folder(folder: Path, *, elements: int, ranks: int, note: int = NOTE_NUMBERS) -> None:
    """Create `folder` if needed. Raise `UserError` if its disk cannot hold the files of so many ranks."""
    nbytes = StateName(run=0, place=0, ranks=ranks, elements=elements, note=note).nbytes
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _cannot(folder, nbytes, os.strerror(errno.EACCES))
        disk = os.statvfs(folder)
    except OSError as error:
        raise _cannot(folder, nbytes, error.strerror) from error
    free_bytes = disk.f_bavail * disk.f_frsize
    there = sum(path.stat().st_blocks * 512 for path in folder.glob("*.state") if path.is_file())
    if ranks * nbytes > free_bytes + there:  # those of a run before make room
        raise _cannot(folder, nbytes, f"{ranks} ranks are here, and {in_words(free_bytes)} are free")


def _cannot(folder: Path, nbytes: int, why: str | None) -> UserError:
    return UserError(
        f"the optimizer's state cannot be offloaded to {folder}, {in_words(nbytes)} a rank: {why}. Free some "
        "space, or give another folder to --offload."
    )
