from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

from zbmd.transport._native import Mapping
from zbmd.transport.region import RegionHandle
from zbmd.transport.transfer import Transfer

class ShmRegion:
    """A peer's region in shared memory: see `zbmd.transport.region.RemoteRegion`."""

    def __init__(self, own: Mapping, our_slot: int, peer: Mapping, handle: RegionHandle) -> None:
        """Raises RemoteProtocolError if the handle does not fit the peer's mapping."""
    @property
    def handle(self) -> RegionHandle: ...
    def put(self, src: Buffer | NDArray[Any], offset: int = 0, *, channel: int, value: int) -> Transfer: ...
    def get(self, into: Buffer | NDArray[Any], offset: int = 0) -> Transfer: ...
    def notify(self, channel: int, value: int) -> None: ...
    def view(self, offset: int = 0, nbytes: int | None = None) -> memoryview: ...
    def close(self) -> None: ...
