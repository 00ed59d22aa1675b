"""`zbmd-node up`: run this host's node until it is asked to leave."""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import importlib
import inspect
import os
import shlex
import signal
import socket
import sys
import zlib
from functools import partial
from pathlib import Path
from typing import Annotated, Final, cast

import msgspec
import uvloop

import zbmd
from zbmd.actors.cluster.jobs.node_driver import JobHost
from zbmd.actors.cluster.jobs.rank_processes import PRELOAD
from zbmd.actors.cluster.jobs.reports import HostEvent, log_hang
from zbmd.actors.cluster.membership.machine import LEFT
from zbmd.actors.cluster.node.actors import NodeActors, Start
from zbmd.actors.cluster.node.client import ASK_S, connect_admin
from zbmd.actors.cluster.node.contracts import ADDRESSES_MAX, TokenReply, TokenRequest
from zbmd.actors.cluster.node.incarnation import node_capture
from zbmd.actors.cluster.node.incarnations import (
    PORT_DEFAULT,
    IncarnationEnded,
    JoinDelayed,
    MemberSuspected,
    NodeConfig,
    NodeEvent,
    ViewEntered,
)
from zbmd.actors.cluster.node.node import ClusterNode
from zbmd.actors.cluster.node.persistent_state import NodeState, state_path
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.core.actor_base import allow_remote_modules
from zbmd.actors.process.early_template import EarlyTemplate, fork_template
from zbmd.actors.process.exit import ending_at_broken_invariant
from zbmd.actors.replay.process_capture import CAPTURE_VARIABLE, CaptureSettings
from zbmd.tools.cli.launch_settings import parse_node_name
from zbmd.tools.cli.settings import parse_dashboard
from zbmd.tools.node.dashboard import ADDRESS_VARIABLE, note_death, opened
from zbmd.tools.node.job_records import JobRecords
from zbmd.tools.node.run import MORE_PRELOADS
from zbmd.tools.node.signals import handling
from zbmd.tools.node.store import with_store
from zbmd.transport.clock.deadlines import (
    RECOVERY_BUDGET_NS_DEFAULT,
    RECOVERY_BUDGET_VARIABLE,
    format_duration,
    parse_recovery_budget,
)
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.errors import UserError
from zbmd.transport.handshake.cookie import (
    COOKIE_BYTES_MAX,
    COOKIE_BYTES_MIN,
    load_or_create_cookie,
    store_cookie,
)
from zbmd.transport.tcp.address import TcpAddress, parse_address, tcp_settings

TOKEN_VARIABLE: Final = "ZBMD_TOKEN"

EXAMPLES = f"""\
examples:
  zbmd-node up                                begin a cluster, on every address, port {PORT_DEFAULT}
  zbmd-node up --listen 10.0.0.1:7000         on this address alone
  zbmd-node token                             the line to paste on the next host
  zbmd-node up --join 10.0.0.1:7000           join, with the cookie file copied by hand
  zbmd-node up                                again, after a reboot: back into the same cluster
  zbmd-node up --store etcd://etcd0:2379/lab  found or join, as etcd says; either of two hosts may be lost
  zbmd-node up --new                          begin another cluster than the one it was in
"""


