"""Arrays of the modelled devices of `cuda_model`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

from zbmd.transport.cuda.array import DeviceSpan


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Some rows of an array, which it keeps alive."""

    base: ModelArray
    span: DeviceSpan

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See `DeviceSpan`."""
        return self.span.__cuda_array_interface__


class ArrayMemory(Protocol):
    """The process that holds an array, as the array sees it; see `cuda_model.ModelProcess`."""

    @property
    def default_stream(self) -> int:
        """The stream on which programs compute."""
        ...

    def malloc(self, nbytes: int, /) -> int:
        """Return the address of new memory."""
        ...

    def free_array(self, address: int, /) -> None:
        """Free the memory of an array."""
        ...


class ModelArray:
    """An array of a modelled device; its memory is freed when nobody holds it any more."""

    def __init__(self, memory: ArrayMemory, shape: tuple[int, ...], typestr: str) -> None:
        span = DeviceSpan(address=0, shape=shape, typestr=typestr, stream=memory.default_stream)
        self._memory = memory
        self.span = replace(span, address=memory.malloc(span.nbytes))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See `DeviceSpan`."""
        return self.span.__cuda_array_interface__

    def __getitem__(self, rows: slice) -> ModelRows:
        """Its first rows: `x[:n]`, as of any library's array."""
        count = len(range(*rows.indices(self.span.shape[0])))
        if rows.indices(self.span.shape[0])[::2] != (0, 1):
            raise IndexError(f"{rows} are not the first rows")
        return ModelRows(self, replace(self.span, shape=(count, *self.span.shape[1:])))

    def __del__(self) -> None:
        self._memory.free_array(self.span.address)
