"""Targets of the collectives and of training: what ranks of one group say and store for each other."""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from zbmd.actors.contracts import Contract
from zbmd.actors.core import wire
from zbmd.actors.core.ref import Ref
from zbmd.actors.view import MemberId
from zbmd.collectives.algorithms.catalogue import Operation, Request
from zbmd.collectives.communicator.cost_model import Model
from zbmd.collectives.errors import CollectiveError
from zbmd.collectives.execution.executor import MappedExecutor, Membership
from zbmd.collectives.execution.plan import Plan, Run, plan_of
from zbmd.collectives.group import flight_dump, priority_machine
from zbmd.collectives.group.priority_driver import decode_calls, encode_calls
from zbmd.collectives.native._messages import MEMBER_BYTES, SLOTS_MAX, MessageSlots
from zbmd.collectives.native._program import READ
from zbmd.collectives.native._stepper import DESCRIPTOR_HEADER_BYTES, PUB_BYTES_MAX
from zbmd.collectives.p2p import elastic_machine as elastic_tag_machine
from zbmd.collectives.p2p import wire as tagged_wire
from zbmd.collectives.p2p.pieces import PIECE_BYTES_MAX, Incoming, Outgoing
from zbmd.collectives.p2p.tag_machine import Arrived, MemberLeft, SendPosted, TagMachine, TakenThere
from zbmd.collectives.programs.program import IN, OUT
from zbmd.collectives.programs.reductions import itemsize
from zbmd.collectives.repair.adoption import Publication, read_published
from zbmd.collectives.repair.events import Call as RepairCall
from zbmd.collectives.repair.events import Inputs, OnLoss, Phase, Report
from zbmd.collectives.repair.machine import decide
from zbmd.collectives.repair.operations_per_rank import blocks_of
from zbmd.collectives.repair.splits import Split, SplitLedger, SplitsReply
from zbmd.collectives.repair.wire import ExchangedReport, MeasuredModel, decode_report, encode_report
from zbmd.tools.fuzzing.target import Broken, Script, blocks, read_blocks, target
from zbmd.tools.fuzzing.targets.actors import DECODED
from zbmd.tools.runs import flights as flight
from zbmd.training.pipeline.program import (
    ScheduleError,
    ScheduleFlawed,
    Shape,
    format_program,
    parse_programs,
)
from zbmd.training.pipeline.rings import RingOffer, decode_offers, encode_offers
from zbmd.training.pipeline.schedules import programs_of
from zbmd.training.pipeline.simulate import Costs, simulate
from zbmd.training.pipeline.verifier import verify
from zbmd.transport.errors import DeadlineExceeded, RemoteProtocolError, UserError
from zbmd.transport.memory.memfd import PAGE_BYTES
from zbmd.transport.memory.region import RegionHandle
from zbmd.transport.memory.segment import PeerSegment, Segment
from zbmd.transport.native import _native

MESSAGES_MAX = 64
RANKS = (0, 1, 2)
ELEMENTS = 64
STATE_BYTES = 256
EPOCH = 1
FOREIGN_AT = 332
"""Offset in a descriptor of the buffers in its rank's own memory, and then of their lengths."""


# ---- messages


def _no_reference(data: wire.RefData) -> Ref:
    raise RemoteProtocolError(f"no message of a group refers to {data.actor}")


@functools.cache
def _codec() -> wire.Codec:
    return wire.Codec(_no_reference)


def _from(sender: int, message: Contract) -> bytes:
    return bytes([sender]) + msgspec.msgpack.encode(message)


# ---- priorities


def _told_seeds() -> tuple[bytes, ...]:
    window = priority_machine.WINDOW
    return tuple(
        encode_calls(priority_machine.WaitingCalls(made=made, priorities=tuple(range(min(made, window)))))
        for made in (1, 3, 60)
    )


