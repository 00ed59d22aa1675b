"""Targets of captures: damaged files, and whole files whose content is hostile."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zbmd.actors.cluster import messages as cluster
from zbmd.actors.cluster.jobs import node_events as jobs
from zbmd.actors.cluster.membership.capture_kind import cluster_config
from zbmd.actors.cluster.port import ALONE, THIS_HOST, after_order
from zbmd.actors.cluster.state.job_table import JobSpec, RankUp, Submit
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.replay.recording import captured_system
from zbmd.actors.view import MemberId
from zbmd.collectives.p2p import elastic_machine as em
from zbmd.collectives.p2p import tag_machine as tm
from zbmd.collectives.repair import events as rm
from zbmd.tools.entry import zbmd as cli
from zbmd.tools.fuzzing.target import Broken, Script, folder, target
from zbmd.tools.fuzzing.targets import wires
from zbmd.tools.fuzzing.targets.actors import Echo, Ping
from zbmd.tools.replay.players import (
    CLUSTER,
    ELASTIC_TAGS,
    HELLO,
    LOCAL_JOBS,
    MIRROR,
    REPAIR,
    STAGE,
)
from zbmd.training.pipeline.program import Shape
from zbmd.training.pipeline.schedules import programs_of
from zbmd.training.pipeline.stage import Computed, Heard, StepBegun, Told, stage_config
from zbmd.training.redundancy.machine import AllHold, Copied, Entered, Event, Held, Mirror, mirror_config
from zbmd.transport import capture
from zbmd.transport.capture import format as fmt
from zbmd.transport.capture.errors import CaptureDamaged, CaptureError
from zbmd.transport.capture.files import SegmentIndex, capture_to_text, text_to_capture, unpack_index
from zbmd.transport.capture.reader import LogSegment
from zbmd.transport.capture.registry import MachineKind
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, SECOND_NS
from zbmd.transport.clock.hlc import HybridClock
from zbmd.transport.handshake import hello
from zbmd.transport.handshake.driver import hello_config
from zbmd.transport.identity import Side
from zbmd.transport.machine import TimerFired

ENTRIES_MAX = 10_000
COMMANDS: tuple[list[str], ...] = (
    [],
    ["--show"],
    ["--until", "hang"],
    ["--around", "1", "--show"],
    ["--export", "perfetto", "{out}"],
    ["--json"],
)
MEMBERS = tuple(MemberId(rank=rank, incarnation=1) for rank in range(2))
EventT = TypeVar("EventT")
ActionT = TypeVar("ActionT")


# ---- a good capture


@functools.cache
def _recorded() -> dict[str, bytes]:
    """The files of a small capture by their names: several machines, frames, marks, a death, an actor."""
    with folder() as made:
        asyncio.run(_record(made))
        return {file.relative_to(made).as_posix(): file.read_bytes() for file in made.rglob("*.z*")}


async def _record(directory: Path) -> None:
    origin = capture.Origin(process="rank0", incarnation=1, job=wires.JOB, contracts={"a/1": "00"})
    log = capture.LogRecorder(directory, origin, capture.Clocks(hybrid=HybridClock()))
    _record_hello(log)
    _record_jobs(log)
    _record_repair(log)
    _record_tags(log)
    _record_cluster(log)
    _record_training(log)
    link = log.link("rank1", 3)
    frame = wires.frame(b"payload")
    log.frame_in(link, frame, wires.WALL_NS)
    log.frame_out(link, frame[:48], frame[48:], wires.WALL_NS)
    log.death("rank1", 3, clean=False, reason="killed")
    log.end_stream(link, "closed")
    system = captured_system("rank0", recorder=log)
    echo = await system.spawn(Echo, 5, name="echo")
    await echo.ask(Ping(1, "text"), reply=Ping, timeout=5)
    await system.stop(timeout=5)
    log.close()


def _record_hello(log: capture.Recorder) -> None:
    dialer, listener = wires.machine(Side.DIALER, 2), wires.machine(Side.LISTENER)
    config = hello_config(
        side=listener.side,
        identity=wires.identity("rank0"),
        cookie=wires.COOKIE,
        nonce=b"\1" * hello.NONCE_BYTES,
        deadline_ns=1_000,
    )
    tap = capture.Tap(log, HELLO, "hello/1", listener, config)
    said = dialer.handle(hello.Opened(peer_uid=wires.UID), now_ns=0)
    tap.handle(hello.Opened(peer_uid=wires.UID), now_ns=0)
    while sent := b"".join(action.data for action in said if isinstance(action, hello.SendBytes)):
        answers = tap.handle(hello.BytesReceived(data=sent), now_ns=1)
        answer = b"".join(action.data for action in answers if isinstance(action, hello.SendBytes))
        said = dialer.handle(hello.BytesReceived(data=answer), now_ns=1)


def _play(
    log: capture.Recorder,
    kind: MachineKind[EventT, ActionT],
    name: str,
    config: dict[str, Any],
    events: Iterable[EventT],
    *,
    tick_ns: int = 1,
) -> capture.Tap[EventT, ActionT]:
    """Record a machine of this kind that is given `events`, one each `tick_ns`."""
    tap = capture.Tap(log, kind, name, kind.build(config), config)
    for number, event in enumerate(events):
        tap.handle(event, now_ns=number * tick_ns)
        tap.mark(number)
    return tap


def _record_jobs(log: capture.Recorder) -> capture.Tap[jobs.Event, jobs.Action]:
    keys = [jobs.RankKey(wires.JOB, rank, 1) for rank in range(2)]
    spec = JobSpec(job=wires.JOB, target="job.py", ranks_per_node=2)
    views = [after_order(ALONE, Submit(spec=spec), elapsed_ns=0)]
    for key in keys:
        up = RankUp(job=key.job, rank=key.rank, incarnation=1, address=f"a{key.rank}")
        views.append(after_order(views[-1], up, elapsed_ns=1))
    events: list[jobs.Event] = [jobs.IncarnationBegan(me=THIS_HOST.key), jobs.ViewActedOn(view=views[0])]
    events += [jobs.Forked(key=key) for key in keys]
    events += [jobs.Joined(key=key, address=f"a{key.rank}") for key in keys]
    events += [jobs.ViewActedOn(view=view) for view in views[1:]]
    events += [jobs.Linked(key=key, epoch=1) for key in keys]
    events += [jobs.LossProven(key=keys[1])]
    return _play(log, LOCAL_JOBS, "jobs", {}, events)


def _record_repair(log: capture.Recorder) -> capture.Tap[rm.RepairEvent, rm.RepairAction]:
    call = rm.Call(text="sum", on_loss=rm.OnLoss.SURVIVORS, inputs=rm.Inputs.PRESERVE)
    new = rm.Report(born=0, sequence=1, phase=rm.Phase.IDLE)
    events: tuple[rm.RepairEvent, ...] = (
        rm.EpochEntered(epoch=1, members=MEMBERS),
        rm.Exchanged(epoch=1, reports=(new, new)),
        rm.Called(call=call),
        rm.Ended(epoch=1, outcome=rm.Outcome.HELD),
        rm.EpochEntered(epoch=2, members=MEMBERS[:1]),
    )
    return _play(log, REPAIR, "elastic0", {"rank": 0}, events)


def _record_tags(log: capture.Recorder) -> capture.Tap[em.ElasticTagEvent, em.ElasticTagAction]:
    first = (1 << em.SESSION_BITS) + 1
    events: tuple[em.ElasticTagEvent, ...] = (
        em.Settled(epoch=1, members=MEMBERS),
        tm.SendPosted(key=1, to=1, tag=3),
        em.Greeted(source=1, epoch=1, since=1),
        tm.Arrived(source=1, number=first, tag=3),
        tm.Arrived(source=1, number=first + 1, tag=4),
        tm.ReceivePosted(key=2, source=1, tag=4),
        tm.ReceivePosted(key=3, source=None, tag=5),
        em.MemberLost(member=MEMBERS[1]),
        em.Settled(epoch=2, members=MEMBERS[:1]),
    )
    return _play(log, ELASTIC_TAGS, "elastic0.tags", {"rank": 0}, events)


def _record_cluster(log: capture.Recorder) -> None:
    me, other = Node(NodeKey(1, 1), "a:1", "one"), Node(NodeKey(2, 1), "b:2", "two")
    events: tuple[cluster.Event, ...] = (
        cluster.FoundCluster(),
        cluster.Ordered(order=Submit(spec=JobSpec(job=1, target="train.py"))),
        cluster.Received(sender=other, message=cluster.Join(node=other)),
        TimerFired(),
        cluster.Suspected(key=other.key, reason="silent"),
        cluster.LeaveRequested(),
    )
    config = cluster_config(me, RECOVERY_BUDGET_NS_DEFAULT, witnessed=False)
    _play(log, CLUSTER, "cluster", config, events, tick_ns=SECOND_NS)


def _record_training(log: capture.Recorder) -> None:
    programs = programs_of("1f1b", Shape(stages=2, chunks=1, microbatches=2))
    heard = Heard(stage=1, what=Told.ACTIVATIONS_RELEASED, count=0)
    steps = (StepBegun(), Computed(), Computed(), heard)
    stage = _play(log, STAGE, "stage0/1", stage_config(programs, 0), steps, tick_ns=0)
    held = (Held(own=(0, None), known=0, copies=(None, None)),) * 2
    events: tuple[Event, ...] = (
        Entered(held=held, hosts=(0, 0), place=0),
        AllHold(version=0),
        Copied(digest=7),
    )
    mirror = _play(log, MIRROR, "mirror", mirror_config(Mirror(place=0, ranks=2)), events)
    log.state(mirror.stream, MIRROR, mirror.machine, 3)
    log.state(stage.stream, STAGE, stage.machine, 3)


def _segment_file() -> tuple[str, bytes]:
    return next((name, data) for name, data in _recorded().items() if name.endswith(fmt.LOG_SUFFIX))


@functools.cache
def _streams() -> tuple[bytes, ...]:
    """The records of the capture, block by block: how many, then their MessagePack."""
    name, data = _segment_file()
    with _laid_out({name: data}) as directory:
        segment = LogSegment(directory / name)
        found: list[bytes] = []
        for info in segment.blocks():
            prefix, check = fmt.unpack_prefix(
                data[info.offset : info.offset + fmt.BLOCK_PREFIX_BYTES],
                path=segment.path,
                offset=info.offset,
            )
            compressed = data[info.offset + fmt.BLOCK_PREFIX_BYTES : prefix.end]
            raw = fmt.decompress(compressed, prefix, check, fmt.new_decompressor(), path=segment.path)
            found.append(info.records.to_bytes(2, "little") + raw)
    return tuple(found)


@contextlib.contextmanager
def _laid_out(files: dict[str, bytes]) -> Iterator[Path]:
    with folder() as made:
        for name, data in files.items():
            path = made / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        yield made


def _capture_of(stream: bytes) -> dict[str, bytes]:
    """A capture that is whole in every checksum, of records that are the script's."""
    script = Script(stream)
    records, raw = max(1, script.number(2) % fmt.BLOCK_RECORDS_MAX), script.rest()
    name, data = _segment_file()
    header = data[: fmt.header_bytes(data, path=Path(name), magic=fmt.LOG_MAGIC, body_bytes_max=1 << 20)]
    flags = fmt.FLAG_MARKS | fmt.FLAG_STREAMS
    info = fmt.BlockInfo(len(header), flags, 0, 0, records, 0, 0, (1 << 64) - 1, 0, 1 << 62)
    block, _ = fmt.pack_block(fmt.new_compressor().compress(raw), len(raw), info)
    return {name: header + block}


