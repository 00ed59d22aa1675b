"""PyTorch tensors on a modelled device: what is asked of them is queued on streams of `cuda_model`.

Every operation of PyTorch works: its shape comes from the `meta` device, its values, when the model runs it,
from the CPU's kernel. So what nothing orders runs in any order, and races are found.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from support.devices.cuda_model import ModelHost, ModelProcess
from support.devices.device_worlds import load_kernel
from zbmd.collectives.torch.cuda.devices import SEAM
from zbmd.transport.cuda.api import CudaApi

torch: Any = importlib.import_module("torch")
pytree: Any = importlib.import_module("torch.utils._pytree")
backends: Any = importlib.import_module("torch.utils.backend_registration")

KIND = "cudamodel"


class Memory:
    """An allocation; freed memory stays, as with PyTorch's allocator, which calls cudaFree hardly ever."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address = DEVICES.process.malloc(nbytes)


class ModelTensor(torch.Tensor):
    """meta: its dtype, shape, strides and offset. memory: of its storage."""

    meta: Any
    memory: Memory

    @staticmethod
    def __new__(cls, meta: Any, memory: Memory) -> ModelTensor:
        made: ModelTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            dtype=meta.dtype,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            device=torch.device(KIND, DEVICES.process.device),
        )
        made.meta, made.memory = meta, memory
        return made

    def __init__(self, meta: Any, memory: Memory) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<ModelTensor {self.dtype} {list(self.shape)}>"

    def over(self, data: Any) -> Any:
        """A CPU tensor like this one over the bytes of its memory."""
        if not data.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        whole = torch.from_numpy(data)
        usable = whole[: data.nbytes // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return usable.as_strided(self.meta.shape, self.meta.stride(), self.meta.storage_offset())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default and torch.device(kwargs.get("device", KIND)).type == "cpu":
            return _to_host(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], ModelTensor):
            return args[0].copy_(_to_host(args[1]))
        if func is torch.ops.aten.equal.default:
            return torch.equal(*(_to_host(each) for each in args))
        if func is torch.ops.aten._local_scalar_dense.default:
            return _to_host(args[0]).item()
        kwargs.pop("device", None)
        with torch.inference_mode(False):
            return _queued(func, args, kwargs)


def _to_host(tensor: Any) -> Any:
    if not isinstance(tensor, ModelTensor):
        return tensor
    found: list[Any] = []
    process, stream = DEVICES.process, DEVICES.stream(0)
    reads = [(tensor.memory.address, tensor.memory.nbytes)]
    empty = np.empty(0, np.uint8)
    process.kernel(
        stream, reads, [], lambda got, _: found.append(tensor.over(got[0] if got else empty).clone())
    )
    process.stream_synchronize(stream)
    return found[0]


def _queued(func: Any, args: Any, kwargs: Any) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, ModelTensor)]
    # What lies on the host is read when it is asked for, as a copy from ordinary memory is.
    flat = [each.clone() if type(each) is torch.Tensor else each for each in flat]
    meta = [each.meta if isinstance(each, ModelTensor) else each for each in flat]
    meta = [each.to("meta") if type(each) is torch.Tensor else each for each in meta]
    m_args, m_kwargs = pytree.tree_unflatten(meta, spec)
    shaped = func(*m_args, **m_kwargs)
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    if alias is not None and not alias.is_write:  # a view
        return ModelTensor(shaped, tensors[0].memory)
    in_place = alias is not None
    outs = (
        [args[0]]
        if in_place
        else [ModelTensor(each, Memory(_nbytes(each))) for each in pytree.tree_leaves(shaped)]
    )
    memories = {id(each.memory): each.memory for each in tensors}
    written = {id(each.memory): each.memory for each in outs}
    read = [memory for key, memory in memories.items() if key not in written]

    def run(inputs: list[Any], outputs: list[Any]) -> None:
        data = dict(zip([id(each) for each in read if each.nbytes], inputs, strict=True))
        data |= dict(zip([id(each) for each in written.values() if each.nbytes], outputs, strict=True))
        empty = np.empty(0, np.uint8)
        here = [
            each.over(data.get(id(each.memory), empty)) if isinstance(each, ModelTensor) else each
            for each in flat
        ]
        c_args, c_kwargs = pytree.tree_unflatten(here, spec)
        with torch.inference_mode(False), torch.no_grad():
            found = func(*c_args, **c_kwargs)
        if not in_place:
            for out, value in zip(outs, pytree.tree_leaves(found), strict=True):
                out.over(data.get(id(out.memory), empty)).copy_(value)

    DEVICES.process.kernel(
        DEVICES.stream(0),
        [(each.address, each.nbytes) for each in read],
        [(each.address, each.nbytes) for each in written.values()],
        run,
    )
    return outs[0] if in_place or not isinstance(shaped, list | tuple) else outs