@target(
    "priority.told",
    "the calls that a member of a group has made, and their priorities",
    _told_seeds,
    RemoteProtocolError,
)
def _told(data: bytes) -> None:
    """One member tells anything, and we of three calls: one of ours, or a typed error."""
    machine = priority_machine.PriorityMachine()
    for priority in (0, 1, 2):
        machine.handle(priority_machine.Made(priority=priority), now_ns=0)
    (mine,) = machine.handle(priority_machine.TurnBegan(), now_ns=0)
    if not isinstance(mine, priority_machine.Count):
        raise Broken(f"a turn began with {mine}")
    reports = {0: mine.own, 1: decode_calls(data, 1)}
    (action,) = machine.handle(priority_machine.Counted(reports=reports), now_ns=0)
    if not isinstance(action, priority_machine.Run | priority_machine.Differ) or action.number > 2:
        raise Broken(f"{action} of three calls")


# ---- the repair of operations


def _report_seeds() -> tuple[bytes, ...]:
    members = tuple(MemberId(rank=rank, incarnation=1) for rank in RANKS)
    call = RepairCall(text="all_reduce", on_loss=OnLoss.SURVIVORS, inputs=Inputs.ADOPT)
    reports = (
        Report(born=0, sequence=1, phase=Phase.IDLE),
        Report(born=1, sequence=2, phase=Phase.PENDING, call=call, attempted=members, readable=members[2:]),
        Report(born=1, sequence=2, phase=Phase.HELD, call=call, attempted=members, contributors=members),
    )
    measured = (None, MeasuredModel(model=Model(cores=2), far=True), MeasuredModel(model=Model(), far=False))
    return tuple(
        encode_report(
            ExchangedReport(report=report, record_at=4096, measured=each, reading=k), ranks=62
        ).tobytes()
        for k, (report, each) in enumerate(zip(reports, measured, strict=True))
    )


@target(
    "repair.report",
    "where a member stands in an operation that is to be repaired",
    _report_seeds,
    RemoteProtocolError,
)
def _reports(data: bytes) -> None:
    """One member sends anything, and another and we a sound report: a verdict, or a typed error."""
    sound = decode_report(np.frombuffer(_report_seeds()[1], np.uint8), RANKS[0]).report
    told = decode_report(np.frombuffer(data, np.uint8), RANKS[1])
    if told.measured is not None and not told.measured.model.alpha_ns > 0:
        raise Broken(f"a model of {told.measured}")
    members = tuple(MemberId(rank=rank, incarnation=1) for rank in RANKS[:2])
    verdict = decide(EPOCH + 1, members, {0: sound, 1: told.report}, frozenset())
    if not set(verdict.runners) <= set(RANKS[:2]):
        raise Broken(f"ranks {verdict.runners} are to run")


def _splits_seeds() -> tuple[bytes, ...]:
    split = Split(channel=8, mend=9, base=3, places=((0, 1, 0), (1, 1, -1), (2, 0, 0)))
    both = (split, msgspec.structs.replace(split, closed=True))
    return tuple(_from(0, SplitsReply(splits=both[:k])) for k in range(3))


@target(
    "elastic.splits",
    "how a group was split, as its members tell one that comes later",
    _splits_seeds,
    *DECODED,
)
def _splits(data: bytes) -> None:
    """Two elders tell rank 1 the same anything of how a group was split."""
    told = _codec().decode_contract(data[1:])
    if not isinstance(told, SplitsReply):
        return
    ledger = SplitLedger()
    ledger.learn({0: told, 2: told}, rank=1)
    for split in ledger.splits:
        part = split.ranks_with(1)
        if len(set(part)) != len(part) or (part and 1 not in part):
            raise Broken(f"rank 1 belongs to {part}")


def _record_seeds() -> tuple[bytes, ...]:
    with contextlib.closing(
        Segment.create(slot=0, incarnation=1, arena_bytes=PAGE_BYTES, inbox_bytes=0)
    ) as segment:
        publication = Publication(segment.arena)
        publication.publish(1, segment.arena.empty(ELEMENTS, np.uint8))
        begin = segment.nbytes - segment.arena.capacity_bytes
        whole = bytes(segment.mapping.view(begin, segment.arena.capacity_bytes))
        del publication
    return (whole[:256],)