# ---- what is done with one


def _read(directory: Path) -> None:
    for process in capture.open_log(directory).processes:
        read = 0
        _ = process.streams, process.steps
        process.find_step(1)
        try:
            for entry in itertools.islice(process.entries(), ENTRIES_MAX):
                capture.describe(entry.record)
                read += 1
        finally:
            if read > ENTRIES_MAX:
                raise Broken(f"{read} entries")
        _ = process.ending


@target("capture.file", "a segment file, damaged anywhere", lambda: (_segment_file()[1],), CaptureError)
def _file(data: bytes) -> None:
    name, _ = _segment_file()
    with _laid_out({name: data}) as directory:
        _read(directory)


@target(
    "capture.records", "a whole segment with hostile records", _streams, CaptureDamaged, bytes_per_byte=1024
)
def _records(data: bytes) -> None:
    with _laid_out(_capture_of(data)) as directory:
        _read(directory)


@target(
    "replay.machines",
    "machines played again from hostile records",
    _streams,
    CaptureError,
    bytes_per_byte=4096,
)
def _replay(data: bytes) -> None:
    with _laid_out(_capture_of(data)) as directory:
        for verdict in capture.replay_log(directory, secrets={"cookie": wires.COOKIE}):
            if not isinstance(verdict, capture.Identical | capture.Divergence | capture.Incomplete):
                raise Broken(f"{verdict!r} is no verdict")


