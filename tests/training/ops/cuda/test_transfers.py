"""A state that is copied to the host beside what the device computes, with the digest of what it holds."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.devices.cuda_model import DeviceRace, ModelHost
from support.devices.kernel_numbers import by_numpy, nothing_compiled, place_sum

from zbmd.training.ops.cuda.executor import Executor
from zbmd.training.ops.cuda.transfers import StateCopy, sum_of
from zbmd.transport.cuda.api import CudaFault

SIZE = 40_000
"""More than one block of sums, and no multiple of it."""


def _held(seed: int) -> tuple[Executor, list[Any], npt.NDArray[np.float32]]:
    """Return an executor, two arrays on it, and their contents, one behind the other."""
    run = Executor(ModelHost(devices=1, run_kernel=by_numpy, seed=seed).process(), compile=nothing_compiled)
    values = np.random.default_rng(seed).standard_normal(2 * SIZE).astype(np.float32)
    return run, [run.upload(values[:SIZE]), run.upload(values[SIZE:])], values


@pytest.mark.parametrize("seed", range(3))
def test_the_host_gets_the_bits_of_the_device_and_their_digest(seed: int) -> None:
    """Other kernels run meanwhile, and the digest is that of the host's copy, also after an upload."""
    run, arrays, values = _held(seed)
    copy, slot = StateCopy(run), np.zeros(2 * SIZE, np.float32)
    assert copy.settle() == 0
    copy.begin([(arrays[0], slot[:SIZE]), (arrays[1], slot[SIZE:])])
    other = run.zeros(SIZE, np.float32)
    for _ in range(5):
        other += arrays[0]
    digest = copy.settle()
    np.testing.assert_array_equal(slot.view(np.uint32), values.view(np.uint32))
    assert digest == sum_of(slot) == place_sum(slot.view(np.uint32), 0)
    arrays[0] += arrays[1]
    copy.begin([(arrays[0], slot[:SIZE]), (arrays[1], slot[SIZE:])])
    assert copy.settle() == sum_of(slot) != digest
    copy.note(arrays)
    assert copy.settle() == sum_of(slot), "as before, with nothing copied"


def test_any_word_that_changes_changes_the_digest() -> None:
    random = np.random.default_rng(0)
    values = random.standard_normal(999).astype(np.float32)
    before = sum_of(values)
    for _ in range(200):
        changed = values.copy()
        place, bit = random.integers(999), random.integers(32)
        changed.view(np.uint32)[place] ^= np.uint32(1 << bit)
        assert sum_of(changed) != before
    places = random.permutation(999)
    assert sum_of(values[places]) != before


def test_an_update_that_does_not_wait_for_the_copy_is_found() -> None:
    run, arrays, _ = _held(0)
    copy, slot, asked = StateCopy(run), np.zeros(2 * SIZE, np.float32), threading.Event()
    copy._pool.submit(asked.wait)  # so that the copy is late
    copy.begin([(arrays[0], slot[:SIZE]), (arrays[1], slot[SIZE:])])
    arrays[0] += arrays[1]
    arrays[1] += arrays[0]
    asked.set()
    with pytest.raises((DeviceRace, CudaFault)):
        copy.settle()
        run.api.stream_synchronize(run.stream)
