"""Targets of the cluster: what nodes say, to codec and machine; a node's files; a token that was pasted."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from zbmd.actors.bootstrap.attached import messages as attached
from zbmd.actors.bootstrap.environments import LauncherFacts, NodeRange, Pod, Stated
from zbmd.actors.bootstrap.etcd_client import (
    ClusterRecord,
    EtcdError,
    MemberRecord,
    TransactionResult,
    WitnessRecord,
    decode_reply,
    parse_etcd_url,
    read_record,
)
from zbmd.actors.bootstrap.hostlist import format_hostlist, parse_hostlist
from zbmd.actors.bootstrap.merge import bootstrap_of
from zbmd.actors.cluster import contracts as contracts
from zbmd.actors.cluster import messages as m
from zbmd.actors.cluster.contracts import BeatsAnswer, BeatsAt, BeatsOffer, BeatsReady, BeatsSaid
from zbmd.actors.cluster.heartbeats._heartbeat import BEAT_BYTES, BEAT_KEY_BYTES, BeatReader, BeatWriter
from zbmd.actors.cluster.membership.machine import ClusterMachine
from zbmd.actors.cluster.node.persistent_state import NodeRecord, NodeState, StateError
from zbmd.actors.cluster.state.node_id import Node, NodeKey
from zbmd.actors.cluster.state.view import ClusterView, ViewChange
from zbmd.actors.errors import UnknownContract
from zbmd.actors.snapshots import messages as snapshots
from zbmd.tools.fuzzing.target import Broken, blocks, folder, read_blocks, target, text_target
from zbmd.tools.node.guard import messages as guards
from zbmd.tools.node.up import Token, read_token, write_token
from zbmd.training.autograd.parameter_layout import ParameterSlice
from zbmd.training.checkpoint.blocks import Codec
from zbmd.training.checkpoint.held import messages as held
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, UserError
from zbmd.transport.machine import TimerFired
from zbmd.transport.rdma.setup import GID_BYTES, QueuePairAt
from zbmd.transport.secure.protection import SESSION_ID_BYTES

# ---- host lists, environments of launchers, replies and records of etcd

HOSTS_MAX = 4096
VARIABLES_MAX = 64

STEP = "SLURM_JOB_ID=7\nSLURM_STEP_ID=0\nSLURM_NODEID=1\nSLURM_LOCALID=0\nSLURM_NNODES=2"
ENVIRONMENTS = (
    f"{STEP}\nSLURM_STEP_NODELIST=n[1-2]\nSLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_STEP_RESV_PORTS=7000-7001",
    "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=4\nOMPI_COMM_WORLD_LOCAL_RANK=0\nOMPI_COMM_WORLD_LOCAL_SIZE=2\n"
    "MASTER_ADDR=node0\nMASTER_PORT=29500",
    "TORCHELASTIC_RUN_ID=x\nGROUP_RANK=1\nLOCAL_RANK=0\nLOCAL_WORLD_SIZE=2\nWORLD_SIZE=4\nMASTER_ADDR=::1",
    "ZBMD_SERVICE=zbmd\nPOD_NAME=set-1\nPOD_NAMESPACE=default\nJOB_COMPLETION_INDEX=1",
    "PMI_RANK=1\nPMI_SIZE=2\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=1\nNODE_RANK=1\nMASTER_ADDR=a",
)


@text_target(
    "hostlist",
    "a list of hosts as Slurm writes it",
    (b"a[001-003,7]-ib,b12,c[1-2][3-4]", b"n1,n2", b"[1-3]", b"a[08-11]b[0-1]"),
    UserError,
)
def _hosts(text: str) -> None:
    hosts = parse_hostlist(text, hosts_max=HOSTS_MAX)
    if len(hosts) > HOSTS_MAX or parse_hostlist(format_hostlist(hosts)) != hosts:
        raise Broken(f"{len(hosts)} hosts, formatted {format_hostlist(hosts)[:200]}")


@text_target(
    "bootstrap.environment",
    "the environment that a launcher gives",
    lambda: tuple(text.encode() for text in ENVIRONMENTS),
    UserError,
)
def _environment(text: str) -> None:
    pairs = (line.partition("=") for line in text.split("\n", VARIABLES_MAX))
    environment = {name: value for name, _, value in pairs}
    host, service = environment.get("HOST", ""), environment.get("ZBMD_SERVICE")
    found = bootstrap_of(
        environment,
        LauncherFacts(launcher="fuzz", nodes=Stated(value=NodeRange(least=1, most=8), source="--nnodes")),
        pod=Pod(host=host, namespace=host),
        service=Stated(value=service, source="ZBMD_SERVICE") if service else None,
    )
    if not found.explain() or (found.node is not None and found.node >= found.nodes.most):
        raise Broken(f"{found}")


@text_target(
    "etcd.url", "the address of a store", (b"etcd://a:2379/job", b"etcds://a,[::1]:1,10.0.0.1/b/c"), UserError
)
def _url(text: str) -> None:
    found = parse_etcd_url(text)
    if parse_etcd_url(str(found)) != found:
        raise Broken(f"{found!r} is written {found}")


def _replies() -> tuple[bytes, ...]:
    header = b'"header":{"cluster_id":"1","member_id":"2","revision":"3","raft_term":"2"}'
    pair = b'{"key":"Zm9v","mod_revision":"2","value":"YmFy","lease":"7"}'
    found = b'{"response_range":{"kvs":[' + pair + b'],"count":"1"}}'
    return (
        b"{" + header + b"}",
        b"{" + header + b',"succeeded":true,"responses":[{"response_put":{}},' + found + b"]}",
        b'!{"error":"etcdserver: requested lease not found","message":"no","code":5}',
    )


@target("etcd.reply", "an answer of etcd's", _replies, EtcdError, RemoteProtocolError)
def _reply(data: bytes) -> None:
    outcome = decode_reply(200 if data[:1] != b"!" else 404, data.removeprefix(b"!"), TransactionResult)
    if len(outcome.found()) > len(data):
        raise Broken(f"{outcome}")


_ATTACHED: tuple[Callable[[bytes], object], ...] = (
    attached.decode_asked,
    attached.decode_answer,
    attached.decode_hello,
    attached.decode_plan,
    attached.decode_order,
)


def _attached_messages() -> tuple[bytes, ...]:
    hello = attached.Hello(host="a/1", nonce="f0", job=3, rank=1, size=2)
    messages = (
        (0, attached.Attach(rank=1)),
        (0, attached.Detach(ends=True)),
        (1, attached.Attached(variables={"RANK": "1"})),
        (1, attached.Refused(reason="rank 1 is taken")),
        (2, hello),
        (3, attached.Plan(name="f0", hosts=((0, 1), (2, 3)), cookie="c0")),
        (4, attached.Order(ranks=2, patience_s=9.5, name="f0", hosts=2, host=1, cookie="c0", joins=("a:1",))),
    )
    return tuple(bytes([kind]) + attached.encode(message) for kind, message in messages)


@target("attached.message", "what ranks and their supervisor send", _attached_messages, RemoteProtocolError)
def _attached_message(data: bytes) -> None:
    _ATTACHED[data[0] % len(_ATTACHED) if data else 0](data[1:])


def _snapshot_messages() -> tuple[bytes, ...]:
    identity = snapshots.JobIdentity(
        run="python a.py", release="1", python="3.11", code="c", ranks=2, arena_bytes=4096, settings="s"
    )
    standing = snapshots.Standing(job=7, identity=identity, ranks=(0, 1), launcher=9, idle_ns=5, left_ns=4)
    requests = (
        snapshots.Attach(identity=identity),
        snapshots.Hold(rank=1),
        snapshots.Look(),
        snapshots.Drop(),
    )
    answers = (standing, snapshots.Memory(rank=1), snapshots.Refused(reason="another code", fields=("code",)))
    spec = snapshots.HolderSpec(address="a", job=7, idle_ns=5, identity=identity)
    return (
        *(b"\0" + snapshots.encode(request) for request in requests),
        *(b"\1" + snapshots.encode(answer) for answer in answers),
        b"\2" + snapshots.encode_spec(spec).encode(),
    )


@target(
    "snapshots.message",
    "what a snapshot process and its clients send",
    _snapshot_messages,
    RemoteProtocolError,
)
def _snapshot_message(data: bytes) -> None:
    if data[:1] == b"\2":
        snapshots.decode_spec(data[1:].decode(errors="replace"))
    else:
        (snapshots.decode_answer if data[:1] == b"\1" else snapshots.decode_request)(data[1:])


def _held_messages() -> tuple[bytes, ...]:
    cut = ParameterSlice(1, 4, 1, 0, 4)
    piece = held.HeldPiece("w", cut, ("weights",), "F32", (held.Span(64, 4, "F32"),))
    shard = held.SaveShard(
        version=3,
        stem="checkpoint-3",
        rank=1,
        place=1,
        homes=(0, 1),
        block="state",
        counter=144,
        count=5,
        storage="/saved",
        log="/run/commits.zlog",
        plan="{}",
        loss_scale=(1.0,),
        keep=2,
        every=0,
        codec=Codec.NONE,
        pieces=(piece,),
    )
    asked = (held.Save(), held.Ask("checkpoint-3", True), held.Decided("checkpoint-3", True))
    return (
        *(b"\0" + held.encode(one) for one in asked),
        b"\1" + held.encode(held.Heard("checkpoint-3", held.Event.WROTE, 7)),
        b"\2" + held.encode(shard),
    )


_HELD = (held.decode_asked, held.decode_heard, held.decode_shard)


@target("held.message", "what ranks and what writes their shards send", _held_messages, RemoteProtocolError)
def _held_message(data: bytes) -> None:
    _HELD[data[0] % len(_HELD) if data else 0](data[1:])


def _guard_messages() -> tuple[bytes, ...]:
    reported = (guards.Here(local_rank=1), guards.Signalled(number=15))
    return *(b"\0" + guards.encode(each) for each in reported), b"\1" + guards.encode(
        guards.RankEnded(code=7)
    )


@target("guard.message", "what the guards of a host send to each other", _guard_messages, RemoteProtocolError)
def _guard_message(data: bytes) -> None:
    decode = guards.decode_ended if data[:1] == b"\1" else guards.decode_reported
    decode(data[1:])


@functools.cache
def _records() -> tuple[bytes, ...]:
    both = {
        "generation": 1,
        "founder": "a",
        "name": "a",
        "address": "a:1",
        "epoch": 2,
        "id": 3,
        "incarnation": 4,
    }
    cluster, join_address = (
        ClusterRecord(generation=1, founder="a"),
        MemberRecord(name="a", address="b:1", generation=2),
    )
    return (msgspec.json.encode(both), msgspec.json.encode(cluster), msgspec.json.encode(join_address))


@target("etcd.record", "a record in etcd, which others can write", _records, RemoteProtocolError)
def _record(data: bytes) -> None:
    refused: RemoteProtocolError | None = None
    reads: tuple[Callable[[], object], ...] = (
        lambda: read_record(data, ClusterRecord),
        lambda: read_record(data, MemberRecord),
        lambda: read_record(data, WitnessRecord),
    )
    for read in reads:
        try:
            read()
        except RemoteProtocolError as error:
            refused = error
    if refused is not None:
        raise refused


MESSAGES_MAX = 16
NODES = tuple(Node(NodeKey(i, 1), f"10.0.0.{i}:29400", f"n{i}") for i in range(1, 5))
VIEW = ClusterView(epoch=3, nodes=NODES)
BEAT_KEY = b"k" * BEAT_KEY_BYTES
COOKIE = b"a cookie that the fuzzers share."


def _messages() -> list[bytes]:
    """One of each, by the encoders that nodes use."""
    me, newcomer = NODES[0], Node(NodeKey(9, 1), "10.0.0.9:29400", "n9")
    ballot = m.Ballot(2, 1)
    change = ViewChange(epoch=4, removed=(NODES[3].key,), added=(newcomer,))
    accepted = m.Accepted(ballot=ballot, change=change)
    said: list[m.Message] = [
        m.Join(node=newcomer),
        m.MemberReport(epoch=3, down=(NODES[3].key,), proven=(NODES[2].key,), joins=(newcomer,), leaves=True),
        m.RoundRequest(phase=m.RoundPhase.PREPARE, epoch=3, ballot=ballot, root=me.key, excluded=(4,)),
        m.RoundRequest(
            phase=m.RoundPhase.ACCEPT, epoch=3, ballot=ballot, root=me.key, excluded=(), change=change
        ),
        m.RoundRequest(
            phase=m.RoundPhase.LEARN, epoch=4, ballot=ballot, root=me.key, excluded=(), change=change
        ),
        m.RoundRequest(phase=m.RoundPhase.ENTER, epoch=3, ballot=ballot, root=me.key, excluded=()),
        m.RoundReply(phase=m.RoundPhase.PREPARE, epoch=3, ballot=ballot, missing=(2, 4), accepted=accepted),
        m.Behind(epoch=2),
        m.Learn(view=ClusterView(epoch=5, nodes=NODES)),
        m.Excluded(epoch=9, reason="it was silent"),
        m.Beat(known=3, entered=3),
    ]
    stripe = bytes(range(SESSION_ID_BYTES))
    pair = QueuePairAt(gid=bytes(GID_BYTES), lid=0, number=17, first_psn=5, mtu=3)
    at = BeatsAt(at=pair, address=1 << 40, key=9)
    beats: list[BeatsSaid] = [
        BeatsOffer(lane=stripe, at=at),
        BeatsAnswer(lane=stripe, why="node2 has no RDMA device"),
        BeatsReady(lane=stripe),
    ]
    return [msgspec.msgpack.encode(message) for message in (*said, *beats)]


def _hail() -> bytes:
    hail = contracts.Hail(
        node=NODES[1],
        protocol=contracts.PROTOCOL_VERSION,
        release="0.1.0",
        wall_ns=1_700_000_000_000_000_000,
        boot_id="b",
        pid_space="pid:[4026531836]",
        pid=5,
        started=7,
    )
    return msgspec.msgpack.encode(hail)


@target(
    "cluster.message",
    "what one node says to another",
    lambda: (*_messages(), _hail()),
    RemoteProtocolError,
    UnknownContract,
)
def _message(data: bytes) -> None:
    contract = contracts.decode(data)
    if contracts.decode(msgspec.msgpack.encode(contract)) != contract:
        raise Broken(f"{contract} is not what comes of its own bytes")


@target(
    "cluster.machine",
    "a member that says anything, to the machine of another",
    lambda: (blocks(_messages()), *(blocks([one]) for one in _messages())),
    RemoteProtocolError,
    UnknownContract,
    bytes_per_byte=1024,
)
def _machine(data: bytes) -> None:
    """Whatever another member says, one message a block: the machine holds together."""
    machine = ClusterMachine(NODES[1], derive())
    now_ns = 1
    machine.handle(m.JoinCluster(doors=(NODES[0],)), now_ns=now_ns)
    machine.handle(m.Received(sender=NODES[0], message=m.Learn(view=VIEW)), now_ns=now_ns)
    for block in read_blocks(data, MESSAGES_MAX):
        now_ns += 30_000_000
        contract = contracts.decode(block)
        if not isinstance(contract, m.Message):
            continue
        try:
            machine.handle(m.Received(sender=NODES[0], message=contract), now_ns=now_ns)
            machine.handle(TimerFired(), now_ns=now_ns)
        except LocalProtocolError as error:  # the driver ends the link for it
            raise RemoteProtocolError(str(error)) from error
        machine.check_invariants()


def _beat_seeds() -> tuple[bytes, ...]:
    writer = BeatWriter(BEAT_KEY)
    beats = [writer.write(7, 6), writer.write(7, 7), writer.write(2**64 - 1, 0)]
    whole = b"".join(beats)
    return (blocks(beats), blocks([whole]), blocks([whole[:5], whole[5:40], whole[40:]]))


@target("cluster.beats", "a stripe for heartbeats", _beat_seeds, RemoteProtocolError)
def _beats(data: bytes) -> None:
    """A stripe for heartbeats, in the pieces that the network happens to make of it."""
    reader, pieces = BeatReader(BEAT_KEY), list(read_blocks(data, MESSAGES_MAX))
    for piece in pieces:
        reader.feed(piece)
    if reader.beats != sum(map(len, pieces)) // BEAT_BYTES:
        raise Broken(f"{reader.beats} beats came of {sum(map(len, pieces))} bytes")


@target(
    "node.state",
    "a node's state directory",
    lambda: (
        msgspec.json.encode(NodeRecord(id=7, incarnation=3, join_addresses=("10.0.0.1:29400",))),
        msgspec.json.encode(NodeRecord(id=1, incarnation=0)),
    ),
    StateError,
)
def _state(data: bytes) -> None:
    with folder() as directory:
        directory.chmod(0o700)
        (directory / "node.json").write_bytes(data)
        state = NodeState.open(directory)
        try:
            before = state.new_incarnation()
            if before.incarnation < 1 or state.new_incarnation() <= before:
                raise Broken("a life that another one had")
        finally:
            state.close()


def _token_seeds() -> tuple[bytes, ...]:
    tokens = (Token(COOKIE, ("10.0.0.1:29400", "[::1]:7")), Token(COOKIE * 2, ()))
    return tuple(write_token(token).encode() for token in tokens)


@target("node.token", "a token that somebody has pasted", _token_seeds, UserError)
def _token(data: bytes) -> None:
    token, addresses = read_token(data.decode(errors="replace"))
    if len(addresses) != len(token.addresses):
        raise Broken("addresses were lost")