@functools.cache
def _machines() -> tuple[tuple[MachineKind[Any, Any], dict[str, Any], object], ...]:
    """Kinds of machines whose state is recorded, each with a configuration and one that has lived."""
    origin = capture.Origin(process="rank0", incarnation=1)
    ring = capture.RingRecorder(origin, capture.Clocks(hybrid=HybridClock()))
    return (
        (LOCAL_JOBS, {}, _record_jobs(ring).machine),
        (REPAIR, {"rank": 0}, _record_repair(ring).machine),
        (ELASTIC_TAGS, {"rank": 0}, _record_tags(ring).machine),
    )


def _states() -> tuple[bytes, ...]:
    """Behind the number of their kind."""
    return tuple(
        bytes([number]) + kind.states.encode(machine)
        for number, (kind, _, machine) in enumerate(_machines())
        if kind.states is not None
    )


@target("replay.state", "the state that a machine is played from", _states, CaptureError, bytes_per_byte=1024)
def _state(data: bytes) -> None:
    script = Script(data)
    kind, config, _ = _machines()[script.number(1) % len(_machines())]
    if kind.states is None:
        raise Broken(f"{kind.name} has no states")
    kind.states.restore(kind.build(config), script.rest())


def _command_seeds() -> tuple[bytes, ...]:
    return tuple(bytes([number]) + stream for number in range(len(COMMANDS)) for stream in _streams())


