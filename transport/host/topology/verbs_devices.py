"""The RDMA devices of this host, by pyverbs, which is imported only when it is asked for.

pyverbs belongs to the distribution's rdma-core (`apt install python3-pyverbs`, for the distribution's own
Python); its source on PyPI builds only against a matching libibverbs.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from zbmd.transport.errors import UserError


def verbs_missing() -> str | None:
    """Why pyverbs cannot be used here, in a few words; None if it can."""
    try:
        import_module("pyverbs.device")
    except ImportError as error:
        return str(error)
    return None


def rdma_devices() -> tuple[str, ...]:
    """The names of the RDMA devices, such as `mlx5_0` or `rxe0`; empty if there is none.

    Raises `UserError` if pyverbs is missing, does not fit this Python, or cannot list devices.
    """
    try:
        verbs = import_module("pyverbs.device")
    except ImportError as error:
        raise UserError(
            f"RDMA needs pyverbs, which cannot be imported ({error}). Install the distribution's "
            "python3-pyverbs, or pip install 'zbmd[rdma]' where libibverbs and its headers are."
        ) from error
    try:
        devices: list[Any] = verbs.get_device_list()
    except (OSError, RuntimeError) as error:
        raise UserError(f"the RDMA devices cannot be listed: {error}. Is the driver loaded?") from error
    return tuple(device.name.decode() for device in devices)
