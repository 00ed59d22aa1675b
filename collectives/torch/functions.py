"""Functions of `torch.distributed` that reach only backends written in C++, for groups of ours, too.

`monitored_barrier` and `split_group` ask for gloo and for an accelerator by name, and some functional
collectives pass by the methods of a process group in Python. Groups of other backends go on to PyTorch's own
functions. Needs PyTorch; imported by `backend` when a process group is made.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

from zbmd.collectives.torch.identity import Identity

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
c10d: Any = importlib.import_module("torch.distributed.distributed_c10d")

FUNCTIONAL: Final = "_c10d_functional"


def install() -> None:
    """Have the functions serve groups of ours; again, it does nothing."""
    if _libraries:
        return
    _replace("monitored_barrier", _monitored_barrier)
    _replace("split_group", _split_group)
    library = torch.library.Library(FUNCTIONAL, "IMPL")
    _libraries.append(library)
    for name, kernel in _KERNELS.items():
        if hasattr(getattr(torch.ops, FUNCTIONAL), name):
            library.impl(name, kernel, "CPU")
            library.impl(name, kernel, "CUDA")


_libraries: Final[list[Any]] = []
"""Kept for the life of the process: PyTorch unregisters the kernels of a library that is collected."""


def _replace(name: str, ours: Callable[..., Any]) -> None:
    """Replace a public function by ours, which gets the former one first."""
    theirs = getattr(c10d, name)

    @functools.wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    for module in (c10d, dist):
        setattr(module, name, function)


def _is_ours(group: Any) -> bool:
    if group is dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
        return False
    return isinstance(group or dist.group.WORLD, Identity)


def _monitored_barrier(
    theirs: Callable[..., Any],
    group: Any = dist.GroupMember.WORLD,
    timeout: Any = None,
    wait_all_ranks: bool = False,
) -> None:
    if not _is_ours(group):
        theirs(group, timeout, wait_all_ranks)
        return
    (group or dist.group.WORLD).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def _split_group(
    theirs: Callable[..., Any],
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **more: Any,
) -> Any:
    """Return the group of the split that this rank is in, None if it is in none.

    split_ranks: ranks of the parent. Raises `ValueError` as PyTorch does for a list that is none.
    """
    if not _is_ours(parent_pg):
        return theirs(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
    parent = parent_pg or dist.group.WORLD
    if not split_ranks:
        raise ValueError("split_ranks cannot be None or empty")
    for split in split_ranks:
        if not split or len(split) != len(set(split)):
            raise ValueError(f"split_ranks: expected lists of different ranks, got {list(split)}")
    own = next((split for split in split_ranks if parent.rank() in split), None)
    if own is None:
        return None
    ranks = [dist.get_global_rank(parent, rank) for rank in sorted(own)]
    return dist.new_group(
        ranks, timeout, pg_options=pg_options, use_local_synchronization=True, group_desc=group_desc
    )


# Functional collectives.


def _group(name: Any) -> Any:
    return c10d._resolve_process_group(name) if isinstance(name, str) else name


def _registered(tensor: Any, work: Any) -> Any:
    torch._C._distributed_c10d._register_work(tensor, work)
    return tensor


def _all_gather_into_tensor_out(input: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    return _registered(out, _group(group_name)._allgather_base(out, input.contiguous()))


def _send(tensor: Any, dst: int, tag: int, group_name: Any) -> Any:
    return _registered(tensor, _group(group_name).send([tensor], dst, tag))


def _receive(tensor: Any, src: int, tag: int, group_name: Any) -> Any:
    return _registered(tensor, _group(group_name).recv([tensor], src, tag))


def _batch_p2p_ops(
    op_list: Sequence[str],
    peer_list: Sequence[int],
    tag_list: Sequence[int],
    tensors: Sequence[Any],
    group_name: Any,
) -> list[Any]:
    """Begin the sends and receives; each tensor is to be waited for."""
    begun: list[Any] = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        if op not in ("isend", "irecv"):
            raise ValueError(f"batch_p2p_ops: expected isend or irecv, got {op!r}")
        begin = _send if op == "isend" else _receive
        begun.append(begin(tensor, peer, tag, group_name))
    return begun


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "all_gather_into_tensor_out": _all_gather_into_tensor_out,
    "isend": _send,
    "irecv": _receive,
    "batch_p2p_ops": _batch_p2p_ops,
}


def uncompiled(*classes: type) -> None:
    """Have `torch.compile` call the methods of these classes as they are, with all that they call.

    The attribute keeps the compiler from inlining them, and the strategy of their code from compiling them
    where a compiled function calls them. Neither needs the compiler imported.
    """
    frames: Any = importlib.import_module("torch._C._dynamo.eval_frame")
    skip = getattr(frames, "_FrameAction", None) and frames._FrameExecStrategy(
        frames._FrameAction.SKIP, frames._FrameAction.SKIP
    )
    for each in classes:
        ours = (base for base in each.__mro__ if base.__module__.startswith("zbmd."))
        for method in (value for base in ours for value in vars(base).values()):
            code = getattr(method, "__code__", None)
            if code is not None:
                method._torchdynamo_disable = True
                if skip is not None:
                    frames.set_code_exec_strategy(code, skip)
