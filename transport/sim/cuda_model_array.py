"""Arrays of the modelled devices of `cuda_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zbmd.transport.cuda_array import DeviceSpan

if TYPE_CHECKING:
    from zbmd.transport.sim.cuda_model import ModelProcess


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

    def __del__(self) -> None:
        process = self._process
        if not process.dead and process.host.failed is None:
            process.free(self.span.address)