def add_arguments(up: argparse.ArgumentParser) -> None:
    """The options of `zbmd-node up`."""
    up.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"where others reach this node; default: *:{PORT_DEFAULT}, every address. Port 0: any free one",
    )
    up.add_argument("--name", metavar="N", help="what people call this node; default: the host's name")
    up.add_argument(
        "--domain",
        metavar="NAME",
        default=os.environ.get("ZBMD_DOMAIN"),
        help="this host's failure domain, such as a rack: shards and copies are kept in different ones",
    )
    up.add_argument(
        "--join",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a member of the cluster to join, any; may be repeated",
    )
    up.add_argument(
        "--store",
        metavar="URL",
        default=os.environ.get("ZBMD_STORE"),
        help="etcd://HOST:PORT[,…]/NAME: says whom to join, and which half of a cluster may go on",
    )
    up.add_argument("--token", metavar="TOKEN", help=f"from `zbmd-node token`; also in {TOKEN_VARIABLE}")
    up.add_argument(
        "--new", action="store_true", help="begin a new cluster, whatever this node was in before"
    )
    up.add_argument(
        "--capture",
        metavar="DIR",
        default=os.environ.get(CAPTURE_VARIABLE),
        help="record what this node and the ranks of its jobs take in, for zbmd replay DIR and DIR/job-…",
    )
    up.add_argument(
        "--actors",
        metavar="MODULE[:FUNCTION]",
        help="call FUNCTION(system), default `start`, to start actors on this node; other nodes may spawn "
        "the actor classes of MODULE",
    )
    up.add_argument(
        "--dashboard",
        metavar="HOST:PORT",
        default=os.environ.get(ADDRESS_VARIABLE),
        help="serve pages there on the runs that ranks of this node begin, and /metrics",
    )
    for name in ("--recovery-budget", "--recovery_budget"):
        hidden = argparse.SUPPRESS if "_" in name else "all deadlines follow from it; default: the cluster's"
        up.add_argument(name, dest="recovery_budget", metavar="TIME", help=hidden)


def node_config(arguments: argparse.Namespace) -> NodeConfig:
    """Parse the options of `up`. Raises `UserError`. Writes the token's cookie to the cookie file."""
    joins = [_dialable(text) for text in arguments.join]
    text = arguments.token or os.environ.get(TOKEN_VARIABLE)
    cookie: bytes | None = None
    if text:
        token, addresses = read_token(text)
        cookie = store_cookie(token.cookie)
        joins = list(dict.fromkeys([*joins, *addresses]))
        _hide_token(arguments)
    if arguments.new and joins:
        raise UserError("--new begins a cluster, --join and --token join one. Give one or the other.")
    budget = arguments.recovery_budget or os.environ.get(RECOVERY_BUDGET_VARIABLE)
    name = arguments.name or _host_name()
    for option, word in (("--name", name), ("--domain", arguments.domain or name)):
        try:
            parse_node_name(word)
        except UserError as error:
            raise UserError(f"{option}: {error}") from None
    return NodeConfig(
        name=name,
        listen=TcpAddress(host="", port=PORT_DEFAULT)
        if arguments.listen is None
        else parse_address(arguments.listen),
        joins=tuple(joins),
        new=arguments.new,
        recovery_budget_ns=parse_recovery_budget(budget) if budget else None,
        cookie=cookie or load_or_create_cookie(),
        settings=tcp_settings(),
        release=zbmd.__version__,
        domain=arguments.domain or "",
        capture=CaptureSettings.read(captured_into(arguments.capture), job=0),
    )


def captured_into(directory: str | None) -> dict[str, str]:
    """The environment of this process, and of the ranks that it forks, with `--capture`."""
    given = {} if directory is None else {CAPTURE_VARIABLE: str(Path(directory).absolute())}
    return {**os.environ, **given}


def _dialable(text: str) -> TcpAddress:
    address = parse_address(text)
    if not address.host or not address.port:
        raise UserError(
            f"--join {text}: give the host and the port of a member, such as node1:{PORT_DEFAULT}."
        )
    return address


def _host_name() -> str:
    found = "".join(c if c.isascii() and (c.isalnum() or c in "_.-") else "-" for c in socket.gethostname())
    return found.strip("_.-")[:64] or "node"


def _hide_token(arguments: argparse.Namespace) -> None:
    """Run the same command again without the token, which is in the cookie file now: `ps` shows arguments."""
    if arguments.token is None:
        return
    sys.stdout.flush()
    words = list(sys.orig_argv)
    place = next((i for i, word in enumerate(words) if word == "--token"), None)
    if place is not None:
        del words[place : place + 2]
    else:
        words = [word for word in words if not word.startswith("--token=")]
    os.environ[TOKEN_VARIABLE] = arguments.token
    os.execv(sys.executable, words)


def say(text: str) -> None:
    """A line of our own, on standard error."""
    print(f"[zbmd]: {text}", file=sys.stderr, flush=True)


