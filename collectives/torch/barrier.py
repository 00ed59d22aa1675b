"""The barrier that names the ranks which do not come.

Every rank sends a message to rank 0 and waits for its answer; nothing is left in the group if some do not
come, so it can be used after a failure. The texts begin as gloo's, for which callers look.
"""

from __future__ import annotations

import importlib
from datetime import timedelta
from typing import Any, Final

from zbmd.collectives.communicator.operations import TIMEOUT_S_MAX
from zbmd.collectives.p2p.tagged import TAG_MAX
from zbmd.transport.errors import DeadlineExceeded

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")

TAG: Final = TAG_MAX
ANSWER_S: Final = 1.0
"""The others wait so much longer for the answer of rank 0, which may use up the timeout."""


def monitored_barrier(group: Any, timeout_s: float, wait_all_ranks: bool) -> None:
    """Wait until all ranks of the group have called this; rank 0 waits for `timeout_s` seconds.

    Raises `DistBackendError` that names the first rank which did not come, or all of them with
    `wait_all_ranks`, on all ranks that came.
    """
    timeout_s = min(timeout_s, TIMEOUT_S_MAX - ANSWER_S)
    if group.rank():
        _report(group, timeout_s)
        return
    if timeout_s <= 0:
        raise _failed("Rank 0 timed out in monitoredBarrier after 0 ms", None)
    others, limit_ns = range(1, group.size()), round(timeout_s * 1e9)
    works = {rank: group.recv(torch.empty(1, device="cpu"), rank, TAG, limit_ns) for rank in others}
    missing: dict[int, BaseException] = {}
    for rank, work in works.items():
        try:
            work.wait()
        except dist.DistBackendError as error:
            missing[rank] = error
    answer = torch.zeros(group.size(), dtype=torch.uint8, device="cpu")
    answer[list(missing)] = 1
    for rank in others:
        if rank not in missing:
            group.send(answer, rank, TAG, limit_ns).wait()
    if missing:
        raise _failed(_missing_text([*missing], timeout_s, wait_all_ranks), missing[min(missing)])


def _report(group: Any, timeout_s: float) -> None:
    """Tell rank 0 that this rank has come, and wait for its answer."""
    own, limit_ns = group.rank(), round((timeout_s + ANSWER_S) * 1e9)
    answer = torch.zeros(group.size(), dtype=torch.uint8, device="cpu")
    text = (
        f"Rank {own} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0"
    )
    try:
        group.send(torch.empty(1, device="cpu"), 0, TAG, limit_ns).wait()
        group.recv(answer, 0, TAG, limit_ns).wait()
    except dist.DistBackendError as error:
        raise _failed(text, error) from error
    missing = answer.nonzero().flatten().tolist()
    if missing:
        raise _failed(f"{text}: {_missing_text(missing, timeout_s, True)}", None)


def _missing_text(missing: list[int], timeout_s: float, all_of_them: bool) -> str:
    few = len(missing) == 1 or not all_of_them
    named = f"Rank {missing[0]}" if few else f"Ranks {', '.join(map(str, missing))}"
    return f"{named} failed to pass monitoredBarrier in {timeout_s * 1e3:.0f} ms"


def _failed(text: str, why: BaseException | None) -> BaseException:
    error: BaseException = dist.DistBackendError(text if why is None else f"{text} ({why})")
    error.__cause__ = DeadlineExceeded(text) if why is None else why.__cause__
    return error


def seconds(timeout: Any, default_s: float) -> float:
    """Return the seconds of a timeout as torch's users give it: a timedelta, a number, or None."""
    if timeout is None:
        return default_s
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
