"""The last calls of the process groups in the form of PyTorch's flight recorder, and labels for its profiler.

`torch._C._distributed_c10d._dump_fr_trace_json` returns the calls of our groups, too, after those of backends
written in C++. The profiler shows each call as `zbmd:all_reduce`, with its shapes, on its caller's thread.
Needs PyTorch; imported by `process_group`.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from zbmd.collectives.torch.tensors import Called
from zbmd.transport.native._native import now_ns

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
KEPT_DEFAULT: Final = 2000
"""Calls that a group keeps unless the variable says otherwise."""
_SCALARS: Final = {
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "bfloat16": "BFloat16",
    "int8": "Char",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "uint8": "Byte",
    "bool": "Bool",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}

profiled: Final[Callable[[], bool]] = torch.autograd._profiler_enabled
"""Return whether a profiler records this thread."""
_Label: Final = torch._C._profiler._RecordFunctionFast


def kept() -> int:
    """Return the number of calls that a group keeps."""
    given = os.environ.get(VARIABLE, "")
    return int(given) if given.isdigit() else KEPT_DEFAULT


def label(name: str, tensors: Sequence[Any]) -> Any:
    """Return a context that the profiler shows as an operation with these tensors."""
    return _Label(f"zbmd:{name}", list(tensors))


def like(called: Called) -> Iterator[Any]:
    """Yield tensors without memory of the dtypes and shapes of a call."""
    for dtype, shape in called.tensors:
        yield torch.empty(shape, dtype=dtype, device="meta")


def install() -> None:
    """Add our groups' calls to the dump; again, it does nothing."""
    native: Any = importlib.import_module("torch._C._distributed_c10d")
    theirs = getattr(native, "_dump_fr_trace_json", None)
    if theirs is None or hasattr(theirs, "__wrapped__"):  # an older version has no dump in JSON
        return

    @functools.wraps(theirs)
    def dump(includeCollectives: Any = None, onlyActive: Any = None) -> bytes:
        found = json.loads(theirs(includeCollectives, onlyActive))
        _add(found, with_calls=includeCollectives is not False, only_active=bool(onlyActive))
        return json.dumps(found).encode()

    native._dump_fr_trace_json = dump


def _add(found: dict[str, Any], *, with_calls: bool, only_active: bool) -> None:
    known = dist.distributed_c10d._world.pg_map
    ours = [group for group in known if hasattr(group, "flights")]
    offset_ns = time.time_ns() - now_ns()
    for group in ours:
        name, number = group.group_name, list(known).index(group)
        calls = list(group.flights)
        ended = [call.number for call in calls if call.ended_ns]
        began = [call.number for call in calls if call.began_ns]
        ranks = dist.get_process_group_ranks(group)
        found.setdefault("pg_config", {})[name] = {
            "name": name,
            "desc": group.group_desc,
            "ranks": str(ranks),
        }
        found.setdefault("pg_status", {})[str(number)] = {
            "last_enqueued_collective": str(group._get_sequence_number_for_group()),
            "last_started_collective": str(max(began, default=-1)),
            "last_completed_collective": str(max(ended, default=-1)),
        }
        if with_calls:
            entries = found.setdefault("entries", [])
            shown = [call for call in calls if not (only_active and call.ended_ns)]
            entries += (_entry(call, group, number, offset_ns) for call in shown)


def _entry(call: Called, group: Any, pg_id: int, offset_ns: int) -> dict[str, Any]:
    """Return a call as an entry of the dump; times are of the wall clock."""
    sizes = [list(shape) for _, shape in call.tensors]
    dtypes = [_scalar(dtype) for dtype, _ in call.tensors]
    return {
        "record_id": call.number,
        "pg_id": pg_id,
        "process_group": [group.group_name, group.group_desc],
        "collective_seq_id": call.number,
        "p2p_seq_id": 0,
        "op_id": call.number,
        "profiling_name": f"zbmd:{call.name}",
        "time_created_ns": call.called_ns + offset_ns,
        "input_sizes": sizes,
        "input_dtypes": dtypes,
        "output_sizes": sizes,
        "output_dtypes": dtypes,
        "state": "completed" if call.ended_ns else "started" if call.began_ns else "scheduled",
        "time_discovered_started_ns": call.began_ns and call.began_ns + offset_ns,
        "time_discovered_completed_ns": call.ended_ns and call.ended_ns + offset_ns,
        "retired": bool(call.ended_ns),
        "timeout_ms": call.limit_ns // 1_000_000,
        "is_p2p": False,
    }


def _scalar(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SCALARS.get(name, name.capitalize())