@target(
    "replay.command", "zbmd replay, with its options, on hostile records", _command_seeds, bytes_per_byte=4096
)
def _command(data: bytes) -> None:
    script = Script(data)
    options = COMMANDS[script.number(1) % len(COMMANDS)]
    with _laid_out(_capture_of(script.rest())) as directory:
        cookie, out = directory / "cookie", directory / "out.json"
        cookie.write_bytes(wires.COOKIE.replace(b" ", b"_"))
        cookie.chmod(0o600)
        arguments = ["replay", str(directory), "--cookie", str(cookie)]
        arguments += [option.format(out=out) for option in options]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = cli.main(arguments)
        if code not in (0, 1, 2):
            raise Broken(f"zbmd replay ended with {code}")


def _bodies() -> tuple[bytes, ...]:
    segments = [data for name, data in _recorded().items() if name.endswith(fmt.LOG_SUFFIX)]
    indexes = [data for name, data in _recorded().items() if name.endswith(fmt.INDEX_SUFFIX)]
    found: list[bytes] = []
    for kind, files, magic in ((b"\0", segments, fmt.LOG_MAGIC), (b"\1", indexes, fmt.INDEX_MAGIC)):
        for data in files:
            end = fmt.header_bytes(data, path=Path(), magic=magic, body_bytes_max=1 << 20)
            found.append(kind + data[fmt.HEADER_FIXED_BYTES : end])
    return tuple(found)


@target(
    "capture.body",
    "the header or the index of a segment, its checksum right",
    _bodies,
    CaptureError,
    ValueError,
    RecursionError,
)
def _body(data: bytes) -> None:
    """A header or an index whose checksum is right."""
    body = data[1:]
    name, segment = _segment_file()
    if data[:1] == b"\0":
        _file(fmt.pack_body(fmt.LOG_MAGIC, msgspec.Raw(body)))  # type: ignore[arg-type]
        return
    index = name.replace(fmt.LOG_SUFFIX, fmt.INDEX_SUFFIX)
    with _laid_out({name: segment, index: fmt.pack_body(fmt.INDEX_MAGIC, msgspec.Raw(body))}) as directory:  # type: ignore[arg-type]
        _read(directory)
    if not isinstance(unpack_index(body), SegmentIndex):
        raise Broken("an index is no index")


def _texts() -> tuple[bytes, ...]:
    with _laid_out(_recorded()) as directory:
        return (capture_to_text(directory).encode(),)


@target("capture.text", "a capture as text", _texts, CaptureError)
def _text(data: bytes) -> None:
    with folder() as made:
        inner = made / "in" / "side"
        inner.mkdir(parents=True)
        try:
            text_to_capture(data.decode(errors="replace"), inner)
        finally:
            outside = [path for path in made.rglob("*.zlog") if inner not in path.parents]
            if outside:
                raise Broken(f"it wrote {outside}")