class Teller:
    """Says what happens to a node."""

    def __init__(self) -> None:
        self._members: tuple[Node, ...] = ()

    def __call__(self, event: NodeEvent) -> None:
        """A line for what its user should know."""
        match event:
            case JoinDelayed(text=text):
                say(f"not let in yet: {text}")
            case ViewEntered(me=me, view=view, reason=reason):
                if view.nodes == self._members:
                    return  # it is about jobs
                self._members = view.nodes
                names = ", ".join(node.name or str(node.key) for node in view.nodes[:16])
                more = f" and {len(view.nodes) - 16} more" if len(view.nodes) > 16 else ""
                say(f"{me} at {me.address}: view {view.epoch}: {names}{more} ({reason})")
            case MemberSuspected(key=key, reason=reason):
                say(f"{key} is suspect: {reason}")
            case IncarnationEnded(key=key, reason=reason):
                again = "" if reason == LEFT else "; it will try to come back"
                say(f"{key} stops: {reason}{again}")
            case _:
                pass


def load_start(text: str) -> Start:
    """What `--actors` names. Raises `UserError`. Lets other nodes spawn the classes of that module."""
    module_name, _, function_name = text.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserError(
            f"--actors {text}: {module_name} cannot be imported ({type(error).__name__}: {error}). Give a "
            "module of this directory, or one that is installed."
        ) from error
    function = getattr(module, function_name or "start", None)
    if not inspect.iscoroutinefunction(function):
        raise UserError(
            f"--actors {text}: {module_name} has no `async def {function_name or 'start'}(system)` to call."
        )
    allow_remote_modules(module_name)
    return cast(Start, function)


def main(arguments: argparse.Namespace) -> int:
    """`zbmd-node up`; returns the exit code."""
    config = node_config(arguments)
    captures = None if config.capture is None else config.capture.directory
    records = JobRecords(state_path(), config.name, captures=captures)
    dashboard = None if arguments.dashboard is None else opened(parse_dashboard(arguments.dashboard))
    records.listen()
    template = fork_template(PRELOADS, os.environ)
    start = None if arguments.actors is None else load_start(arguments.actors)
    running = run_node if dashboard is None else dashboard.beside(run_node)
    return uvloop.run(ending_at_broken_invariant(running(config, records, arguments.store, start, template)))


PRELOADS: Final = (*PRELOAD, *MORE_PRELOADS)
"""Modules that the template of the ranks imports."""


async def run_node(
    config: NodeConfig,
    records: JobRecords,
    store: str | None = None,
    start: Start | None = None,
    template: EarlyTemplate | None = None,
) -> int:
    """Run the node, its jobs and its actors on this terminal; returns the exit code.

    records: of its jobs, which it closes; store: an etcd that knows the cluster; start: what starts its
    actors; template: of ranks, if it was forked already.
    """
    if store is None:
        return await _run_node(config, records, None, start, template)
    async with with_store(config, store) as (found, superseded):
        return await _run_node(found, records, superseded, start, template)


async def _run_node(
    config: NodeConfig,
    records: JobRecords,
    superseded: asyncio.Future[str] | None,
    start: Start | None,
    template: EarlyTemplate | None,
) -> int:
    clock = HybridClock()
    settings = config.capture or CaptureSettings.read(os.environ, job=0)
    node = ClusterNode(config, NodeState.open(), Teller(), records=records)
    records.output = node.output
    node.listen(records)
    capture = node_capture(config.name, clock, settings)
    actors = NodeActors(
        node,
        cookie=config.cookie,
        settings=config.settings,
        start=start,
        linked=start is not None,
        on_listening=partial(setattr, node, "actors_at"),
    )
    jobs = JobHost(
        node,
        recorder=capture.recorder,
        clock=clock,
        output=records,
        listen_host=_ranks_host(config.listen),
        preload=PRELOADS,
        captures=settings.directory,
        template=template,
        finder=actors.finder,
        on_event=partial(_noted, records),
    )

    def end(reason: asyncio.Future[str]) -> None:
        say(f"leaving: {reason.result()}")
        jobs.leave()

    if superseded is not None:
        superseded.add_done_callback(end)
    try:
        return await _run(node, jobs, actors)
    except BaseException as error:
        capture.failed(error)
        raise
    finally:
        if superseded is not None:
            superseded.remove_done_callback(end)
        await actors.close()
        await jobs.close()
        records.close()
        capture.close("the node has ended")


