"""Backends beside ours in one process group, as of `cpu:zbmd,cuda:nccl`: their communicators, epoch by epoch.

The membership is ours. NCCL does not notice that a rank has died: its kernels wait for ever. So on the
notice of a death the communicators of the groups with that rank are aborted, which ends what waits for them,
and when the group goes on in another epoch they are made again, with the same ranks and options.

`CompanionMachine` decides that, `Companions` does it. Needs PyTorch.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Final, assert_never

import numpy as np
import structlog

from zbmd.collectives.torch.cuda.companion_machine import (
    Abort,
    Closed,
    CompanionMachine,
    Event,
    Lost,
    Made,
    Make,
    Shutdown,
)
from zbmd.transport.errors import UserError, ZbmdError
from zbmd_autoload import BACKEND

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

log: Final = structlog.stdlib.get_logger("zbmd.collectives.torch")

ERROR_HANDLING: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""With another value than 0, a thread of PyTorch ends the process when a rank of a communicator has ended."""


class Companions:
    """The backends of one process group beside ours, by the type of device whose tensors they take.

    wanted: their names; options: NCCL's, if the script has given any; name, ranks: of the process group. From
    any thread.
    """

    def __init__(self, wanted: Mapping[str, str], options: Any, name: str, ranks: Sequence[int]) -> None:
        self.wanted = dict(wanted)
        self._options, self._name, self._ranks = options, name, list(ranks)
        self._rank = self._size = 0
        self._machine = CompanionMachine()
        self._backends: dict[str, Any] = {}
        self._lock = threading.RLock()

    def made(self, epoch: int, store: Any, timeout_s: float, *, rank: int, size: int) -> None:
        """Make communicators for a new epoch. Raises `UserError`, and what their backends raise.

        store: the same on all ranks, of this epoch. rank, size: in the group of this epoch.
        """
        self._rank, self._size = rank, size

        def make() -> None:
            for device, name in self.wanted.items():
                place = dist.PrefixStore(f"zbmd/{self._name}/{epoch}/{device}", store)
                self._backends[device] = self._new(device, name, place, timedelta(seconds=timeout_s))

        self._handle(Made(epoch), make)

    def lost(self, error: ZbmdError, epoch: int = 0) -> None:
        """Abort the communicators of an epoch, 0 for that under way. Waits until they are. Idempotent."""
        self._handle(Lost(epoch, error))

    def close(self) -> None:
        """Give them up, with the process group."""
        self._handle(Closed())

    def backend(self, device: str) -> Any:
        """Return the backend of a type of device; None if it is ours. Raises why it was aborted."""
        if device not in self.wanted:
            return None
        self.require_whole()
        return self._backends.get(device)

    def require_whole(self) -> None:
        """Raise why they were aborted, if they were: operations of theirs may have ended without results."""
        if self._machine.error is not None:
            raise self._machine.error

    def _handle(self, event: Event, make: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            for action in self._machine.handle(event):
                match action:
                    case Make():
                        make()
                    case Abort():
                        self._end("abort")
                    case Shutdown():
                        self._end("shutdown")
                    case _:
                        assert_never(action)

    def _end(self, how: str) -> None:
        backends, self._backends = self._backends, {}
        for device, backend in backends.items():
            try:
                getattr(backend, how)()
            except RuntimeError as error:  # it has failed already; nothing of it is used again
                log.info("a communicator failed at its end", device=device, how=how, reason=str(error))

    def _new(self, device: str, name: str, store: Any, timeout: timedelta) -> Any:
        if name == dist.Backend.NCCL:
            return self._new_nccl(store, timeout)
        if name == dist.Backend.GLOO:
            made = dist.ProcessGroupGloo(store, self._rank, self._size, timeout=timeout)
            made._set_sequence_number_for_group()
            return made
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is None:
            raise UserError(f"{device}:{name} beside {BACKEND}: this PyTorch has no backend {name!r}")
        if not plugin.extended_api:
            return plugin.creator_fn(store, self._rank, self._size, timeout)
        asked = c10d._DistributedBackendOptions()
        asked.store, asked.group_rank, asked.group_size = store, self._rank, self._size
        asked.timeout, asked.group_id, asked.global_ranks_in_group = timeout, self._name, self._ranks
        return plugin.creator_fn(asked, self._options)

    def _new_nccl(self, store: Any, timeout: timedelta) -> Any:
        if not dist.is_nccl_available():
            raise UserError(
                "cuda:nccl: this PyTorch was built without NCCL: install a build with it, or let zbmd take "
                'tensors of devices, too: init_process_group("zbmd")'
            )
        if os.environ.setdefault(ERROR_HANDLING, "0") != "0":
            log.warning(
                "PyTorch may end this process with a lost rank: set the variable to 0",
                variable=ERROR_HANDLING,
            )
        options = self._options if self._options is not None else dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = timeout, self._name
        options.global_ranks_in_group = self._ranks
        made = dist.ProcessGroupNCCL(store, self._rank, self._size, options)
        made._set_sequence_number_for_group()
        return made


def wanted_beside() -> dict[str, str]:
    """Return the backends beside ours, by type of device, of the process group that PyTorch is making.

    PyTorch tells a backend nothing of the others: the call that asks for all of them does, up the stack.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        config = frame.f_locals.get("backend_config")
        if frame.f_code.co_name == "_new_process_group_helper" and config is not None:
            found: dict[str, Any] = config.get_device_backend_map()
            return {device: str(name) for device, name in found.items() if str(name) != BACKEND}
        frame = frame.f_back
    return {}


# Calls as their backends take them.

_OPTIONS: Final = {
    "allreduce": "AllreduceOptions",
    "allreduce_coalesced": "AllreduceCoalescedOptions",
    "broadcast": "BroadcastOptions",
    "reduce": "ReduceOptions",
    "allgather": "AllgatherOptions",
    "allgather_coalesced": "AllgatherOptions",
    "all_gather_single_coalesced": "AllgatherOptions",
    "gather": "GatherOptions",
    "scatter": "ScatterOptions",
    "reduce_scatter": "ReduceScatterOptions",
    "reduce_scatter_single_coalesced": "ReduceScatterOptions",
    "all_to_all_single": "AllToAllOptions",
    "alltoall": "AllToAllOptions",
}
"""The collectives that are passed on, by our names."""
_SINGLE: Final = {
    "all_gather_single_coalesced": "_allgather_base",
    "reduce_scatter_single_coalesced": "_reduce_scatter_base",
}
"""Backends have these for one pair of tensors at a time."""
_THEIRS: Final = {"all_to_all_single": "alltoall_base"}
_REDUCE_OPS: Final = (dist.ReduceOp, dist.ReduceOp.RedOpType)
MESSAGES: Final = ("send", "recv", "recv_anysource")


def device_type_of(arguments: Sequence[Any]) -> str:
    """Return the type of the device of the first tensor among the arguments of a call; empty for none."""
    for each in arguments:
        if hasattr(each, "device") and hasattr(each, "layout"):
            return str(each.device.type)
        if isinstance(each, list | tuple) and (found := device_type_of(each)):
            return found
    return ""


def is_passed_on(name: str) -> bool:
    """Whether a method of a process group has tensors that another backend may take."""
    return name in _OPTIONS or name in MESSAGES


def pass_on(backend: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a method of another backend as that of ours was called; return its work."""
    if name in MESSAGES:
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        return getattr(backend, name)(list(tensors), *args[1:])
    kind = getattr(c10d, _OPTIONS[name])
    tensors = [each for each in args if isinstance(each, list | tuple | torch.Tensor | np.ndarray)]
    options = next((each for each in (*args, *kwargs.values()) if isinstance(each, kind)), None)
    if options is None:
        options = kind()
        op = next((each for each in args if isinstance(each, _REDUCE_OPS)), None)
        for given, field in (("op", "reduceOp"), ("root", "rootRank"), ("timeout", "timeout")):
            value = kwargs.get(given, op if given == "op" else None)
            if value is not None:
                setattr(options, field, value)
    if name not in _SINGLE:
        return getattr(backend, _THEIRS.get(name, name))(*tensors, options)
    outputs, inputs = tensors
    call, pairs = getattr(backend, _SINGLE[name]), list(zip(outputs, inputs, strict=True))
    if len(pairs) == 1:
        return call(*pairs[0], options)
    backend._start_coalescing()
    for output, source in pairs:
        call(output, source, options)
    return backend._end_coalescing()
