"""Ranks under another launcher: they meet through PyTorch's store, and attach to a supervisor of their host.

Each default group begins with a meeting. Every rank puts a greeting into the store; rank 0 takes them, and
gives each a plan: to stay what it is, if all are attached to one job already as they are to be, or to attach
again. Keys are those of the group; a greeting is taken once, and a plan is for one greeting, so a store that
has been used before, or that outlives a rank, does no harm.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import secrets
import sys
import threading
from datetime import timedelta
from typing import Any, Final

from zbmd.actors.bootstrap.attached import client
from zbmd.actors.bootstrap.attached.client import host_name, plan_of
from zbmd.actors.bootstrap.attached.messages import Hello, Order, Plan, decode_hello, decode_plan, encode
from zbmd.actors.process.exit import script_ended
from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.p2p.tagged import named
from zbmd.collectives.torch.work import as_torch_error
from zbmd.collectives.torch.world import keep_store, leave, world
from zbmd.transport.errors import DeadlineExceeded, UserError, ZbmdError
from zbmd.transport.handshake.cookie import use_cookie
from zbmd.transport.native._native import now_ns

dist: Any = importlib.import_module("torch.distributed")

RESTARTS_VARIABLE: Final = "TORCHELASTIC_RESTART_COUNT"
ABSENT_NAMED_MAX: Final = 8
COOKIE_BYTES: Final = 32
"""Random ones of the cookie of a job on several hosts, which knows no file that they share."""

_attachment: client.Attachment | None = None
_registered_in = 0
"""The process that has registered its end."""


def ensure(options: Any) -> None:
    """Have this process be a member of the job that the default group is of. Raises `DistBackendError`.

    options: torch's, of a group that is to be made. In ranks of `zbmd-node run`, and for other groups than
    the default one, nothing is done.
    """
    if list(options.global_ranks_in_group) or RankEnvironment.read(os.environ) is not None:
        return
    try:
        if options.group_size == 1:
            if _attachment is not None:
                _detach()
            return
        restarts = os.environ.get(RESTARTS_VARIABLE, "0")
        meeting = Meeting(
            options.store,
            f"zbmd/{options.group_id}/{restarts}",
            rank=int(options.group_rank),
            size=int(options.group_size),
            timeout_s=float(options.timeout.total_seconds()),
        )
        _keep_served(options.store, meeting.rank)
        plan = meeting.plan()
        if not plan.stays:
            _detach()
            _attach(meeting, plan)
    except ZbmdError as error:
        raise as_torch_error(error) from error


class Meeting:
    """One meeting of all ranks in a store. Raises `DeadlineExceeded`, `UserError`.

    host: the name of this host, if it is not `host_name`.
    """

    def __init__(
        self, store: Any, prefix: str, *, rank: int, size: int, timeout_s: float, host: str = ""
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._prefix, self._host = store, prefix, host or host_name()
        self._timeout_s = timeout_s
        self._end_ns = now_ns() + round(self._timeout_s * 1e9)

    @property
    def left_s(self) -> float:
        """The time that is left of the group's timeout."""
        return max((self._end_ns - now_ns()) / 1e9, 1e-3)

    def plan(self) -> Plan:
        """Greet the others, and return what rank 0 makes of it."""
        nonce = secrets.token_hex(8)
        environment = _attachment.environment if _attachment is not None and _attachment.stands else None
        greeting = Hello(host=self._host, nonce=nonce)
        if environment is not None:
            greeting = Hello(
                host=greeting.host,
                nonce=nonce,
                job=environment.job,
                rank=environment.rank,
                size=environment.world_size,
            )
        self._put(f"hello/{self.rank}", encode(greeting))
        if self.rank == 0:
            self._answer(nonce)
        plan = decode_plan(self._take([f"plan/{nonce}"], "rank 0 has not answered")[0])
        if plan.problem:
            raise UserError(plan.problem)
        return plan

    def address(self, plan: Plan, host: int, *, given: str = "") -> str:
        """Return where the ranks of a host attach, once the supervisors of all hosts are up.

        given: by the one that has started this host's. Raises `UserError` if one of them has failed.
        """
        if given:
            self._put(f"host/{plan.name}/{host}", given.encode())
        keys = [f"host/{plan.name}/{number}" for number in range(len(plan.hosts))]
        starters = named([ranks[0] for ranks in plan.hosts])
        said = self._wait(keys, f"of {starters} not each has started the supervisor of its host")
        return [client.address_of(each) for each in said][host]

    def give_up(self, plan: Plan, host: int, error: ZbmdError) -> None:
        """Tell the others why this host has no supervisor; those who wait for that raise `UserError`."""
        ranks = plan.hosts[host]
        reason = (
            f"{named(ranks[:ABSENT_NAMED_MAX])}: {error} Expected hosts that reach each other over TCP, at "
            "the address of their ranks' store (MASTER_ADDR) or of one of their interfaces"
        )
        for key in [f"host/{plan.name}/{host}", *([] if host else [f"founder/{plan.name}"])]:
            self._put(key, f"{client.FAILED}{reason}".encode())

    def founder(self, plan: Plan, *, given: str = "") -> tuple[str, ...]:
        """Return where the supervisor of the first host is for others. given: its own idea of that."""
        key = f"founder/{plan.name}"
        if given:
            port = given.rpartition(":")[2]
            # Its own may be an address before a gateway; those by which the ranks meet reach it, too.
            others = [host for host in (os.environ.get("MASTER_ADDR"), _host_of(self._store)) if host]
            found = dict.fromkeys([given, *(f"{f'[{h}]' if ':' in h else h}:{port}" for h in others)])
            self._put(key, ",".join(found).encode())
            return tuple(found)
        starter = plan.hosts[0][0]
        said = self._wait([key], f"rank {starter} has not started a supervisor")[0]
        return tuple(client.address_of(said).split(","))

    def _answer(self, name: str) -> None:
        keys = [f"hello/{rank}" for rank in range(self.size)]
        greetings = [decode_hello(value) for value in self._take(keys, "")]
        plan = encode(plan_of(greetings, name, cookie=secrets.token_hex(COOKIE_BYTES)))
        for greeting in greetings:
            self._put(f"plan/{greeting.nonce}", plan)

    def _put(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def _take(self, keys: list[str], why: str) -> list[bytes]:
        """Wait for keys, and remove them."""
        values = self._wait(keys, why)
        for key in keys:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # a store of its own may not have it
                self._store.delete_key(f"{self._prefix}/{key}")
        return values

    def _wait(self, keys: list[str], why: str) -> list[bytes]:
        """Wait for keys, and return their values. why: what it means if they do not come."""
        names = [f"{self._prefix}/{key}" for key in keys]
        try:
            # Rounded up: one that ends a part of a millisecond early has not failed.
            self._store.wait(names, timedelta(milliseconds=math.ceil(self.left_s * 1e3)))
        except RuntimeError as error:
            if now_ns() < self._end_ns:
                raise UserError(f"PyTorch's store failed while the ranks met: {error}") from error
            raise DeadlineExceeded(
                f"the {self.size} ranks did not meet in {self._timeout_s:g} s: {why or self._absent(names)}. "
                "Look at what it says, or raise the timeout of init_process_group"
            ) from None
        return [self._store.get(name) for name in names]

    def _absent(self, names: list[str]) -> str:
        absent = [str(rank) for rank, name in enumerate(names) if not self._store.check([name])]
        more = f" and {len(absent) - ABSENT_NAMED_MAX} more" if absent[ABSENT_NAMED_MAX:] else ""
        return f"rank {', '.join(absent[:ABSENT_NAMED_MAX])}{more} did not come"


def _keep_served(store: Any, rank: int) -> None:
    """Have the store that rank 0 serves for `env://` and `tcp://` outlive its group.

    Another rank that initialises again at once would join it just before its end.
    """
    store = _innermost(store)
    keep_store(store if rank == 0 and isinstance(store, dist.TCPStore) else None)


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _host_of(store: Any) -> str:
    """Return the host by which all ranks reach the store, if it is known."""
    store = _innermost(store)
    return str(store.host) if isinstance(store, dist.TCPStore) else ""


def _attach(meeting: Meeting, plan: Plan) -> None:
    global _attachment
    host = next(number for number, ranks in enumerate(plan.hosts) if meeting.rank in ranks)
    given = ""
    if plan.hosts[host][0] == meeting.rank:
        try:
            given = _started(meeting, plan, host)
        except ZbmdError as error:
            meeting.give_up(plan, host, error)
    address = meeting.address(plan, host, given=given)
    use_cookie(plan.cookie.encode() or None)
    _attachment = client.attach(address, meeting.rank, meeting.left_s)
    _register_end()
    world().launch(_attachment.environment)


def _started(meeting: Meeting, plan: Plan, host: int) -> str:
    """Start the supervisor of this host; return where its ranks attach."""
    hosts = len(plan.hosts)
    joins = meeting.founder(plan) if host else ()
    order = Order(
        ranks=len(plan.hosts[host]),
        patience_s=meeting.left_s,
        name=plan.name,
        hosts=hosts,
        host=host,
        cookie=plan.cookie,
        joins=joins,
    )
    try:
        address, node = client.start(order)
    except OSError as error:
        raise UserError(f"the supervisor of this host cannot be started: {error}") from error
    if host == 0 and hosts > 1:
        meeting.founder(plan, given=node)
    return address


def _detach() -> None:
    """Leave the job that this process is in, for another."""
    global _attachment
    left, _attachment = _attachment, None
    use_cookie(None)
    leave()  # which a process that is alone has to, too
    if left is not None:
        left.detach(ends=False)


def _register_end() -> None:
    """Have this process leave its job in order when its script has ended, while threads still take work."""
    global _registered_in
    if _registered_in == os.getpid():
        return
    _registered_in = os.getpid()
    if multiprocessing.parent_process() is not None:  # it ends without what `threading` and `atexit` call
        util: Any = importlib.import_module("multiprocessing.util")
        util.Finalize(None, _script_ended, exitpriority=1)
    else:
        threading._register_atexit(_script_ended)  # type: ignore[attr-defined]


def _script_ended() -> None:
    if _registered_in != os.getpid():
        return
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
    script_ended(failed=failed)
    if _attachment is not None:
        _attachment.detach(ends=True)
    keep_store(None)