def _noted(records: JobRecords, job: int, event: HostEvent) -> None:
    log_hang(event)
    note_death(event)
    records.happened(job, event)


def _ranks_host(listen: TcpAddress) -> str:
    """Return the address at which ranks listen for other hosts: the node's."""
    return f"[{listen.host}]" if ":" in listen.host else listen.host


async def _run(node: ClusterNode, jobs: JobHost, actors: NodeActors) -> int:
    """Until the node has left, a signal ends it, or its jobs or actors cannot be run any more."""
    loop = asyncio.get_running_loop()
    running = loop.create_task(node.run())
    hosting = loop.create_task(_host(jobs, actors))
    received: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        received.append(number)
        if len(received) == 1 and node.view.epoch:
            say(f"{number.name} received: leaving the cluster; once more to end at once")
            jobs.leave()
        else:
            running.cancel()
            jobs.stopped(f"{number.name} received")

    try:
        with handling(on_signal):
            await asyncio.wait([running, hosting], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                hosting.result()  # it only ever ends by an error
            await running
            await jobs.settle()  # ranks that were asked to end may save
    except asyncio.CancelledError:
        if not received:
            raise
        return 128 + received[0]
    finally:
        for task in (running, hosting):
            task.cancel()
        await asyncio.wait([running, hosting])
    return 0


async def _host(jobs: JobHost, actors: NodeActors) -> None:
    """Run jobs and actors until that fails."""
    await jobs.open()
    await asyncio.gather(jobs.failed(), actors.failed())


# ---- `zbmd-node token`: a line to paste on the next host, with the addresses of members and the cookie
#
# A token is the cookie and a few addresses, in MessagePack behind a checksum, as URL-safe base64. Its holder
# can join and talk to every node, so it is as secret as the cookie file.

TOKEN_CHARS_MAX: Final = 4096
_PREFIX: Final = "zbmd1-"


class Token(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that another host needs to join, as one line of text."""

    cookie: Annotated[bytes, msgspec.Meta(min_length=COOKIE_BYTES_MIN, max_length=COOKIE_BYTES_MAX)]
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=300)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)
    ]


def write_token(token: Token) -> str:
    """As it is pasted."""
    body = msgspec.msgpack.encode(token)
    return _PREFIX + base64.urlsafe_b64encode(zlib.crc32(body).to_bytes(4) + body).decode().rstrip("=")


def read_token(text: str) -> tuple[Token, tuple[TcpAddress, ...]]:
    """A token and its addresses. Raises `UserError` if it was cut or changed on its way."""
    wrong = UserError(
        "--token is not whole: a part of it was lost or changed on its way. Run `zbmd-node token` on a "
        "member again, and paste the whole line."
    )
    text = text.strip()
    if not text.startswith(_PREFIX) or len(text) > TOKEN_CHARS_MAX:
        raise wrong
    packed = text.removeprefix(_PREFIX)
    try:
        data = base64.b64decode(packed + "=" * (-len(packed) % 4), altchars=b"-_", validate=True)
        if data[:4] != zlib.crc32(data[4:]).to_bytes(4):
            raise wrong
        token = msgspec.msgpack.decode(data[4:], type=Token)
    except (binascii.Error, msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError):
        raise wrong from None
    return token, tuple(parse_address(address) for address in token.addresses)


async def print_token(at: str | None) -> None:
    """`zbmd-node token`."""
    async with connect_admin(at) as admin:
        reply = await admin.actor.ask(TokenRequest(), reply=TokenReply, timeout=ASK_S)
    token = write_token(Token(cookie=load_or_create_cookie(), addresses=reply.addresses))
    words = ["zbmd-node", "up", "--join", reply.addresses[0], "--token", token]
    if reply.recovery_budget_ns != RECOVERY_BUDGET_NS_DEFAULT:
        words += ["--recovery-budget", format_duration(reply.recovery_budget_ns)]
    print(shlex.join(words))
