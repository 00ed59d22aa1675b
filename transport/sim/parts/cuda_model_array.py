"""Arrays of the modelled devices of `cuda_model`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zbmd.transport.cuda.array import DeviceSpan

if TYPE_CHECKING:
    from zbmd.transport.sim.parts.cuda_model import ModelProcess


@dataclass(frozen=True, slots=True)
class ModelRows:
    """Some rows of an array, which it keeps alive."""

    base: ModelArray
    span: DeviceSpan

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See `DeviceSpan`."""
        return self.span.__cuda_array_interface__


class ModelArray:
    """An array of a modelled device, until nobody has it any more."""

    def __init__(self, process: ModelProcess, shape: tuple[int, ...], typestr: str) -> None:
        nbytes = DeviceSpan(address=0, shape=shape, typestr=typestr).nbytes
        self._process = process
        self.span = DeviceSpan(
            address=process.malloc(nbytes), shape=shape, typestr=typestr, stream=process.default_stream
        )

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
        process = self._process
        if not process.dead and process.host.failed is None:
            process.free(self.span.address)
