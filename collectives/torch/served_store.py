"""The store of the last meeting. This process may serve it, by threads that no forked child may join."""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

_kept: Final[list[Any]] = []


def keep_store(store: Any) -> None:
    """Keep a store in the place of the one before; None: keep none."""
    _kept[:] = [] if store is None else [store]


def _keep_for_ever() -> None:
    """Never end the store in a forked child, which has none of its threads."""
    for store in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))


os.register_at_fork(after_in_child=_keep_for_ever)
