"""The link that two processes use: on one host, in containers, across hosts with and without RDMA."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import machines

from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import (
    Capabilities,
    InterfaceFilter,
    Transport,
    choose_link,
    parse_interface_filter,
    parse_wanted_devices,
    rank_interfaces,
    rdma_paths,
    share_of,
    why_no_rdma,
)
from zbmd.transport.host.topology import (
    HostFacts,
    Interface,
    InterfaceKind,
    PciLocation,
    RdmaDevice,
    RdmaPort,
    read_host_facts,
)
from zbmd.transport.host.topology.devices import Gid


def interface(
    name: str,
    *,
    speed_mbps: int | None = 10_000,
    kind: InterfaceKind = InterfaceKind.HARDWARE,
    addresses: tuple[str, ...] = ("192.0.2.1",),
    up: bool = True,
    numa_node: int | None = None,
) -> Interface:
    return Interface(
        name=name,
        kind=kind,
        up=up,
        speed_mbps=speed_mbps,
        mtu=1500,
        driver=None,
        place=None if numa_node is None else PciLocation(path=("pci0000:00", name), numa_node=numa_node),
        addresses=addresses,
    )


LOOPBACK = interface("lo", kind=InterfaceKind.LOOPBACK, speed_mbps=None, addresses=("127.0.0.1", "::1"))
DOCKER = interface("docker0", kind=InterfaceKind.CONTAINERS, addresses=("172.17.0.1",))


def rdma(
    name: str,
    *,
    state: str = "ACTIVE",
    layer: str = "InfiniBand",
    gbps: float = 400,
    numa_node: int | None = None,
    kinds: tuple[str, ...] = ("IB/RoCE v1", "RoCE v2"),
) -> RdmaDevice:
    gids = tuple(
        Gid(index=index, gid=f"::ffff:192.0.2.{index}", kind=kind, interface=None)
        for index, kind in enumerate(kinds)
    )
    port = RdmaPort(number=1, state=state, link_layer=layer, rate_gbps=gbps, gids=gids)
    place = None if numa_node is None else PciLocation(path=("pci0000:00", name), numa_node=numa_node)
    return RdmaDevice(name=name, place=place, firmware=None, interfaces=(), ports=(port,))


A = HostFacts(
    name="a", boot_id="1", namespaces=("net:[1]", "pid:[1]"), uid=7, interfaces=(LOOPBACK, interface("eth0"))
)
B = dataclasses.replace(A, name="b", boot_id="2")


def test_on_one_host_memory_is_shared() -> None:
    choice = choose_link(A, A)
    assert (choice.transport, choice.better) == (Transport.SHM, ())
    assert "one host" in choice.reason


def test_two_users_of_one_host_use_loopback_and_are_told_why() -> None:
    choice = choose_link(A, dataclasses.replace(A, uid=8))
    assert (choice.transport, choice.device, choice.peer_device) == (Transport.TCP, "lo", "lo")
    assert any("users 7 and 8" in each for each in choice.better)


def test_two_containers_of_one_host_use_their_network() -> None:
    choice = choose_link(A, dataclasses.replace(A, namespaces=("net:[2]", "pid:[2]")))
    assert (choice.transport, choice.device) == (Transport.TCP, "eth0")
    assert any("--network host" in each for each in choice.better)
    same_network = choose_link(A, dataclasses.replace(A, namespaces=("net:[1]", "pid:[2]")))
    assert same_network.device == "lo"


def test_without_a_boot_id_nothing_is_taken_for_one_host() -> None:
    unknown = dataclasses.replace(A, boot_id="")
    assert choose_link(unknown, unknown).transport is Transport.TCP


def test_across_hosts_the_fastest_interface_is_taken() -> None:
    fast = interface("eth1", speed_mbps=100_000)
    host = dataclasses.replace(A, interfaces=(LOOPBACK, interface("eth0"), fast, DOCKER))
    choice = choose_link(host, B)
    assert (choice.transport, choice.device, choice.peer_device) == (Transport.TCP, "eth1", "eth0")
    assert choice.reason == "different hosts; eth1 (100 Gbit/s, 192.0.2.1): the fastest that is up"
    assert choice.better == ()


def test_of_two_alike_the_near_one_is_taken() -> None:
    pair = (interface("eth0", numa_node=0), interface("eth1", numa_node=1))
    host = dataclasses.replace(A, interfaces=pair, numa_node=1)
    choice = choose_link(host, B)
    assert choice.device == "eth1"
    assert "nearest to NUMA node 1" in choice.reason
    assert choose_link(dataclasses.replace(host, numa_node=None), B).device == "eth0"


def test_networks_of_containers_are_the_last_resort() -> None:
    host = dataclasses.replace(A, interfaces=(LOOPBACK, DOCKER, interface("wlan0", speed_mbps=None)))
    assert choose_link(host, B).device == "wlan0"
    only_docker = dataclasses.replace(A, interfaces=(LOOPBACK, DOCKER))
    assert choose_link(only_docker, B).device == "docker0"


def test_loopback_leads_to_no_other_host() -> None:
    with pytest.raises(UserError, match=r"a has no interface that is up.*lo \(up\), eth0 \(down\)"):
        choose_link(dataclasses.replace(A, interfaces=(LOOPBACK, interface("eth0", up=False))), B)


def test_the_user_chooses_the_interface() -> None:
    host = dataclasses.replace(A, interfaces=(interface("eth0"), interface("eth1", speed_mbps=100_000)))
    can = Capabilities(interfaces=parse_interface_filter("=eth0"))
    choice = choose_link(host, B, can)
    assert choice.device == "eth0"
    assert "ZBMD_SOCKET_IFNAME==eth0 admits it" in choice.reason
    assert any(each.startswith("eth1 (100 Gbit/s, 192.0.2.1) is faster") for each in choice.better)
    with pytest.raises(UserError, match="no interface that ZBMD_SOCKET_IFNAME=ib admits"):
        choose_link(host, B, Capabilities(interfaces=parse_interface_filter("ib")))


@pytest.mark.parametrize(
    ("text", "admitted"),
    [
        ("eth", {"eth0", "eth1"}),
        ("eth0,ib", {"eth0", "ib0"}),
        ("=eth", set[str]()),
        ("=eth0", {"eth0"}),
        ("^eth", {"ib0", "docker0"}),
        ("^=eth0", {"eth1", "ib0", "docker0"}),
        (" ^ docker , lo ", {"eth0", "eth1", "ib0"}),
    ],
)
def test_interfaces_are_named_as_for_nccl(text: str, admitted: set[str]) -> None:
    wanted = parse_interface_filter(text)
    assert {name for name in ("eth0", "eth1", "ib0", "docker0") if wanted.admits(name)} == admitted
    assert parse_interface_filter(str(wanted)) == wanted


@pytest.mark.parametrize("text", ["", " ", "^", "=", "^=,", ","])
def test_a_choice_of_no_interface_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="names no interface"):
        parse_interface_filter(text)


def test_the_two_sides_need_addresses_of_one_kind() -> None:
    four = dataclasses.replace(A, interfaces=(interface("eth0", addresses=("192.0.2.1",)),))
    six = dataclasses.replace(B, interfaces=(interface("eth0", addresses=("2001:db8::1",)),))
    with pytest.raises(UserError, match="one has only IPv4"):
        choose_link(four, six)
    both = dataclasses.replace(
        B, interfaces=(*six.interfaces, interface("eth9", speed_mbps=10, addresses=("192.0.2.2",)))
    )
    choice = choose_link(four, both)
    assert (choice.device, choice.peer_device) == ("eth0", "eth9")


def with_rdma(host: HostFacts, *devices: RdmaDevice, missing: str | None = None) -> HostFacts:
    return dataclasses.replace(host, rdma_devices=devices, verbs_missing=missing)


def test_rdma_is_taken_where_both_hosts_have_it() -> None:
    near = with_rdma(dataclasses.replace(A, numa_node=1), rdma("m0", numa_node=0), rdma("m1", numa_node=1))
    choice = choose_link(near, with_rdma(B, rdma("x", gbps=200)))
    assert (choice.transport, choice.device, choice.peer_device) == (Transport.RDMA, "m1", "x")
    assert choice.reason == "both hosts have RDMA: m1 (InfiniBand, 400 Gbit/s) and x (InfiniBand, 200 Gbit/s)"


A_RDMA, B_RDMA = with_rdma(A, rdma("m")), with_rdma(B, rdma("m"))


@pytest.mark.parametrize(
    ("a", "b", "can", "why"),
    [
        (A, B_RDMA, Capabilities(), "a has no RDMA device"),
        (A, B, Capabilities(), "a has no RDMA device; b has no RDMA device"),
        (with_rdma(A, rdma("m"), missing="no pyverbs"), B_RDMA, Capabilities(), "device, but no pyverbs"),
        (A_RDMA, with_rdma(B, rdma("m"), missing="x"), Capabilities(), "b has an RDMA device, but x"),
        (with_rdma(A, rdma("m", state="DOWN")), B_RDMA, Capabilities(), "port 1 of m on a is DOWN"),
        (with_rdma(A, rdma("m", layer="Ethernet")), B_RDMA, Capabilities(), "different link layers"),
        (
            A_RDMA,
            with_rdma(B, rdma("m", layer="Ethernet", kinds=("IB/RoCE v1",))),
            Capabilities(),
            "port 1 of m on b has no RoCE v2 address (it has: IB/RoCE v1)",
        ),
        (
            dataclasses.replace(A_RDMA, locked_bytes_max=64 << 10),
            B_RDMA,
            Capabilities(),
            "a process of a may lock 64 KiB and RDMA needs 98304: raise it with ulimit -l",
        ),
        (
            A_RDMA,
            B_RDMA,
            Capabilities(peer_rdma_devices=parse_wanted_devices("x")),
            "ZBMD_RDMA_DEVICES admits none of the RDMA devices of b (m)",
        ),
        (
            A_RDMA,
            B_RDMA,
            Capabilities(rdma_devices=parse_wanted_devices("m@192.0.2.9")),
            "port 1 of m on a has no usable address 192.0.2.9",
        ),
    ],
)
def test_why_a_link_is_not_rdma_is_told_in_a_line(
    a: HostFacts, b: HostFacts, can: Capabilities, why: str
) -> None:
    choice = choose_link(a, b, can)
    assert choice.transport is Transport.TCP
    assert why in choice.no_rdma and "\n" not in choice.no_rdma
    helps = bool(a.rdma_devices and b.rdma_devices)
    assert choice.better == ((choice.no_rdma,) if helps else ()), "nobody is advised to buy a device"


def test_ranks_of_a_host_share_its_equal_devices() -> None:
    host = with_rdma(A, rdma("m1"), rdma("m0"), rdma("slow", gbps=100))
    paths = rdma_paths(host)
    assert [path.device for path in paths] == ["m1", "m0", "slow"]
    assert [share_of(paths, turn).device for turn in range(3)] == ["m1", "m0", "m1"]


def test_the_user_names_devices_and_addresses() -> None:
    host = with_rdma(A, rdma("m0", layer="Ethernet"), rdma("m1", layer="Ethernet"))
    wanted = parse_wanted_devices(" m1@192.0.2.1 , ")
    assert why_no_rdma(host, wanted) is None
    (path,) = rdma_paths(host, wanted)
    assert (path.device, path.address) == ("m1", "192.0.2.1")
    assert rdma_paths(host, parse_wanted_devices("m1@192.0.2.0")) == (), "that one is RoCE v1"


@pytest.mark.parametrize("text", ["m1@", "@192.0.2.1", "m1@host"])
def test_what_names_no_device_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="ZBMD_RDMA_DEVICES"):
        parse_wanted_devices(text)


def test_a_made_up_server_and_its_twin(tmp_path: Path) -> None:
    machine = machines.server(tmp_path)
    facts = read_host_facts(tmp_path, addresses=machine.addresses, numa_node=1)
    assert facts.verbs_missing is None or "pyverbs" in facts.verbs_missing
    facts = dataclasses.replace(facts, boot_id="1", verbs_missing=None, locked_bytes_max=None)
    twin = dataclasses.replace(facts, boot_id="2", name="twin")
    choice = choose_link(facts, twin)
    assert (choice.transport, choice.device) == (Transport.RDMA, "mlx5_4"), "the first on NUMA node 1"
    without = dataclasses.replace(twin, rdma_devices=())
    over_tcp = choose_link(facts, without)
    assert (over_tcp.transport, over_tcp.device) == (Transport.TCP, "ib4")
    ethernet = choose_link(facts, without, Capabilities(interfaces=parse_interface_filter("en")))
    assert ethernet.device == "eno2"


def test_this_host_shares_memory_with_itself() -> None:
    facts = read_host_facts()
    assert facts.boot_id
    assert all(facts.namespaces)
    assert choose_link(facts, facts).transport is Transport.SHM


INTERFACES = st.builds(
    interface,
    st.sampled_from(["eth0", "eth1", "ib0", "docker0"]),
    speed_mbps=st.sampled_from([None, 1000, 10_000, 100_000]),
    kind=st.sampled_from(InterfaceKind),
    addresses=st.lists(st.sampled_from(["192.0.2.1", "2001:db8::1", "fe80::1"]), unique=True).map(tuple),
    up=st.booleans(),
    numa_node=st.sampled_from([None, 0, 1]),
)
DEVICES = st.builds(
    rdma,
    st.sampled_from(["m0", "m1"]),
    state=st.sampled_from(["ACTIVE", "DOWN"]),
    layer=st.sampled_from(["InfiniBand", "Ethernet"]),
    gbps=st.sampled_from([100.0, 400.0]),
    numa_node=st.sampled_from([None, 0, 1]),
)
HOSTS = st.builds(
    HostFacts,
    name=st.sampled_from(["a", "b"]),
    boot_id=st.sampled_from(["", "1", "2"]),
    namespaces=st.sampled_from([("net:[1]", "pid:[1]"), ("net:[2]", "pid:[1]"), ("net:[1]", "pid:[2]")]),
    uid=st.sampled_from([0, 7]),
    numa_node=st.sampled_from([None, 0, 1]),
    interfaces=st.lists(INTERFACES, max_size=4, unique_by=lambda each: each.name).map(tuple),
    rdma_devices=st.lists(DEVICES, max_size=2, unique_by=lambda each: each.name).map(tuple),
    verbs_missing=st.sampled_from([None, "no pyverbs"]),
)


@given(HOSTS, HOSTS)
def test_both_sides_come_to_the_same_link(a: HostFacts, b: HostFacts) -> None:
    try:
        there = choose_link(a, b)
    except UserError:
        with pytest.raises(UserError):
            choose_link(b, a)
        return
    back = choose_link(b, a)
    assert there.transport is back.transport
    assert (there.device, there.peer_device) == (back.peer_device, back.device)
    assert there.reason
    if there.transport is Transport.TCP:
        chosen = next(each for each in a.interfaces if each.name == there.device)
        assert chosen.up
        assert chosen.addresses


@given(st.lists(INTERFACES, max_size=6, unique_by=lambda each: each.name))
def test_the_ranking_does_not_depend_on_the_order(interfaces: list[Interface]) -> None:
    ranked = rank_interfaces(interfaces, InterfaceFilter())
    assert ranked == rank_interfaces(interfaces[::-1], InterfaceFilter())
    assert all(each.up and each.addresses for each in ranked)
