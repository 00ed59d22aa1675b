"""Targets of what launchers and stores say: lists of hosts, environments, answers of etcd, records in it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec

from zbmd.actors.bootstrap.etcd_client import EtcdError, TransactionResult, decode_reply
from zbmd.actors.bootstrap.etcd_url import (
    ClusterRecord,
    MemberRecord,
    WitnessRecord,
    parse_etcd_url,
    read_record,
)
from zbmd.actors.bootstrap.hostlist import format_hostlist, parse_hostlist
from zbmd.actors.bootstrap.kubernetes import Pod
from zbmd.actors.bootstrap.merge import bootstrap_of
from zbmd.actors.bootstrap.readings import LauncherFacts, NodeRange, Stated
from zbmd.tools.fuzzing.target import Broken, Target
from zbmd.transport.errors import RemoteProtocolError, UserError

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


def _text(parse: Callable[[str], None]) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        parse(data.decode(errors="replace"))

    return run


def _hosts(text: str) -> None:
    hosts = parse_hostlist(text, hosts_max=HOSTS_MAX)
    if len(hosts) > HOSTS_MAX or parse_hostlist(format_hostlist(hosts)) != hosts:
        raise Broken(f"{len(hosts)} hosts, formatted {format_hostlist(hosts)[:200]}")


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


def _url(text: str) -> None:
    found = parse_etcd_url(text)
    if parse_etcd_url(str(found)) != found:
        raise Broken(f"{found!r} is written {found}")


def _reply(data: bytes) -> None:
    outcome = decode_reply(200 if data[:1] != b"!" else 404, data.removeprefix(b"!"), TransactionResult)
    if len(outcome.found()) > len(data):
        raise Broken(f"{outcome}")


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


def _replies() -> tuple[bytes, ...]:
    header = b'"header":{"cluster_id":"1","member_id":"2","revision":"3","raft_term":"2"}'
    pair = b'{"key":"Zm9v","mod_revision":"2","value":"YmFy","lease":"7"}'
    found = b'{"response_range":{"kvs":[' + pair + b'],"count":"1"}}'
    return (
        b"{" + header + b"}",
        b"{" + header + b',"succeeded":true,"responses":[{"response_put":{}},' + found + b"]}",
        b'!{"error":"etcdserver: requested lease not found","message":"no","code":5}',
    )


TARGETS = (
    Target(
        name="hostlist",
        what="a list of hosts as Slurm writes it",
        allowed=(UserError,),
        seeds=lambda: (b"a[001-003,7]-ib,b12,c[1-2][3-4]", b"n1,n2", b"[1-3]", b"a[08-11]b[0-1]"),
        run=_text(_hosts),
    ),
    Target(
        name="bootstrap.environment",
        what="the environment that a launcher gives",
        allowed=(UserError,),
        seeds=lambda: tuple(text.encode() for text in ENVIRONMENTS),
        run=_text(_environment),
    ),
    Target(
        name="etcd.url",
        what="the address of a store",
        allowed=(UserError,),
        seeds=lambda: (b"etcd://a:2379/job", b"etcds://a,[::1]:1,10.0.0.1/b/c"),
        run=_text(_url),
    ),
    Target(
        name="etcd.reply",
        what="an answer of etcd's",
        allowed=(EtcdError, RemoteProtocolError),
        seeds=_replies,
        run=_reply,
    ),
    Target(
        name="etcd.record",
        what="a record in etcd, which others can write",
        allowed=(RemoteProtocolError,),
        seeds=_records,
        run=_record,
    ),
)