@target(
    "repair.record",
    "what a dead rank says that it had published, in its arena",
    _record_seeds,
    RemoteProtocolError,
)
def _record(data: bytes) -> None:
    found = read_published(memoryview(data), 1 << 17, 1 << 17, 1)
    if found is None:
        return
    if len(found) > len(data):
        raise Broken(f"{len(found)} bytes of a contribution in an arena of {len(data)}")
    blocks_of(found, (1, 0, 2), row_bytes=4)


# ---- memory that ranks share


@contextlib.contextmanager
def _two_segments(inbox_bytes: int = PAGE_BYTES) -> Generator[tuple[Segment, Segment, PeerSegment]]:
    made = [
        Segment.create(slot=slot, incarnation=4, arena_bytes=PAGE_BYTES, inbox_bytes=inbox_bytes)
        for slot in range(2)
    ]
    try:
        yield made[0], made[1], PeerSegment.attach(made[1].fds, slot=1)
    finally:
        for segment in made:
            segment.close()


def _plan(rank: int, pair: bool) -> Plan:
    read = Request(operation=Operation.ALL_REDUCE, algorithm="direct", n=2, chunks=2)
    return plan_of(replace(read, algorithm="swap"), rank, read) if pair else plan_of(read, rank)


def _all_reduce(
    own: Segment, peer: PeerSegment, deadline_ns: int, *, pair: bool, foreign: bool = False
) -> np.ndarray[Any, np.dtype[np.float32]]:
    executor = MappedExecutor(
        Membership(
            segment=own, peers={1 - own.slot: peer}, members=(0, 1), rank=own.slot, epoch=EPOCH, channel=0
        )
    )
    source, target = (
        own.arena.from_array(np.ones(ELEMENTS, np.float32)),
        own.arena.empty(ELEMENTS, np.float32),
    )
    run = Run(
        plan=_plan(own.slot, pair),
        addresses={IN: _native.address_of(source), OUT: _native.address_of(target)},
        dtype=0,
        reduction=0,
        count=ELEMENTS,
        total=ELEMENTS,
        piece=0,
        in_stride=ELEMENTS,
        out_stride=ELEMENTS,
    )
    executor.native.always(READ)
    if foreign:  # what it says of its own memory is looked for in ours
        executor.read_peers([os.getpid()] * 2)
    try:
        executor.run(run, deadline_ns=deadline_ns)
    finally:
        executor.release()
    return target


@functools.cache
def _descriptor(pair: bool) -> bytes:
    """The descriptor that a good rank 1 publishes for the operation of `_all_reduce`."""
    with _two_segments() as (one, two, _):
        with contextlib.suppress(DeadlineExceeded):
            _all_reduce(two, PeerSegment.attach(one.fds, slot=0), 1, pair=pair)
        at = _native.OFF_DESCRIPTORS + _descriptor_offset()
        published = bytearray(two.mapping.view(at, DESCRIPTOR_HEADER_BYTES))
    published[8:16] = bytes(8)  # nobody answered, so the run has been given up since
    return bytes(published)


def _descriptor_offset() -> int:
    """Of the first run of channel 0: runs take turns with two descriptors."""
    return DESCRIPTOR_HEADER_BYTES + PUB_BYTES_MAX


def _descriptors() -> tuple[bytes, ...]:
    foreign = [bytearray(_descriptor(pair)) for pair in (False, True)]
    for each in foreign:
        each[FOREIGN_AT - 1] = 1  # through the kernel
        each[FOREIGN_AT : FOREIGN_AT + 20] = (1 << IN | 1 << OUT).to_bytes(4, "little") + bytes([255, 0]) * 8
    numbers = [(EPOCH << 32 | notified).to_bytes(8, "little") for notified in (0xFFFF, 1)]
    kinds = ((0, _descriptor(False)), (1, _descriptor(True)), *enumerate(map(bytes, foreign), 2))
    return tuple(bytes([kind]) + number + good for number in numbers for kind, good in kinds)


