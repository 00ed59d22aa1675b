"""Launches that a device refuses, and devices that are lost: what is tried again, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import ModelLaunch
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.training.ops.cuda.executor import Executor
from zbmd.transport.cuda.api import CudaFault, DeviceLost, OutOfDeviceMemory
from zbmd.transport.cuda.runtime import fault_of


class _Refusing:
    """An executor whose next launches, of kernels or of graphs, fail as told."""

    def __init__(self) -> None:
        self.run = Executor(ModelHost(devices=1, run_kernel=by_numpy).process(), compile=nothing_compiled)
        self.coming: list[CudaFault] = []
        self.array = self.run.upload(np.ones(64, np.float32))
        self.array += self.array  # which loads the kernel
        api: Any = self.run.api
        for name in ("launch_function", "graph_launch"):
            setattr(api, name, self._failing(getattr(api, name)))

    def _failing(self, original: Any) -> Any:
        def call(*given: Any) -> None:
            if self.coming:
                raise self.coming.pop()
            original(*given)

        return call

    def add(self) -> None:
        self.array += self.array


def test_a_launch_that_is_refused_is_tried_once_more() -> None:
    found = _Refusing()
    found.coming = [CudaFault("too many resources requested for launch")]
    found.add()
    with found.run.capturing() as graph:
        found.add()
    found.coming = [CudaFault("operation not supported")]
    found.run.replay(graph)
    np.testing.assert_array_equal(found.array.get(), np.full(64, 8.0))
    assert found.run.retries == 2
    found.coming = [CudaFault("again"), CudaFault("once")]
    with pytest.raises(CudaFault, match="again"):
        found.add()


@pytest.mark.parametrize("error", [DeviceLost("ECC"), OutOfDeviceMemory("no memory")])
def test_what_no_second_try_can_mend_is_not_tried_again(error: CudaFault) -> None:
    found = _Refusing()
    found.coming = [error]
    with pytest.raises(type(error)):
        found.add()
    assert not found.run.retries
    with pytest.raises(CudaFault, match="refused"), found.run.capturing():
        found.coming = [CudaFault("refused")]
        found.add()
    assert not found.run.retries, "a capture ends by it"


def test_an_error_of_a_kernel_is_the_end_of_its_context() -> None:
    """CUDA reports it at a later call, and at every one from then on."""

    def fails(launch: ModelLaunch) -> None:
        raise DeviceLost("an illegal memory access was encountered")

    run = Executor(ModelHost(devices=1, run_kernel=fails).process(), compile=nothing_compiled)
    array = run.upload(np.ones(64, np.float32))
    array += array
    for call in (array.get, lambda: run.empty(1 << 20, np.float32), array.copy):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            call()
    assert not run.retries


def test_statuses_after_which_nothing_works() -> None:
    """An ECC error, an illegal address, a failed launch; and others that leave the context whole."""
    for status in (214, 220, 700, 702, 710, 719):
        assert fault_of(status) is DeviceLost
    assert fault_of(2) is OutOfDeviceMemory
    for status in (1, 9, 98, 400, 701, 900):
        assert fault_of(status) is CudaFault