def _nbytes(meta: Any) -> int:
    if not meta.numel():
        return 0
    reach = sum((size - 1) * step for size, step in zip(meta.shape, meta.stride(), strict=True))
    return (meta.storage_offset() + reach + 1) * meta.dtype.itemsize


class ModelDevices:
    """See `zbmd.collectives.torch.cuda.devices.Devices`: one modelled device."""

    kind = KIND
    process: ModelProcess

    def __init__(self) -> None:
        self._current = threading.local()
        self.visible, self.chosen = 1, 0

    def why_none(self) -> str:
        """See `Devices`."""
        return ""

    def count(self) -> int:
        """See `Devices`."""
        return self.visible

    def current(self) -> int:
        """See `Devices`."""
        return self.chosen

    def stream(self, index: int) -> int:
        """See `Devices`."""
        return int(getattr(self._current, "stream", self.process.default_stream))

    def is_capturing(self) -> bool:
        """See `Devices`."""
        return False

    @contextmanager
    def on_stream(self, index: int, stream: int) -> Generator[None]:
        """See `Devices`."""
        before, self._current.stream = self.stream(index), stream
        try:
            yield
        finally:
            self._current.stream = before

    def address(self, tensor: ModelTensor) -> int:
        """See `Devices`."""
        return tensor.memory.address + tensor.meta.storage_offset() * tensor.dtype.itemsize

    def of_futures(self, index: int) -> None:
        """None: PyTorch has no streams for the callbacks of a device that is made in Python."""

    def api(self, index: int) -> CudaApi:
        """See `Devices`."""
        return self.process


DEVICES = ModelDevices()
_FACTORIES: Any = torch.library.Library("aten", "IMPL")


def _empty(size: Any, *, dtype: Any = None, **_: Any) -> ModelTensor:
    """Return memory on the device, as C++ asks for it: the buckets of DDP."""
    return _made(torch.empty(size, dtype=dtype, device="meta"))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> ModelTensor:
    return _made(torch.empty_strided(size, stride, dtype=dtype, device="meta"))


def _made(meta: Any) -> ModelTensor:
    return ModelTensor(meta, Memory(_nbytes(meta)))


def install(seed: int) -> ModelDevices:
    """Have this process compute on a modelled device, whose order of streams the seed draws."""
    backends._setup_privateuseone_for_python_backend(KIND)
    for name, made in (("empty.memory_format", _empty), ("empty_strided", _empty_strided)):
        _FACTORIES.impl(name, made, "PrivateUse1")
    DEVICES.process = ModelHost(devices=1, seed=seed, shares=True, load_kernel=load_kernel).process()
    SEAM.devices = DEVICES
    return DEVICES


def put(host: Any) -> Any:
    """Return a copy on the device, contiguous or not as it is there; the current stream makes it."""
    return _made(host.to("meta").as_strided(host.shape, host.stride())).copy_(host)


def get(tensor: Any) -> Any:
    """Return the values, as the current stream sees them."""
    return tensor.cpu()
