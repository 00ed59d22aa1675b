"""Modelled devices whose kernels are those of the GPU, compiled for this processor."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.devices.cuda_model import ModelArray, ModelHost, ModelProcess
from zbmd.collectives.device.arrays import CUDA
from zbmd.transport.cuda.api import DeviceKernels
from zbmd.transport.cuda.array import DeviceSpan
from zbmd.transport.native._native import address_of

Array = NDArray[Any]


@cache
def library(source: str) -> ctypes.CDLL:
    """Kernels as functions of one thread. Floats are not contracted, as on the device."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    with tempfile.TemporaryDirectory() as folder:
        code, made = Path(folder) / "kernels.c", Path(folder) / "kernels.so"
        code.write_text(source)
        flags = ["-O1", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-shared", "-fPIC", "-w"]
        subprocess.run([compiler, *flags, "-o", made, code], check=True)
        return ctypes.CDLL(str(made))


def load_kernel(kernels: DeviceKernels, name: str) -> Callable[..., None]:
    """See `LoadKernel`."""
    function = library(kernels.source)[name]
    function.restype = None

    def call(*arguments: int) -> None:
        function(*(ctypes.c_uint64(argument) for argument in arguments))

    return call


def model_host(devices: int = 1, seed: int = 0) -> ModelHost:
    """A host whose memory `CUDA.find` finds from now on, in this process."""
    host = ModelHost(devices=devices, seed=seed, load_kernel=load_kernel)
    CUDA.find = host.owner_of
    return host


class Strided:
    """A view of an array on a device, with strides in bytes."""

    def __init__(self, base: ModelArray, span: DeviceSpan) -> None:
        self.base = base
        self.span = span

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.span.__cuda_array_interface__


def on_device(process: ModelProcess, values: Array) -> ModelArray:
    """A copy of it there, not yet made: a stream has been asked for it."""
    array = process.new_array(values.shape, values.dtype.str)
    held = np.ascontiguousarray(values)
    array.held = held  # type: ignore[attr-defined]
    if held.nbytes:
        process.memcpy_async(array.span.address, address_of(held), held.nbytes, process.default_stream)
    return array


def of_device(array: Any, dtype: np.dtype[Any]) -> Array:
    """The contents of a device's array, as its own stream sees it."""
    span: DeviceSpan = array.span
    process = CUDA.find(span.address)
    into = np.empty(span.shape, dtype)
    if into.nbytes:
        stream = span.stream or 1
        process.memcpy_async(address_of(into), span.address, into.nbytes, stream)
        process.stream_synchronize(stream)
    return into
