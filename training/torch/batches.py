"""The batches of a run: each committed step takes one, a repeated step the same one again.

The position in a pass is the number of committed steps; a replacement skips so many batches without loading
them. Supported are `DataLoader`, loaders with a state (`StatefulDataLoader`), and anything that can be
iterated again for each pass, which is read up to the position. `Source` knows what identifies each batch.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import xxhash

from zbmd.training.run.loop_steps import Deal, Drawn, Ids, ids_max
from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
data: Any = importlib.import_module("torch.utils.data")
distributed: Any = importlib.import_module("torch.utils.data.distributed")

_SETTINGS: Final = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "persistent_workers", "pin_memory_device", "in_order"),
)
SeedFor = Callable[[str, int], None]
"""Takes a purpose and its number, and seeds random numbers for them."""


class SkippingBatches:
    """The batches of a batch sampler behind the first `skip`: a batch sampler itself, for one pass.

    The sampler's numbers depend on the pass alone, those of the first batch on its own number.
    """

    def __init__(self, inner: Any, skip: int, seed_pass: Callable[[], None], seed_batch: Callable[[], None]):
        self._inner, self._skip = inner, skip
        self._seed_pass, self._seed_batch = seed_pass, seed_batch
        self.dealt: deque[Any] = deque()
        """Indices of the batches that have been asked for, and not yet been taken out here."""

    def __iter__(self) -> Iterator[Any]:
        self._seed_pass()
        batches = iter(self._inner)
        for _ in range(self._skip):
            if next(batches, None) is None:
                return
        first = next(batches, None)
        if first is None:
            return
        self._seed_batch()
        for batch in itertools.chain([first], batches):
            self.dealt.append(batch)
            yield batch

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._skip)


class RecordedBatches:
    """The batch sampler `inner` of a `StatefulDataLoader`, which notes the indices of each batch.

    It deals them to workers ahead of the loop, and a loader that goes on from a state begins in the middle.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.dealt: dict[int, Any] = {}
        """By the batch's number in the pass, until it is taken out here."""

    def __iter__(self) -> Iterator[Any]:
        return _Recorded(iter(self.inner), self.dealt, self.inner.batch_size)

    def __len__(self) -> int:
        return len(self.inner)


class _Recorded(Iterator[Any]):
    """Has the state that `inner` has, which counts samples."""

    def __init__(self, inner: Any, dealt: dict[int, Any], batch_size: int) -> None:
        self._inner, self._dealt, self._batch_size = inner, dealt, batch_size

    def __next__(self) -> Any:
        number = self._inner.samples_yielded // self._batch_size
        self._dealt[number] = batch = next(self._inner)
        return batch

    def state_dict(self) -> Any:
        """Return the state of the batch sampler's iterator."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Go on in such a state."""
        self._inner.load_state_dict(state)


