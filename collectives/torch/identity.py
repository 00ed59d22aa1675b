"""Name, ranks, timeout and other attributes of a process group; the base class raises without them.

Needs PyTorch; imported by `process_group` alone.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from zbmd.collectives.communicator.operations import TIMEOUT_S_MAX
from zbmd.collectives.group.group import OPERATIONS_IN_FLIGHT_MAX, Group
from zbmd.collectives.torch.memory import Buckets, empty_if_there_is_room

torch: Any = importlib.import_module("torch")

WORKS_KEPT = OPERATIONS_IN_FLIGHT_MAX
"""The latest work objects: C++ may hold one that Python has dropped, and its methods are Python's."""


class Unmade:
    """In the place of a group that a replacement cannot make before it meets the others."""

    direct = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def abort(self, reason: str = "") -> None:
        """Do nothing: nothing is in flight."""


class Identity:
    """The methods of a process group that carry nothing out."""

    _closed = False

    def __init__(
        self, group: Group | Unmade, store: Any, timeout_s: float, name: str, ranks: Sequence[int]
    ) -> None:
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]
        self._bind(group)
        self.ranks = tuple(ranks)
        """Ranks of the default group; none for that itself."""
        self.ranks_of: Callable[[int, int], Sequence[int]] | None = None
        """Returns those of this group for a rank of a default group of another size; None: they stay."""
        self._store = store
        self._set_limit(timeout_s)
        self._name, self._description = name, "undefined"
        self._calls = 0
        self._kept: deque[Any] = deque(maxlen=WORKS_KEPT)

    @property
    def title(self) -> str:
        """The name of the group in errors: its description, or its name in torch."""
        return f"group {self._name}" if self._description == "undefined" else self._description

    @property
    def is_closed(self) -> bool:
        """Whether it has been shut down."""
        return self._closed

    @property
    def made(self) -> Group | None:
        """The group below it; None before a replacement has met the others."""
        return None if isinstance(self._group, Unmade) else self._group

    @property
    def limit_s(self) -> float:
        """The time limit of operations that state none, seconds."""
        return self._timeout_s

    def rebind(self, made: Group) -> None:
        """Go on with the same ranks in a group of another epoch."""
        self._bind(made)
        self._calls = 0

    def _bind(self, group: Group | Unmade) -> None:
        self._group: Any = group
        self._own_rank, self._group_size = int(group.rank), int(group.size)

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    bound_device_id = None

    def rank(self) -> int:
        """Return the rank of this process in the group."""
        return self._own_rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self._group_size

    def name(self) -> str:
        """Return the name of the backend."""
        return "zbmd"

    getBackendName = _get_backend_name = name

    def get_group_store(self) -> Any:
        """Return the store that torch keeps for it."""
        return self._store

    @property
    def group_name(self) -> str:
        """Its name in torch."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Its description in torch."""
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getGroupName(self) -> str:
        """As `group_name`, for C++."""
        return self._name

    def getGroupDesc(self) -> str:
        """As `group_desc`, for C++."""
        return self._description

    setGroupName = _set_group_name
    setGroupDesc = _set_group_desc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device("cpu"), torch.device("cuda")]

    def _get_backend(self, device: Any) -> Any:
        companions = getattr(self, "companions", None)
        found = None if companions is None or device is None else companions.backend(device.type)
        return self if found is None else found

    def supports_tensor_alloc(self, device: Any = None) -> bool:
        """Return whether it has memory of its own for tensors there: in that of the host."""
        return device is None or device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any = None) -> Any:
        """Return a flat tensor in the arena; in ordinary memory if there is no room."""
        del device
        return empty_if_there_is_room(size, dtype)

    buckets: Buckets | None = None
    """Moves gradients to the arena as they are reduced; see `use_arena`."""

    def eager_connect_single_device(self, _: Any = None) -> None:
        """Do nothing: it is connected from its beginning."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of operations that state none."""
        self._set_limit(min(timeout.total_seconds(), TIMEOUT_S_MAX))

    _set_default_timeout = set_timeout

    def _set_limit(self, timeout_s: float) -> None:
        self._timeout_s, self._timeout_ns = timeout_s, round(timeout_s * 1e9)

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        for work in list(self._kept):
            if not work.is_completed():
                work.wait()

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are counted from 0 on all ranks."""
