"""etcd as a store of join addresses and as a witness, with a real server that is killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.cluster.etcd_server import EtcdServer, etcd_server, free_ports

from zbmd.actors.bootstrap import etcd_store as etcd_doors
from zbmd.actors.bootstrap.etcd_client import (
    EtcdClient,
    EtcdError,
    compare_none,
    compare_revision,
    get,
    parse_etcd_url,
    put,
)
from zbmd.actors.bootstrap.etcd_store import EtcdMembers, EtcdWitness, FoundingResult
from zbmd.actors.cluster.membership.witness import TieBreakerNamed
from zbmd.actors.cluster.state.node_id import NodeKey
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress

PATIENCE_S = 180.0
RETRY_NS = 20_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


def client(server: EtcdServer, name: str) -> EtcdClient:
    return EtcdClient(parse_etcd_url(f"{server.url}/{name}"), {})


def members_of(
    server: EtcdServer, name: str, port: int, superseded: Callable[[str], None] = lambda reason: None
) -> EtcdMembers:
    address = TcpAddress(host="10.0.0.1", port=port)
    return EtcdMembers(client(server, name), name=f"node{port}", address=address, on_superseded=superseded)


@asynccontextmanager
async def member(join_addresses: EtcdMembers) -> AsyncGenerator[FoundingResult]:
    standing = await join_addresses.enter()
    async with join_addresses.kept(standing):
        yield standing


async def test_transactions_compare_revisions(server: EtcdServer) -> None:
    etcd = client(server, "transactions")
    wrote = [put("/t/a", b"1")]
    assert (await etcd.transaction([compare_none("/t/")], wrote)).succeeded
    assert not (await etcd.transaction([compare_none("/t/")], wrote)).succeeded
    (pair,) = await etcd.range("/t/")
    assert (pair.key, pair.value, pair.lease) == (b"/t/a", b"1", 0)
    assert not (await etcd.transaction([compare_revision("/t/a", pair.mod_revision + 1)], wrote)).succeeded
    outcome = await etcd.transaction(
        [compare_revision("/t/a", pair.mod_revision)], [put("/t/a", b""), get("/t/a")]
    )
    assert outcome.succeeded and outcome.found()[0].value == b""
    await etcd.delete("/t/a")
    assert await etcd.range("/t/") == ()
    assert (await etcd.transaction([compare_revision("/t/a", 0)], wrote)).succeeded


async def test_the_first_founds_and_the_others_find_its_door(server: EtcdServer) -> None:
    async with member(members_of(server, "found", 1)) as first:
        assert (first.founds, first.generation, first.join_addresses) == (True, 1, ())
        async with member(members_of(server, "found", 2)) as second:
            assert (second.founds, second.generation) == (False, 1)
            assert [str(join_address) for join_address in second.join_addresses] == ["10.0.0.1:1"]
            third = await members_of(server, "found", 3).enter()
            assert [join_address.port for join_address in third.join_addresses] == [1, 2]
        assert [
            join_address.port for join_address in await members_of(server, "found", 3).join_addresses()
        ] == [1], "it left, and its join address"
        async with member(members_of(server, "other", 1)) as other:
            assert other.founds, "another name is another cluster"
    async with member(members_of(server, "found", 3)) as again:
        assert (again.founds, again.generation) == (True, 2), "nobody was left"


async def test_of_many_at_once_one_founds(server: EtcdServer) -> None:
    standings = await asyncio.gather(*(members_of(server, "many", port).enter() for port in range(1, 9)))
    assert sum(standing.founds for standing in standings) == 1
    assert {standing.generation for standing in standings} == {1}


async def test_a_next_life_at_the_same_address_founds_again(server: EtcdServer) -> None:
    await members_of(server, "life", 1).enter()
    again = await members_of(server, "life", 1).enter()
    assert (again.founds, again.generation) == (True, 2)


async def test_a_lease_that_has_ended_is_taken_again(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_doors, "BEATS_A_LEASE", 100)
    async with member(members_of(server, "lease", 1)):
        etcd = client(server, "lease")
        (pair,) = await etcd.range(etcd.url.members_prefix)
        await etcd.revoke(pair.lease)
        async with asyncio.timeout(PATIENCE_S):
            while not (pairs := await etcd.range(etcd.url.members_prefix)):
                continue
        assert pairs[0].value == pair.value and pairs[0].lease != pair.lease


async def test_who_was_cut_off_while_others_founded_anew_is_told(
    server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = asyncio.get_running_loop().create_future()
    old = members_of(server, "anew", 1, told.set_result)
    standing = await old.enter()
    etcd = client(server, "anew")
    (pair,) = await etcd.range(etcd.url.members_prefix)
    await etcd.revoke(pair.lease)
    async with member(members_of(server, "anew", 2)) as new:
        assert (new.founds, new.generation) == (True, 2)
        with pytest.raises(etcd_doors.Superseded):
            async with old.kept(standing):
                pass
    monkeypatch.setattr(etcd_doors, "BEATS_A_LEASE", 100)
    later = members_of(server, "anew", 3, told.set_result)
    standing = await later.enter()
    async with later.kept(standing):
        (pair,) = await etcd.range(etcd.url.members_prefix)
        await etcd.transaction([], [put(etcd.url.cluster_key, b'{"generation":9,"founder":"node7"}')])
        await etcd.revoke(pair.lease)
        async with asyncio.timeout(PATIENCE_S):
            assert "founded again by node7 (founding 9, ours is 3)" in await told


async def test_what_others_wrote_there_is_refused_and_told(server: EtcdServer) -> None:
    etcd = client(server, "garbage")
    prefix = etcd.url.members_prefix
    for at, value in enumerate(
        (b"\xff", b"{}", b'{"name":"a","address":"nowhere","generation":1}', b"[" * 5000)
    ):
        await etcd.transaction([], [put(f"{prefix}{at}", value)])
    assert await members_of(server, "garbage", 1).join_addresses() == ()
    with pytest.raises(EtcdError, match="times others founded"):
        await members_of(server, "garbage", 1).enter()


async def test_the_witness_gives_an_epoch_once(server: EtcdServer) -> None:
    given: dict[int, asyncio.Future[TieBreakerNamed]] = {}
    witnesses: list[EtcdWitness] = []
    for node in range(2):
        given[node] = asyncio.get_running_loop().create_future()
        witness = EtcdWitness(
            client(server, "split"),
            NodeKey(node, 1),
            generation=1,
            retry_ns=RETRY_NS,
            on_given=given[node].set_result,
        )
        witnesses.append(witness)
    for witness in witnesses:
        witness.want(5)
    async with asyncio.timeout(PATIENCE_S):
        holders = {(await answer).holder for answer in given.values()}
    assert len(holders) == 1 and holders <= {NodeKey(0, 1), NodeKey(1, 1)}
    for witness in witnesses:
        await witness.close()


@pytest.mark.parametrize("generation", [1, 2])
async def test_a_record_of_an_earlier_founding_counts_for_nothing(
    server: EtcdServer, generation: int
) -> None:
    answer: asyncio.Future[TieBreakerNamed] = asyncio.get_running_loop().create_future()
    me = NodeKey(generation, 1)
    witness = EtcdWitness(
        client(server, "foundings"),
        me,
        generation=generation,
        retry_ns=RETRY_NS,
        on_given=answer.set_result,
    )
    witness.want(7)
    async with asyncio.timeout(PATIENCE_S):
        assert (await answer).holder == me
    await witness.close()


async def test_a_server_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    with etcd_server(tmp_path) as server:
        answer: asyncio.Future[TieBreakerNamed] = asyncio.get_running_loop().create_future()
        async with member(members_of(server, "back", 1)):
            server.kill()
            with pytest.raises(EtcdError, match="no etcd answers"):
                await client(server, "back").range("/")
            witness = EtcdWitness(
                client(server, "back"),
                NodeKey(1, 1),
                generation=1,
                retry_ns=RETRY_NS,
                on_given=answer.set_result,
            )
            witness.want(2)
            await asyncio.to_thread(server.start)
            async with asyncio.timeout(PATIENCE_S):
                assert (await answer).holder == NodeKey(1, 1)
            await witness.close()
            assert [
                join_address.port for join_address in await members_of(server, "back", 9).join_addresses()
            ] == [1], "it is on disk"


async def test_one_of_several_endpoints_is_enough(server: EtcdServer) -> None:
    (nobody,) = free_ports(1)
    url = parse_etcd_url(f"etcd://127.0.0.1:{nobody},127.0.0.1:{server.port}/several")
    etcd = EtcdClient(url, {})
    assert await etcd.range("/nothing/") == ()
    with pytest.raises(EtcdError, match="requested lease not found"):
        await etcd.transaction([], [put("/x", b"", lease=12345)])


async def test_what_is_no_etcd_is_told(tmp_path: Path) -> None:
    """A server that speaks something else, says too much, or says nothing."""
    answers = [
        b"220 smtp\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n" + bytes(2 << 20),
        b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nxxx",
        b"",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[0])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        etcd = EtcdClient(parse_etcd_url(f"etcd://127.0.0.1:{port}/x"), {})
        while answers:
            with pytest.raises(EtcdError, match=r"no etcd answers kv/range: 127\.0\.0\.1"):
                await etcd.range("/")
            answers.pop(0)


@pytest.mark.parametrize(
    ("text", "again"),
    [
        ("etcd://a/job", "etcd://a:2379/job"),
        ("etcds://a:1,[::1]:2/b/c-1", "etcds://a:1,[::1]:2/b/c-1"),
    ],
)
def test_addresses_of_a_store(text: str, again: str) -> None:
    assert str(parse_etcd_url(text)) == again


@pytest.mark.parametrize(
    "text",
    ["", "etcd://a", "etcd://a/", "http://a/b", "etcd:///b", "etcd://a:0/b", "etcd://a/b c", "etcd://a//b"],
)
def test_what_is_no_address_of_a_store(text: str) -> None:
    with pytest.raises(UserError):
        parse_etcd_url(text)


def test_certificates_that_are_not_there_are_named() -> None:
    with pytest.raises(UserError, match="ETCDCTL_CACERT"):
        EtcdClient(parse_etcd_url("etcds://a/b"), {"ETCDCTL_CACERT": "/nowhere"})