@target(
    "collective.descriptor",
    "a rank's descriptor of an operation, in shared memory",
    _descriptors,
    CollectiveError,
    RemoteProtocolError,
    DeadlineExceeded,
)
def _operation(data: bytes) -> None:
    """An all-reduce with a rank whose descriptor and notification are the script's.

    By one program, or by the choice of two, or where a rank may tell of its own memory.
    """
    script = Script(data)
    kind = script.number(1)
    cell, descriptor = script.number(8), script.take(DESCRIPTOR_HEADER_BYTES)
    with _two_segments() as (own, theirs, peer):
        at = _native.OFF_DESCRIPTORS + _descriptor_offset()
        theirs.mapping.view(at, len(descriptor), writable=True)[:] = descriptor
        PeerSegment.attach(own.fds, slot=0).notify(1, 0, cell)
        result = _all_reduce(own, peer, 1, pair=kind & 1 == 1, foreign=kind & 2 == 2)
        if result.shape != (ELEMENTS,):
            raise Broken(f"a result of {result.shape}")


# ---- slots of messages on one host

MESSAGE_BYTES = 8
MESSAGE_SLOT_BYTES = MEMBER_BYTES // SLOTS_MAX


def _slots_of(own: Segment, peer: PeerSegment) -> MessageSlots:
    """The messages of rank 0 with rank 1, both of them this process, at the beginning of its inbox."""
    place = (os.getpid(), _native.OFF_END, own.nbytes)
    members = [(own.base, 0, *place), (peer.base, 1, *place)]
    return MessageSlots(
        members, rank=0, channel=0, epoch=EPOCH, patience_ns=0, mappings=(own.mapping, peer.mapping)
    )


def _slots() -> tuple[bytes, ...]:
    word = struct.Struct("=4Q2I")
    good = (
        word.pack(1, 0, MESSAGE_BYTES, 0, 0, 10).ljust(128, b"\0")
        + b"float32[2]".ljust(64, b"\0")
        + bytes(64)
    )
    far = word.pack(1, 0, MESSAGE_BYTES, 1 << 40, 0, 200)
    staged = word.pack(1, 0, 1 << 16, 0, 0, 10) + struct.pack("=2Q", _native.OFF_END, 1 << 15)
    return good, staged, far.ljust(MESSAGE_SLOT_BYTES, b"\1"), word.pack(1, 1, 1 << 60, 0, 0, 10)


@target("collective.message", "a slot of a message between two ranks of a host", _slots)
def _message(data: bytes) -> None:
    """A receive from a rank whose first slot is the script's: it waits, or is over and within its bounds."""
    with _two_segments(2 * MEMBER_BYTES) as (own, _, peer):
        at = _native.OFF_END + MEMBER_BYTES + MESSAGE_SLOT_BYTES
        slot = data[:MESSAGE_SLOT_BYTES]
        own.mapping.view(at, len(slot), writable=True)[:] = slot
        guarded = np.full(4 * MESSAGE_BYTES, 7, np.uint8)
        place = guarded[MESSAGE_BYTES : 2 * MESSAGE_BYTES]
        # Its time is over, so that a message that its sender has not copied in is not waited for.
        request = _slots_of(own, peer).receive(place, 1, 0, b"float32[2]", 1)
        if (guarded[:MESSAGE_BYTES] != 7).any() or (guarded[2 * MESSAGE_BYTES :] != 7).any():
            raise Broken("a message was received beyond its array")
        if request.is_over and request.failure == 0 and int.from_bytes(slot[:8], "little") != 1:
            raise Broken("a message came that has another number")


# ---- dumps of flight recorders


