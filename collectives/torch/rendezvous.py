"""The rendezvous of `init_process_group`: the members of the job's newest view meet and share a new store.

PyTorch's own `env://` has rank 0 serve a store at MASTER_ADDR:MASTER_PORT. After a loss the survivors call
`init_process_group` again at different times: one that comes before rank 0 has closed the old store joins
that, and waits for ranks that never come. Here each call makes a new store, at a port of its own, whose
address only members of the view learn; what belongs to an earlier epoch cannot be reached.

The default group is made in the same step. So a rank that dies while the others meet is not the caller's
concern: they meet again, in the next view.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, urlparse

import numpy as np
import structlog

from zbmd.actors.process.spare import wait_for_rank
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.group.group import Group
from zbmd.collectives.torch.continuity import CONTINUITY, Attending, Mode
from zbmd.collectives.torch.work import as_torch_error
from zbmd.collectives.torch.world import Met, ScriptsEnded, keep_store, world
from zbmd.transport.clock.patience import PATIENCE
from zbmd.transport.errors import DeadlineExceeded, LinkClosed, PeerLost, UserError, ZbmdError
from zbmd.transport.native._native import now_ns

dist: Any = importlib.import_module("torch.distributed")

log: Final = structlog.stdlib.get_logger("zbmd.collectives.torch")

SCHEMES: Final = ("env", "tcp")
ADDRESS_BYTES_MAX: Final = 256
CONNECT_S_MAX: Final = 30.0
"""Seconds to reach the store of this very moment; if it is gone, so is the view."""
AGAIN_MAX: Final = 16
"""Meetings of one view that fail although nobody in it is lost."""

Handler: TypeAlias = Callable[..., Iterator[tuple[Any, int, int]]]


def install() -> None:
    """Have `init_process_group` meet here in ranks of a job. Other processes meet as before."""
    theirs: Any = importlib.import_module("torch.distributed.rendezvous")
    handlers: dict[str, Handler] | None = getattr(theirs, "_rendezvous_handlers", None)
    if handlers is None:
        log.warning("this PyTorch has other rendezvous handlers: a loop that initialises again may hang")
        return
    for scheme in SCHEMES:
        handlers[scheme] = _for_ranks(handlers[scheme])


def _for_ranks(theirs: Handler) -> Handler:
    def handler(url: str, timeout: timedelta | None = None, **options: Any) -> Iterator[tuple[Any, int, int]]:
        limit: timedelta = timeout or dist.default_pg_timeout
        if not _is_for_the_job(url):
            yield from theirs(url, timeout=limit, **options)
            return
        try:
            yield meet(limit)
        except ZbmdError as error:
            raise as_torch_error(error) from error
        raise RuntimeError("a rendezvous of the backend zbmd is not repeated: call init_process_group again")

    return handler


def _is_for_the_job(url: str) -> bool:
    """Whether the ranks that are to meet are those of the job that this process is a rank of."""
    wait_for_rank()  # in a spare, whose script has now done all that it does without a rank
    environment = RankEnvironment.read(os.environ)
    if environment is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    asked = parse_qs(urlparse(url).query)
    job = {"rank": environment.rank, "world_size": environment.world_size}
    return all(name not in asked or asked[name] == [str(number)] for name, number in job.items())


def meet(timeout: timedelta) -> tuple[Any, int, int]:
    """Return a store of the members of the newest view, this process's rank among them, and their number.

    Waits for the replacements of lost ranks. Raises `DeadlineExceeded`, and `ScriptsEnded` once a rank
    has finished; `SystemExit` then, if whole replicas of a loop had no part for this rank.
    """
    met, store = _meet(timeout)
    world().keep(met)
    return store, met.group.rank, met.group.size


def come_together(timeout: timedelta, *, shrinks: bool = False, after: int = 0, waits: bool = False) -> Group:
    """Re-bind all process groups to the newest view, after a loss in a loop; return that of all who meet.

    All of them are given up first, and then made again in the order in which they were made, as on the
    others. A replacement, whose default group is new, only makes the others. shrinks: whether the default
    group may have another number of ranks than before. after: an epoch whose view is to be left, although
    nobody is lost. waits: this rank had no part, so that the others need not hear of it before that. It may
    have none again: `CONTINUITY.meeting` is then its default group. Raises what `meet` and `Group.subgroup`
    raise.
    """
    groups = CONTINUITY.groups
    if not groups or groups[0].ranks:
        raise UserError("the default process group was destroyed: a resilient loop needs it to its end")
    default, old = groups[0], {*(group.made for group in groups), CONTINUITY.meeting} - {None}
    if CONTINUITY.mode is not Mode.ALONE or CONTINUITY.broken is not None:
        CONTINUITY.leave_behind()
        for group in groups:
            if group.companions is not None:
                group.companions.lost(OperationAborted("a rank was lost: the groups are made again"))
        for each in () if waits else old:
            _give_up(each)
        met, _ = _meet(timeout, after)
        if not shrinks and (met.group.rank, met.group.size) != (default.rank(), default.size()):
            raise UserError(
                f"rank {default.rank()} of {default.size()} of the loop is rank {met.group.rank} of "
                f"{met.group.size} now: a resilient loop replaces its ranks, run it with --on-loss replace"
            )
        world().go_on_with(met)
        for each in old:
            world().close(each)
        default.rebind(met.group)
    base: Group = default.made
    if base is not CONTINUITY.meeting:
        for group in groups[1:]:
            _remake(group, base)
    CONTINUITY.together(base.epoch)
    return CONTINUITY.meeting or base


def _remake(group: Any, base: Group) -> None:
    """Re-bind a process group among the ranks of the default group `base`."""
    rank, size = group.rank(), group.size()
    if group.ranks_of is not None:
        group.ranks = tuple(group.ranks_of(base.rank, base.size))
        rank, size = group.ranks.index(base.rank), len(group.ranks)
    group.rebind(world().group(group.ranks, rank=rank, size=size, timeout_s=group.limit_s))


def _give_up(group: Group) -> None:
    """End what is in flight, and then all part in the group."""
    group.abort("a rank was lost")
    with contextlib.suppress(ZbmdError):
        group.submit(lambda _: None).result()  # behind what was queued: nothing runs while memory is unmapped
    group.give_up("gave up: a rank was lost")


def _meet(timeout: timedelta, after: int = 0) -> tuple[Met, Any]:
    end_ns = now_ns() + round(timeout.total_seconds() * 1e9)
    over, again, was_left_over = after, 0, False
    while True:
        left_s = PATIENCE.left_ns(end_ns) / 1e9
        if left_s <= 0:
            raise DeadlineExceeded(f"the ranks of the job did not meet in {timeout.total_seconds():g} s")
        met = None
        try:
            met = world().meet(left_s, after=over)  # which leaves the view of `over` alone
            attending = CONTINUITY.meet(met.group, end_ns)
            store = _shared_store(met, min(left_s, CONNECT_S_MAX), timeout, end_ns)
            if met.group.rank in attending.places:
                return _parted(met, attending, left_s), store
            log.info("this rank is left over by whole replicas: it waits for others to complete one with")
            over, was_left_over = world().entered, True
        except ScriptsEnded:
            if not was_left_over:
                raise
            log.info("the loop ended while this rank waited, without a part in it")
            raise SystemExit from None
        except PeerLost as lost:
            log.info("a rank was lost while all met: meet again", reason=str(lost))
            over = world().entered
        except (OperationAborted, LinkClosed, dist.DistError) as error:
            again += 1
            if again > AGAIN_MAX:
                raise
            log.info("a meeting failed: meet again", reason=str(error))
        if met is not None:
            world().close(met.group)


def _parted(met: Met, attending: Attending, timeout_s: float) -> Met:
    """Have those with a part in a group of their own, and keep that of all who meet beside it."""
    whole = met.group
    CONTINUITY.meeting = None
    if attending.parts == whole.size:
        return met
    own = whole.rank
    meeting = world().part(attending.places, timeout_s)
    try:
        part = world().part(range(attending.parts), timeout_s) if own < attending.parts else meeting
    except BaseException:
        world().close(meeting)
        raise
    world().close(whole)
    CONTINUITY.meeting = meeting
    return Met(part, met.address)


def _shared_store(met: Met, connect_s: float, timeout: timedelta, end_ns: int) -> Any:
    """Have the first member serve a store, and tell the others where."""
    group, connect = met.group, timedelta(seconds=connect_s)
    store, said = None, b""
    if group.rank == 0:
        store = dist.TCPStore(met.address, 0, is_master=True, wait_for_workers=False, timeout=connect)
        said = f"{met.address} {store.port}".encode()
    place = np.zeros(ADDRESS_BYTES_MAX, np.uint8)
    place[: len(said)] = np.frombuffer(said, np.uint8)
    group.submit(lambda c: c.broadcast(place, 0, deadline_ns=end_ns)).result()
    if store is None:
        host, port = place.tobytes().rstrip(b"\0").decode().split(" ")
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=connect)
    store.set_timeout(timeout)
    keep_store(store)
    CONTINUITY.store = store
    return store
