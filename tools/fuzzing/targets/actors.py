"""Targets of the actor layer: envelopes, contracts, arguments, a peer's whole conversation, the template."""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from zbmd.actors.contracts import Contract, fingerprint, registered
from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Reason, ReasonKind, Ref
from zbmd.actors.core.wire import LONG_BYTES
from zbmd.actors.errors import ActorError, InvalidMessage, UnknownContract
from zbmd.actors.hangs import wire as hang_wire
from zbmd.actors.hangs.verdict import AskStanding, HangMachine, RankPosition, RankWatched, Ticked
from zbmd.actors.hangs.wire import Frame, Place, PlaceKind, Position, Standing
from zbmd.actors.process import spare, template
from zbmd.actors.process.exit import MARK
from zbmd.actors.process.lines import (
    LINE_BYTES_MAX,
    LineAssembler,
    rendered,
    showable,
    without_marks,
)
from zbmd.actors.rank import host_contracts as host_contracts
from zbmd.actors.replay.traced import pack_arguments, unpack_arguments
from zbmd.actors.system import ActorSystem
from zbmd.actors.view import Member, View
from zbmd.tools.fuzzing.mutate import retyped
from zbmd.tools.fuzzing.target import Broken, Script, block, blocks, read_blocks, target
from zbmd.transport.errors import LinkClosed, LinkFull, RemoteProtocolError, ZbmdError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES
from zbmd.transport.identity import Identity
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.memory.scattered import LONG_HEAD, LONG_HEAD_BYTES, Scattered, copied, whole
from zbmd.transport.shm.connect import Endpoint, link_pair
from zbmd.transport.shm.link import ShmLink

# ---- reports of watchdogs, and the verdict on them

DEADLINE_NS = 1_000_000_000
RANKS = 3


def _seeds() -> tuple[bytes, ...]:
    frames = (Frame("train.py", 8, "main"), Frame("threading.py", 1, "wait", 0))
    places = tuple(
        Place(kind, "rank0/a", "handler A.b", DEADLINE_NS, True, frames, "rank1/a") for kind in PlaceKind
    )
    groups = (Position(0, 2, 17, "all_reduce", True, True, DEADLINE_NS, (0, 1, 2)),)
    messages: tuple[hang_wire.FromRank | hang_wire.FromHost, ...] = (
        hang_wire.Hello(0, 1),
        hang_wire.Beat(),
        Standing(places, groups),
        Standing((), ()),
        hang_wire.Ask(),
    )
    return tuple(hang_wire.encode(message) for message in messages)


@target("hang.packet", "what a rank's watchdog and its host say to each other", _seeds, RemoteProtocolError)
def _run(data: bytes) -> None:
    try:
        hang_wire.decode_from_host(data)
    except RemoteProtocolError:
        message = hang_wire.decode_from_rank(data)
        if isinstance(message, Standing):
            _judge(message)


def _judge(standing: Standing) -> None:
    """Whatever ranks claim, the judgement ends, and its invariants hold."""
    machine = HangMachine(deadline_ns=DEADLINE_NS)
    for rank in range(RANKS):
        machine.handle(RankWatched(rank=rank, incarnation=1), now_ns=0)
    for turn in range(1, 4):
        for action in machine.handle(Ticked(), now_ns=turn * DEADLINE_NS):
            if isinstance(action, AskStanding):
                machine.handle(RankPosition(rank=action.rank, incarnation=1, standing=standing), now_ns=0)
        for rank in range(RANKS):
            machine.handle(
                RankPosition(rank=rank, incarnation=1, standing=standing), now_ns=turn * DEADLINE_NS
            )
        machine.check_invariants()


DECODED = (RemoteProtocolError, InvalidMessage, UnknownContract)
"""Errors that may refuse a message from a peer: the last two are answered, and the link stays."""
FRAMES_MAX = 64
PATIENCE_S = 5.0
PIECES_MAX = 64
RETYPED = 12
"""Copies of each envelope in the seeds of a conversation, each with one value changed."""


class Ping(Contract, id="zbmd.fuzz.ping"):
    """Asks for the same back. The fields are of every kind that a contract may have."""

    number: int
    text: str = ""
    data: bytes = b""
    items: tuple[float, ...] = ()
    table: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    to: Ref | None = None