def _flights() -> tuple[bytes, ...]:
    done = flight_dump.Operation("all_reduce", "direct", 1, 1024, 10, 20, 30, "complete", "")
    runs = flight_dump.Operation("barrier", "dissemination", 2, 0, 40, 0, 0, "running", "")
    group = flight_dump.GroupFlights(
        channel=0, epoch=1, rank=0, members=(0, 1), begun=2, closed=False, operations=(done, runs)
    )
    dump = flight_dump.Dump(
        version=flight_dump.VERSION,
        name="rank0",
        pid=1,
        reason="SIGUSR2",
        taken_ns=50,
        taken_unix_ns=100,
        groups=(group,),
    )
    return (msgspec.json.encode(dump),)


@target(
    "flight.dump",
    "a file that a rank's flight recorder was written to",
    _flights,
    UserError,
    bytes_per_byte=4096,
)
def _flight(data: bytes) -> None:
    dump = flight_dump.read_dump(data, "the dump")
    flight.text([dump], last=flight.LAST_DEFAULT)
    flight.trace([dump])


# ---- tagged messages


def _tagged_seeds() -> tuple[bytes, ...]:
    small = tagged_wire.TaggedMessage(
        epoch=EPOCH, channel=0, number=1, tag=3, dtype=0, shape=(2, 3), data=bytes(24), lent=None, digest=b""
    )
    handle = RegionHandle(slot=1, incarnation=1, offset=4096, nbytes=1 << 20, writable=False)
    large = msgspec.structs.replace(small, number=2, shape=(1 << 18,), data=b"", lent=handle, digest=bytes(8))
    taken = tagged_wire.TaggedTaken(epoch=EPOCH, channel=0, number=1)
    greeting = tagged_wire.TaggedGreeting(epoch=0, channel=0, view=EPOCH, since=EPOCH)
    first = EPOCH << elastic_tag_machine.SESSION_BITS
    later = msgspec.structs.replace(small, number=first + 1)
    told = msgspec.structs.replace(taken, number=first + 1)
    closed = tagged_wire.TaggedClosed(epoch=0, channel=0)
    begun = msgspec.structs.replace(small, number=2, shape=(1 << 18,), data=bytes(1 << 10))
    asked = tagged_wire.TaggedAsked(epoch=EPOCH, channel=0, number=1, reading=1, read=0)
    piece = tagged_wire.TaggedPiece(
        epoch=EPOCH, channel=0, number=2, reading=1, piece=0, data=bytes(1 << 10), lent=None, digest=b""
    )
    plain = [_from(RANKS[1], message) for message in (small, large, taken, closed)]
    pieces = [_from(RANKS[1], message) for message in (begun, piece, asked, closed)]
    elastic = [_from(RANKS[1], message) for message in (greeting, later, told, closed)]
    return tuple(blocks(each[:k]) for each in (plain, pieces, elastic) for k in range(1, len(each) + 1))


@target("tagged.messages", "arrays that other members of a group send with tags", _tagged_seeds, *DECODED)
def _tagged(data: bytes) -> None:
    """Messages of others to a member that has sent one of its own, and reads what comes in pieces."""
    machine, outgoing = TagMachine(RANKS), Outgoing(4 * PIECE_BYTES_MAX, PIECE_BYTES_MAX)
    readings: dict[tuple[int, int], Incoming] = {}
    machine.handle(SendPosted(key=1, to=RANKS[1], tag=0), now_ns=0)
    for body in read_blocks(data, MESSAGES_MAX):
        message, source = _codec().decode_contract(body[1:]), body[0] if body else 0
        if isinstance(message, tagged_wire.TaggedMessage):
            nbytes = tagged_wire.described(message, source) * itemsize(message.dtype)
            machine.handle(Arrived(source=source, number=message.number, tag=message.tag), now_ns=0)
            readings[source, message.number] = Incoming(nbytes, len(message.data), reading=1)
        elif isinstance(message, tagged_wire.TaggedAsked):
            outgoing.asked(message.reading, message.read)
            while nbytes := outgoing.next_bytes():
                outgoing.made(nbytes)
        elif isinstance(message, tagged_wire.TaggedPiece):
            reading = readings.get((source, message.number))
            came = message.reading, message.piece, len(message.data)
            if reading is not None and reading.came(*came):
                reading.took(len(message.data))
        elif isinstance(message, tagged_wire.TaggedTaken):
            machine.handle(TakenThere(by=source, number=message.number), now_ns=0)
        elif isinstance(message, tagged_wire.TaggedClosed):
            machine.handle(MemberLeft(source=source), now_ns=0)
        machine.check_invariants()


