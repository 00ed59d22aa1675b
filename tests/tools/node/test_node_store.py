"""`zbmd-node up --store`: nodes that find each other in a real etcd, which is their witness too."""

from __future__ import annotations

import signal
from collections.abc import Generator

import pytest
from support.cluster.cluster_nodes import Nodes
from support.cluster.etcd_server import EtcdServer, etcd_server, free_ports


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


async def form(nodes: Nodes, server: EtcdServer, name: str, *names: str) -> None:
    """Start them all at once; the store says who founds."""
    for node, port in zip(names, free_ports(len(names)), strict=True):
        await nodes.up(node, "--store", f"{server.url}/{name}", listen=f"127.0.0.1:{port}")
    await nodes.agreed(*names)


async def test_either_of_two_nodes_goes_on_without_the_other(nodes: Nodes, server: EtcdServer) -> None:
    await form(nodes, server, "two", "n1", "n2")
    for stopped, left in (("n1", "n2"), ("n2", "n1")):
        marks = nodes.marks()
        nodes.runs[stopped].signal(signal.SIGSTOP)
        await nodes.agreed(left, after=marks)
        marks = nodes.marks()
        nodes.runs[stopped].signal(signal.SIGCONT)
        await nodes.agreed("n1", "n2", after=marks)


async def test_nodes_that_are_killed_find_each_other_again(nodes: Nodes, server: EtcdServer) -> None:
    await form(nodes, server, "three", "n1", "n2", "n3")
    await nodes.runs["n1"].kill()
    await nodes.agreed("n2", "n3")
    (port,) = free_ports(1)
    await nodes.up("n1", "--store", f"{server.url}/three", listen=f"127.0.0.1:{port}")
    await nodes.agreed("n1", "n2", "n3")


async def test_who_asks_no_witness_is_not_let_in(nodes: Nodes, server: EtcdServer) -> None:
    await form(nodes, server, "rules", "n1")
    address = (await nodes.members("n1"))["answered_by"]["address"]
    other = await nodes.up("n2", "--join", address)
    assert await other.ended() == 2
    assert "the cluster asks a witness which half of it may go on" in str(other)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--join", "127.0.0.1:1"), "--store says whom to join"),
        ((), "give --listen a port other than 0"),
    ],
)
async def test_what_a_store_does_not_go_with(
    nodes: Nodes, server: EtcdServer, arguments: tuple[str, ...], complaint: str
) -> None:
    run = await nodes.up("n1", "--store", f"{server.url}/x", *arguments)
    assert await run.ended() == 2
    assert complaint in str(run)
