"""A GPU as a supervised device, through the array-module seam. Not tried on hardware yet."""

from __future__ import annotations

from types import ModuleType

from zbmd.training.autograd.array_module import xp_for
from zbmd.transport.errors import UserError

CHECK_ELEMENTS = 1 << 20


class CudaDevice:
    """The GPU of that index among those that are visible: see `zbmd.actors.process_pool.devices.Device`."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._xp: ModuleType | None = None

    def bind(self) -> None:
        """Make it the current device of this process. Raises `UserError` without cupy or such a GPU."""
        xp = xp_for("cuda")
        count = int(xp.cuda.runtime.getDeviceCount())
        if self._index >= count:
            raise UserError(f"there is no GPU {self._index}: {count} are visible.")
        xp.cuda.Device(self._index).use()
        self._xp = xp

    def check(self) -> str:
        """Compute a sum there; what is wrong, or nothing."""
        assert self._xp is not None, "bind comes first"
        xp = self._xp
        try:  # cupy's CUDA errors share no importable base class
            with xp.cuda.Device(self._index):
                found = int(xp.arange(CHECK_ELEMENTS, dtype=xp.int64).sum())
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        wanted = CHECK_ELEMENTS * (CHECK_ELEMENTS - 1) // 2
        return "" if found == wanted else f"GPU {self._index} computes {found} for {wanted}"