@target(
    "tagged.elastic",
    "greetings and arrays that other members of an elastic group send with tags",
    _tagged_seeds,
    *DECODED,
)
def _tagged_elastic(data: bytes) -> None:
    """Messages of others to a member of an elastic group, that has sent one of its own."""
    machine = elastic_tag_machine.ElasticTagMachine(RANKS[0])
    members = tuple(MemberId(rank=rank, incarnation=1) for rank in RANKS)
    machine.handle(elastic_tag_machine.Settled(epoch=EPOCH, members=members), now_ns=0)
    machine.handle(SendPosted(key=1, to=RANKS[1], tag=0), now_ns=0)
    for body in read_blocks(data, MESSAGES_MAX):
        message, source = _codec().decode_contract(body[1:]), body[0] if body else 0
        match message:
            case tagged_wire.TaggedGreeting(view=view, since=since):
                greeted = elastic_tag_machine.Greeted(source=source, epoch=view, since=since)
                machine.handle(greeted, now_ns=0)
            case tagged_wire.TaggedMessage():
                tagged_wire.described(message, source)
                machine.handle(Arrived(source=source, number=message.number, tag=message.tag), now_ns=0)
            case tagged_wire.TaggedTaken(number=number):
                machine.handle(TakenThere(by=source, number=number), now_ns=0)
            case tagged_wire.TaggedClosed():
                machine.handle(MemberLeft(source=source), now_ns=0)
            case _:
                pass
        machine.check_invariants()


# ---- pipelines: programs as text, and the rings that a stage offers


def _offer_seeds() -> tuple[bytes, ...]:
    handle = RegionHandle(slot=1, incarnation=2, offset=4096, nbytes=1024, writable=True)
    return (encode_offers([RingOffer(False, 1, handle), RingOffer(True, 0, handle)]),)


@target("pipeline.rings", "where a stage says that its rings lie", _offer_seeds, RemoteProtocolError)
def _offers(data: bytes) -> None:
    found = decode_offers(data, 1)
    offers = [RingOffer(*boundary, handle) for boundary, handle in found.items()]
    if decode_offers(encode_offers(offers), 1) != found:
        raise Broken(f"{found}")


def _pipeline_seeds() -> tuple[bytes, ...]:
    shapes = (("1f1b", 2, 2, 2), ("zb-h1", 3, 1, 3), ("gpipe", 1, 2, 1))
    return tuple(
        "".join(map(format_program, programs_of(name, Shape(stages=p, chunks=v, microbatches=m)))).encode()
        for name, p, v, m in shapes
    )


@target("pipeline", "programs of a pipeline as text", _pipeline_seeds, ScheduleError, ScheduleFlawed)
def _pipeline(data: bytes) -> None:
    programs = parse_programs(data.decode(errors="replace"))
    if parse_programs("".join(map(format_program, programs))) != programs:
        raise Broken(f"{programs}")
    shape = programs[0].shape
    verify(programs, activations_max=(shape.chunks * shape.microbatches,) * len(programs))
    costs = Costs.even(shape.parts, forward=1, input_gradient=1, weight_gradient=1, transfer=1)
    timeline = simulate(programs, costs)
    if timeline.makespan < max(timeline.busy):
        raise Broken(f"{timeline}")