def _recorded(loader: Any) -> dict[int, Any] | None:
    """Have a `StatefulDataLoader` note the indices of its batches; None if it is not known how it deals."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, RecordedBatches):
        batches.dealt.clear()
        return batches.dealt
    if not is_map_style(loader) or not getattr(loader, "in_order", True):
        return None
    if not _is(batches, "BatchSampler") or not type(batches).__module__.startswith("torchdata."):
        return None
    recorded = RecordedBatches(batches)
    object.__setattr__(loader, "batch_sampler", recorded)  # which a loader itself refuses once it is made
    return recorded.dealt


def check(loader: Any) -> None:
    """Raise `UserError` for a loader that cannot be continued; warn of one that cannot skip."""
    check_prepared(loader)
    if isinstance(loader, Iterator) and not has_state(loader):
        raise UserError(
            f"{type(loader).__name__} can be iterated once, and a replacement has to begin again: give "
            "run.batches() a DataLoader, or an object that makes a new iterator for each pass"
        )
    if is_map_style(loader) or has_state(loader):
        return
    warnings.warn(
        f"{type(loader).__name__} cannot skip: a replacement reads all batches up to the step under way",
        RuntimeWarning,
        stacklevel=3,
    )


def check_prepared(loader: Any) -> None:
    """Raise `UserError` for a loader of accelerate of which a replacement cannot have its batches."""
    if type(loader).__name__ == "DataLoaderDispatcher":
        raise UserError(
            "rank 0 loads the batches of all ranks, and others would miss them with it: set dispatch_batches "
            "to False in the accelerator's configuration"
        )
    if hasattr(loader, "base_dataloader") and has_state(loader):
        raise UserError(
            "a StatefulDataLoader that accelerate has prepared cannot be continued: set "
            "use_stateful_dataloader to False in the accelerator's configuration"
        )
    if getattr(loader, "synchronized_generator", None) is not None:
        raise UserError(
            "ranks agree on the order of samples by sending the state of a generator: set "
            "use_seedable_sampler to True in the accelerator's configuration"
        )


def has_state(loader: Any) -> bool:
    """Return whether a loader can say where it is, and go on there."""
    loader = getattr(loader, "base_dataloader", loader)  # accelerate's have the methods, whatever they wrap
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def is_map_style(loader: Any) -> bool:
    """Return whether it is a `DataLoader` with a batch sampler of indices."""
    return (
        isinstance(loader, data.DataLoader)
        and getattr(loader, "batch_sampler", None) is not None
        and not isinstance(loader.dataset, data.IterableDataset)
    )


def begin_pass(loader: Any, number: int) -> None:
    """Tell samplers, and what else wants to know, the number of the pass."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for each in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
    ):
        set_epoch: Callable[[int], object] | None = getattr(each, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(number)


class Source(Iterator[Any]):
    """The batches of pass `number` behind the first `skip`.

    step: the number of the first of them. ranks: of the loop. state: of a loader with one, where it is to go
    on.
    """

    def __init__(
        self,
        loader: Any,
        *,
        number: int,
        skip: int,
        seed_for: SeedFor,
        step: int,
        ranks: int,
        state: Any = None,
    ) -> None:
        begin_pass(loader, number)
        self._loader, self._number, self._next, self._ranks = loader, number, skip, ranks
        self._indices: Any = None
        self._deal: Deal | None = None
        self._dealt: deque[Any] | None = None
        self._recorded: dict[int, Any] | None = None
        self._batches = self._opened(skip, seed_for, step, state)

    def _opened(self, skip: int, seed_for: SeedFor, step: int, state: Any) -> Iterator[Any]:
        loader, number = self._loader, self._number
        if has_state(loader):
            self._recorded = _recorded(loader)
            if self._recorded is not None:
                self._deal = deal_of(loader, self._ranks)
            if skip:
                loader.load_state_dict(state)
            else:
                seed_for("pass", number)
            stateful: Iterator[Any] = iter(loader)
            return stateful
        if is_map_style(loader):
            sampler = SkippingBatches(
                loader.batch_sampler, skip, lambda: seed_for("pass", number), lambda: seed_for("batch", step)
            )
            if getattr(loader, "in_order", True):
                self._dealt, self._deal = sampler.dealt, deal_of(loader, self._ranks)
            seed_for("workers", number)
            skipping: Iterator[Any] = iter(_like(loader, sampler))
            return skipping
        seed_for("pass", number)
        batches: Iterator[Any] = iter(loader)
        for taken in range(skip):
            seed_for("batch", step - skip + taken)
            if next(batches, None) is None:
                break
        return batches

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._indices = self._dealt.popleft() if self._dealt else None
        if self._recorded is not None:
            self._indices = self._recorded.pop(self._next, None)
        self._next += 1
        return batch

    @property
    def drawn(self) -> Drawn:
        """Return what identifies the last batch."""
        place = (self._number, self._next - 1)
        ids = None if self._indices is None else _whole(self._indices)
        kind = Ids.BATCH if ids is None else Ids.SAMPLES if len(ids) <= ids_max(self._ranks) else Ids.DIGEST
        if kind is Ids.DIGEST:
            assert ids is not None
            ids = (xxhash.xxh3_64_intdigest(np.array(ids, np.int64).data) >> 1, len(ids))
        return Drawn(
            kind=kind,
            of_pass=place[0],
            batch=place[1],
            ids=place if ids is None else ids,
            batches=_length(self._loader),
            deal=self._deal if kind is not Ids.BATCH else None,
        )


def _whole(indices: Any) -> tuple[int, ...] | None:
    """Return indices as integers of 64 bits; None if they are something else."""
    try:
        found = tuple(operator.index(each) for each in indices)
    except TypeError:
        return None
    return found if all(-(1 << 63) <= each < 1 << 63 for each in found) else None


def _length(loader: Any) -> int:
    """Return the number of batches of a pass; -1: unknown. An iterable's is only what it claims."""
    if not is_map_style(loader):
        return -1
    try:
        return len(loader)
    except TypeError:
        return -1


def _like(loader: Any, sampler: Any) -> Any:
    """Return a loader with the same settings, which skips without loading."""
    settings = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    if loader.persistent_workers:  # of the user's loader; those of a pass end with it
        settings["persistent_workers"] = False
    if not settings.get("pin_memory_device"):
        settings.pop("pin_memory_device", None)
    return data.DataLoader(loader.dataset, batch_sampler=sampler, **settings)


def has_shares(loader: Any) -> bool:
    """Return whether the batches come from a `DistributedSampler`, which can be made again for each share."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return is_map_style(loader) and not has_state(loader) and _is(sampler, "DistributedSampler")


def of_share(loader: Any, share: int, shares: int) -> Any:
    """Return a loader of the batches that rank `share` of `shares` ranks would have.

    Raises `UserError` for one whose batches do not come from a `DistributedSampler`.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    if not has_shares(loader):
        raise UserError(
            f"{type(loader).__name__}: several shares of a batch on one rank (exact=…, --on-loss shrink) "
            "take a DataLoader with a DistributedSampler, which says what each share has"
        )
    own = distributed.DistributedSampler(
        sampler.dataset, shares, share, sampler.shuffle, sampler.seed, sampler.drop_last
    )
    return _like(loader, type(batches)(own, batches.batch_size, batches.drop_last))


class SharesOfPass:
    """The batches of a pass, of each logical share that this rank has.

    opened: returns the batches of a share, from the step under way on. seed: seeds the draws of a share.
    """

    def __init__(self, opened: Callable[[int], Source], seed: Callable[[int], None]) -> None:
        self._open, self._seed = opened, seed
        self._sources: dict[int, Source] = {}
        self._at = -1
        """The number of the step under way in its pass."""
        self.batches: list[tuple[Marks, Drawn]] = []
        """Of the step under way, one for each share, and what identifies it; empty: the pass is over."""

    def draw(self, shares: Sequence[int], at: int) -> None:
        """Go on to the batches of step `at` of the pass; the others may be further than the next one."""
        if self._sources.keys() != {*shares} or at != self._at + 1:
            self._sources = {share: self._open(share) for share in shares}
        self._at, self.batches = at, []
        for share, source in self._sources.items():
            self._seed(share)
            for batch in itertools.islice(source, 1):
                self.batches.append((Marks(batch), source.drawn))

    def repeat(self, shares: Sequence[int]) -> None:
        """Have the batches of the step again: loaded again if code has changed them, or for other shares."""
        if self._sources.keys() != {*shares} or any(marks.is_changed for marks, _ in self.batches):
            self._sources = {}
            self.draw(shares, self._at)


class Marks:
    """A batch, and whether code has changed its tensors since."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._versions = [(tensor, tensor._version) for tensor in _tensors_of(batch)]

    @property
    def is_changed(self) -> bool:
        """Whether a tensor of it was written in place (through torch: numpy's writes leave no trace)."""
        return any(tensor._version != version for tensor, version in self._versions)


def _tensors_of(value: Any, depth: int = 0) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for each in value for tensor in _tensors_of(each, depth + 1)] if depth < 8 else []


def state_of(loader: Any) -> Any:
    """Return where a loader with a state is."""
    return copy.deepcopy(loader.state_dict())


# ---- what samplers deal

_MODULES: Final = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Of samplers that are known; subclasses may deal as they like."""


def deal_of(loader: Any, ranks: int) -> Deal | None:
    """Return what the samplers of a map-style loader deal to `ranks` ranks; None: they are not known."""
    batches = loader.batch_sampler
    if isinstance(batches, RecordedBatches):
        batches = batches.inner
    if not _is(batches, "BatchSampler"):
        return None
    sampler = batches.sampler
    try:
        if _is(sampler, "DistributedSampler", "StatefulDistributedSampler"):
            return _distributed(sampler, batches, ranks)
        if _is(sampler, "SequentialSampler"):
            return _of_each(len(sampler.data_source), len(sampler.data_source), batches)
        if _is(sampler, "RandomSampler"):
            whole = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
            return _of_each(len(sampler), len(sampler.data_source), batches) if whole else None
        if _is(sampler, "SubsetRandomSampler"):
            unlike = len(set(sampler.indices)) == len(sampler.indices)
            return _of_each(len(sampler.indices), len(loader.dataset), batches) if unlike else None
    except TypeError:  # a dataset without a length
        return None
    return None


def _is(value: Any, *names: str) -> bool:
    kind = type(value)
    return kind.__name__ in names and f"{kind.__module__}.".startswith(_MODULES)


def _of_each(samples: int, below: int, batches: Any) -> Deal:
    left_out = samples % batches.batch_size if batches.drop_last else 0
    return Deal(samples=samples, below=below, together=False, left_out=left_out)


def _distributed(sampler: Any, batches: Any, ranks: int) -> Deal | None:
    if sampler.num_replicas != ranks:
        return None
    samples, dealt = len(sampler.dataset), sampler.total_size
    left_out = max(0, samples - dealt)
    if batches.drop_last:
        left_out += ranks * (sampler.num_samples % batches.batch_size)
    return Deal(
        samples=samples,
        below=samples,
        together=True,
        again=max(0, dealt - samples),
        left_out=left_out,
    )