class Echo(Actor, remote=True):
    """Answers; a stranger may spawn it."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    @on(Ping)
    async def ping(self, message: Ping) -> Ping:
        """Give it back."""
        return message


# ---- single messages


def _unbound(data: wire.RefData) -> NoReturn:
    raise RemoteProtocolError(f"a reference to {data.actor} where there is no system")


@functools.cache
def _codec() -> wire.Codec:
    return wire.Codec(_unbound)


def _envelopes() -> tuple[bytes, ...]:
    """One of each envelope, by the encoders that the system uses."""
    reason = wire.reason_data(Reason(ReasonKind.KILLED, "why"))
    parent = wire.RefData("enemy", 1, "parent", 1)
    ping = Ping(1, "text", b"data", (1.5, 2.0), {"key": 1})
    encode = wire.encode
    return (
        whole(wire.encode_tell("echo", 0, "sender", ping)),
        whole(wire.encode_ask(1, "echo", 0, 1_000_000, "sender", ping)),
        whole(wire.encode_ask(2, "nobody", 0, 1_000_000, "", ping)),
        whole(wire.encode_reply(1, ping)),
        whole(wire.encode_reply(1, None)),
        encode(wire.Fail(1, "dead_actor", "it is dead")),
        encode(wire.Bounce("echo", 1, "echo", "zbmd.fuzz.ping/1", "mailbox_full", "full")),
        encode(wire.Watch(3, "echo", 0)),
        encode(wire.Unwatch(3)),
        encode(wire.ActorEnded(1, 1, reason)),
        encode(wire.LinkActors("enemys", 1, "echo", 0)),
        encode(wire.UnlinkActors("enemys", 1, "echo", 0)),
        encode(wire.Exit("enemys", 1, "echo", 0, reason)),
        encode(wire.Stop("echo", 0, reason)),
        encode(wire.Withdraw(1, "echo", 0)),
        wire.encode_tell_all([("echo", 0), ("nobody", 7)], "sender", ping, wire.encode_body(ping)),
        encode(wire.Spawn(9, 1_000_000_000, f"{__name__}:Echo", "", None, [1])),
        encode(wire.Spawn(8, 1_000_000_000, "no.such:Class", "name", parent, [None, "a", 1.5, True])),
        encode(wire.Unspawn(9)),
    )


@target("wire.envelope", "an envelope and what is in it", _envelopes, *DECODED)
def _envelope(data: bytes) -> None:
    codec = _codec()
    match codec.decode(data):
        case wire.Reply(body=body):
            try:
                codec.decode_reply(body)
            finally:
                _refused(lambda: codec.decode_ref(body))
        case wire.Ask(body=body) | wire.Tell(body=body):
            codec.decode_contract(body)
        case _:
            pass


def _around() -> tuple[bytes, ...]:
    """Return the parts of messages before long bytes and after them."""
    ping = Ping(1, "text", bytes(LONG_BYTES), (1.5, 2.0), {"key": 1})
    payloads = (
        wire.encode_tell("echo", 0, "sender", ping),
        wire.encode_ask(1, "echo", 0, 1_000_000, "sender", ping),
        wire.encode_reply(1, ping),
    )
    cut = [payload.pieces for payload in payloads if isinstance(payload, Scattered)]
    return tuple(block(head[:-LONG_HEAD_BYTES]) + block(tail) for head, _, tail in cut)


@target("wire.pieces", "a message around long bytes, which were copied by themselves", _around)
def _pieces(data: bytes) -> None:
    """A message that was copied in pieces says what it says as a whole, wherever it was cut."""
    script, codec = Script(data), _codec()
    payload = script.block() + LONG_HEAD + LONG_BYTES.to_bytes(4) + bytes(LONG_BYTES) + script.block()
    pieces = copied(memoryview(payload))
    if pieces.joined() != payload:
        raise Broken(f"{pieces!r} are not the {len(payload)} bytes that they were")
    around = codec.decode_around(pieces)
    if around is None:
        return
    plain = codec.decode(payload)
    if not isinstance(plain, wire.Tell | wire.Ask | wire.Reply):
        raise Broken(f"{type(around).__name__} in pieces is a {type(plain).__name__}")
    message: Any = codec.decode_contract(plain.body)
    if wire.encode(around) != wire.encode(
        msgspec.structs.replace(plain, body=message)
    ):  # a NaN equals nothing
        raise Broken(f"{type(plain).__name__} says something else in pieces")


def _refused(decode: Callable[[], object]) -> None:
    try:
        decode()
    except (RemoteProtocolError, ActorError):
        return


def _messages() -> tuple[bytes, ...]:
    """A good message of every contract of the host and of this module."""
    view = View(epoch=2, members=(Member(rank=0, incarnation=1, address="a"),), lost=(1,))
    status = host_contracts.RankStatus(0, 10, 1, "joined", 0, 1 << 20, ("a", "b"))
    messages: tuple[Contract, ...] = (
        Ping(1, "text", b"data", (1.5,), {"key": 1}),
        host_contracts.Join(0, 1, "address"),
        host_contracts.ViewInstalled(view),
        host_contracts.Linked(0, 1, 2),
        host_contracts.EnterView(2),
        host_contracts.MemberDown(1, 1, "killed", True),
        host_contracts.Report(0, 1, msgspec.msgpack.encode({"kind": "step"})),
        host_contracts.ActorsReply(("a", "b")),
        host_contracts.StatusRequest(),
        host_contracts.NodeStatus("address", 1, 2, "train.py", "replace", 3, 0, 1.5, (status,)),
    )
    return tuple(msgspec.msgpack.encode(message) for message in messages)


@target("contracts.message", "a message of any contract", _messages, *DECODED)
def _message(data: bytes) -> None:
    message = _codec().decode_contract(data)
    if type(message) not in registered().values() or not fingerprint(type(message)):
        raise Broken(f"a {type(message).__name__} came out of the decoder")


def _argument_seeds() -> tuple[bytes, ...]:
    deep = [[[{"a": (1, 2, (3,))}]]]
    return (
        pack_arguments([1, "a", b"b", None, True, 1.5], {"key": [1, 2]}),
        pack_arguments([(1, "a"), deep, {"k": {1: 2}}], {}),
        pack_arguments([Ping(1, "text")], {"more": (Ping(2),)}),
    )


@target(
    "arguments",
    "the recorded arguments of an actor's constructor",
    _argument_seeds,
    ValueError,
    RecursionError,
    *DECODED,
)
def _arguments(data: bytes) -> None:
    args, kwargs = unpack_arguments(data, _unbound, _codec().decode_contract)
    if not isinstance(args, list) or not all(isinstance(key, str) for key in kwargs):
        raise Broken(f"arguments {args!r} {kwargs!r}")


def _packets() -> tuple[bytes, ...]:
    fork = template.ForkRequest(0, 1, "train.py", False, ("--steps", "3"), {"RANK": "0"})
    replies = (
        template.Ready(10, 1),
        template.Forked(0, 1, 11),
        template.ForkFailed(0, 1, "no room"),
        template.ForkExited(0, 1, 11, -9),
    )
    return (b"\0" + template.encode(fork), *(b"\1" + template.encode(reply) for reply in replies))


@target("template.packet", "a request to the template, or one of its replies", _packets, RemoteProtocolError)
def _packet(data: bytes) -> None:
    decode = template.decode_request if data[:1] == b"\0" else template.decode_reply
    decode(data[1:])


def _spare_packets() -> tuple[bytes, ...]:
    to_spare = (spare.Assign(0, 2, {"RANK": "0"}, 1), spare.Proceed())
    of_spare = (spare.Waiting(), spare.Accepted())
    return (
        *(b"\0" + spare.encode(message) for message in to_spare),
        *(b"\1" + spare.encode(message) for message in of_spare),
    )


@target("spare.packet", "what a host and a spare rank send each other", _spare_packets, RemoteProtocolError)
def _spare_packet(data: bytes) -> None:
    decode = spare.decode_to_spare if data[:1] == b"\0" else spare.decode_of_spare
    decode(data[1:])


@target(
    "host.report",
    "what a rank reports to its host",
    lambda: (msgspec.msgpack.encode({"kind": "step", "loss": 1.5, "members": [0, 1], "at_ns": 5}),),
    RemoteProtocolError,
)
def _report(data: bytes) -> None:
    if not all(isinstance(key, str) for key in host_contracts.read_report(data)):
        raise Broken("a report has keys that are no text")


def _output_seeds() -> tuple[bytes, ...]:
    long, bar = b"x" * 60_000, [b"\r 5%|", b"\r10%|" + MARK + b"Error\n"]
    texts = ([b"one\ntwo\n", b"three"], [long, long, b"\n", long], [b"\n" * 500], bar)
    return tuple(blocks(text) for text in texts)


@target("host.output", "what ranks print", _output_seeds)
def _output(data: bytes) -> None:
    assembler, put_in, came_out = LineAssembler(), 0, 0
    for piece in read_blocks(data, PIECES_MAX):
        put_in += len(piece)
        for line in assembler.feed(piece):
            came_out += len(line)
            for text, _ in without_marks(line):
                if len(text) > LINE_BYTES_MAX:
                    raise Broken(f"a line of {len(text)} bytes")
                if MARK in text or b"\r" in rendered(text):
                    raise Broken(f"shown with a mark or a carriage return: {text!r}")
        if MARK in showable(assembler.unfinished()):
            raise Broken("a mark in a line without an end")
    came_out += sum(len(line) for line in assembler.end())
    if came_out > put_in:
        raise Broken(f"{came_out} bytes of lines came out of {put_in}")


# ---- a whole conversation


def _conversations() -> tuple[bytes, ...]:
    envelopes = _envelopes()
    each = [b"\0" + block(envelope) for envelope in envelopes]
    rng = random.Random(0)
    changed = [retyped(rng, envelope) for envelope in envelopes for _ in range(RETYPED)]
    each += [b"\0" + block(envelope) for envelope in changed if envelope is not None]
    raw = b"\0" + block(whole(wire.encode_ask(4, "echo", 0, 1_000_000, "", Ping(1)))) + b"\1\2\3"
    return (*each, b"".join(each), b"".join(reversed(each)), raw + b"\4\xff\xff\3" + each[0])


@target(
    "peer.conversation", "an attached peer that says anything at all", _conversations, bytes_per_byte=4096
)
def _conversation(data: bytes) -> None:
    """An attached peer that holds the cookie says anything at all; our actors go on."""
    asyncio.run(_converse(Script(data)))


def _endpoint(name: str) -> Endpoint:
    limits = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 16, queue_frames_max=64)
    identity = Identity(name=name, pid=1, uid=1, incarnation=1, job=1)
    return Endpoint(identity=identity, cookie=bytes(32), limits=limits)


async def _converse(script: Script) -> None:
    loop = asyncio.get_running_loop()
    trouble: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: trouble.append(context))
    ours, theirs = link_pair(_endpoint("ours"), _endpoint("enemy"))
    theirs.on_frame = lambda header, payload: None
    system = ActorSystem("ours")
    ended: list[ZbmdError | None] = []
    system.attach(ours, on_closed=ended.append)
    await system.spawn(Echo, name="echo")
    waiting = loop.create_task(_wait_for_enemy(system))
    try:
        await _say_all(theirs, script)
        if not theirs.closed and not ours.closed:
            await _settle(theirs, ours)
        echo = await system.spawn(Echo)
        if await echo.ask(Ping(7), reply=Ping, timeout=PATIENCE_S) != Ping(7):
            raise Broken("our own actors no longer answer")
    finally:
        theirs.close()
        waiting.cancel()
        await asyncio.wait([waiting])
        await system.stop(timeout=PATIENCE_S)
    for context in trouble:
        raise context.get("exception") or Broken(str(context["message"]))
    for error in ended:
        if not isinstance(error, RemoteProtocolError | None):
            raise error
    if len(ended) > 1:
        raise Broken(f"the link ended {len(ended)} times")


async def _wait_for_enemy(system: ActorSystem) -> None:
    """Ask, and watch, an actor of the peer: so there is something that it can answer."""
    monitor = system.monitor(system.ref("enemy/theirs"))
    try:
        await system.ref("enemy/theirs").ask(Ping(1), reply=Ping, timeout=PATIENCE_S)
    except (ActorError, ZbmdError):
        await monitor.down(timeout=PATIENCE_S)
    finally:
        monitor.cancel()


async def _say_all(theirs: ShmLink, script: Script) -> None:
    for _ in range(FRAMES_MAX):
        if script.ended:
            return
        await asyncio.sleep(0)
        match script.number(1) % 6:
            case 0 | 1 | 5:
                payload = script.block()
            case 2:
                payload = wire.encode(
                    wire.Tell("t" * min(script.number(3), MAX_PAYLOAD_BYTES - 64), 0, "", _RAW)
                )
            case 3:
                continue
            case _:
                payload = bytes(min(script.number(2) * 16, MAX_PAYLOAD_BYTES))
        try:
            theirs.send(payload, trace_id=script.number(1))
            await theirs.flush()
        except (LinkClosed, LinkFull):
            return


_RAW = msgspec.Raw(msgspec.msgpack.encode(Ping(3)))


async def _settle(theirs: ShmLink, ours: ShmLink) -> None:
    """Until what was said has been heard: the answer to one more question shows it, or the link's end."""
    heard = asyncio.get_running_loop().create_future()

    def answered(*_: object) -> None:
        if not heard.done():
            heard.set_result(None)

    theirs.on_frame = lambda header, payload: answered() if bytes(payload[:3]) == b"\x94\x03\x4d" else None
    theirs.on_closed = answered
    try:
        theirs.send(wire.encode_ask(77, "nobody.at.all", 0, 1_000_000_000, "", Ping(1)))
    except (LinkClosed, LinkFull):
        return
    async with asyncio.timeout(PATIENCE_S):
        await heard
