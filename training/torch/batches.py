"""The batches of a run: each committed step takes one, a repeated step the same one again.

The position in a pass is the number of committed steps; a replacement skips so many batches without loading
them. Supported are `DataLoader`, loaders with a state (`StatefulDataLoader`), and anything that can be
iterated again for each pass, which is read up to the position.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

from zbmd.transport.errors import UserError

torch: Any = importlib.import_module("torch")
data: Any = importlib.import_module("torch.utils.data")

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
        yield first
        yield from batches

    def __len__(self) -> int:
        return max(0, len(self._inner) - self._skip)


def check(loader: Any) -> None:
    """Raise `UserError` for a loader that cannot be continued; warn of one that cannot skip."""
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


def has_state(loader: Any) -> bool:
    """Return whether a loader can say where it is, and go on there."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def is_map_style(loader: Any) -> bool:
    """Return whether it is a `DataLoader` with a batch sampler."""
    return isinstance(loader, data.DataLoader) and getattr(loader, "batch_sampler", None) is not None


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


def opened(loader: Any, *, number: int, skip: int, seed_for: SeedFor, step: int) -> Iterator[Any]:
    """Return the batches of pass `number` behind the first `skip`. step: the number of the first of them."""
    begin_pass(loader, number)
    if is_map_style(loader):
        skipping: Iterator[Any] = iter(_skipping(loader, number, skip, seed_for, step))
        return skipping
    seed_for("pass", number)
    batches: Iterator[Any] = iter(loader)
    for taken in range(skip):
        seed_for("batch", step - skip + taken)
        if next(batches, None) is None:
            break
    return batches


def _skipping(loader: Any, number: int, skip: int, seed_for: SeedFor, step: int) -> Any:
    """Return a loader with the same settings, which skips without loading."""
    sampler = SkippingBatches(
        loader.batch_sampler, skip, lambda: seed_for("pass", number), lambda: seed_for("batch", step)
    )
    settings = {name: getattr(loader, name) for name in _SETTINGS if hasattr(loader, name)}
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
    if loader.persistent_workers:  # of the user's loader; those of a pass end with it
        settings["persistent_workers"] = False
    if not settings.get("pin_memory_device"):
        settings.pop("pin_memory_device", None)
    seed_for("workers", number)
    return data.DataLoader(loader.dataset, batch_sampler=sampler, **settings)


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
