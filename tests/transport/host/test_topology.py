"""The parts of machines: three made-up ones, odd files, and the one that the tests run on."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.machines import machines

from zbmd.transport.host.topology import (
    Distance,
    InterfaceKind,
    PciLocation,
    affinities,
    distance,
    nvidia_driver_version,
    read_topology,
)
from zbmd.transport.host.topology.cpus import cpu_quota, read_cpus, usable_cpus
from zbmd.transport.host.topology.devices import FREE_GIDS_MAX
from zbmd.transport.host.topology.interfaces import interface_addresses, parse_addresses
from zbmd.transport.host.topology.kernel_files import (
    format_cpu_list,
    natural,
    parse_cpu_list,
    read_int,
    read_text,
)


def test_a_laptop(tmp_path: Path) -> None:
    machine = machines.laptop(tmp_path)
    found = read_topology(tmp_path, addresses=machine.addresses)
    assert (found.cpus.sockets, found.cpus.cores, len(found.cpus.online), found.cpus.usable) == (1, 4, 8, 8)
    assert found.cpus.model == "Made Up 9000"
    first, last = found.cpus.caches
    assert (first.level, first.nbytes, first.count, first.cpus_each) == (1, 32 << 10, 4, 2)
    assert (last.level, last.nbytes, last.count, last.cpus_each) == (3, 32 << 20, 1, 8)
    assert [(node.cpus, node.memory_bytes >> 20) for node in found.numa_nodes] == [(tuple(range(8)), 16_000)]
    assert found.gpus == (), "an integrated GPU is no accelerator"
    assert found.rdma_devices == ()
    assert found.pages.transparent_shared == "advise"
    interfaces = {each.name: each for each in found.interfaces}
    assert interfaces["lo"].kind is InterfaceKind.LOOPBACK
    assert interfaces["docker0"].kind is InterfaceKind.CONTAINERS
    assert interfaces["wlp1s0"].up
    assert interfaces["wlp1s0"].speed_mbps is None
    assert interfaces["wlp1s0"].driver == "iwlwifi"
    assert interfaces["wlp1s0"].addresses == ("192.0.2.17", "2001:db8::17")
    assert not interfaces["enp2s0"].up
    assert interfaces["enp2s0"].speed_mbps is None


def test_a_server_with_eight_gpus(tmp_path: Path) -> None:
    machine = machines.server(tmp_path)
    found = read_topology(tmp_path, addresses=machine.addresses)
    assert (found.cpus.sockets, found.cpus.cores, found.cpus.usable) == (2, 32, 64)
    assert [node.distances for node in found.numa_nodes] == [(10, 21), (21, 10)]
    assert found.numa_nodes[1].cpus == (*range(16, 32), *range(48, 64))
    assert [gpu.place.numa_node for gpu in found.gpus] == [0] * 4 + [1] * 4
    assert {gpu.model for gpu in found.gpus} == {"NVIDIA H100 80GB HBM3"}
    assert all(gpu.usable and gpu.driver == "nvidia" for gpu in found.gpus)
    assert nvidia_driver_version(tmp_path) == "550.54.15"
    assert [device.name for device in found.rdma_devices] == [f"mlx5_{n}" for n in range(8)]
    assert [device.active for device in found.rdma_devices] == [True] * 7 + [False]
    (port,) = found.rdma_devices[0].ports
    assert (port.link_layer, port.rate_gbps, len(port.gids)) == ("InfiniBand", 400.0, 1)
    assert found.rdma_devices[3].interfaces == ("ib3",)
    assert found.rdma_devices[3].firmware == "28.39.1002"
    assert [(p.page_bytes, p.total) for p in found.pages.pools] == [(2 << 20, 1024)]


def test_the_affinity_of_gpus_and_network_devices(tmp_path: Path) -> None:
    machine = machines.server(tmp_path)
    found = affinities(read_topology(tmp_path, addresses=machine.addresses))
    by_pair = {(each.gpu, each.device): each.distance for each in found}
    assert len(by_pair) == len(found) == 8 * (8 + 2)
    for gpu in range(8):
        near = [device for (name, device), d in by_pair.items() if name == f"gpu{gpu}" and d is Distance.PIX]
        assert near == [f"mlx5_{gpu}"], "each GPU shares a switch with one adapter"
    assert by_pair["gpu0", "mlx5_1"] is Distance.NODE
    assert by_pair["gpu0", "mlx5_4"] is Distance.SYS
    assert by_pair["gpu0", "eno1"] is Distance.NODE
    assert by_pair["gpu7", "eno1"] is Distance.SYS


def test_a_container(tmp_path: Path) -> None:
    machine = machines.container(tmp_path)
    found = read_topology(tmp_path, addresses=machine.addresses)
    assert found.cpus.allowed == (4, 5, 6, 7, 12, 13, 14, 15)
    assert found.cpus.quota == 2.5
    assert found.cpus.usable == usable_cpus(tmp_path) == 3
    assert [gpu.usable for gpu in found.gpus] == [False, True]
    interfaces = {each.name: each for each in found.interfaces}
    assert interfaces["eth0"].kind is InterfaceKind.VIRTUAL
    assert interfaces["eth0"].place is None


def test_gpus_of_amd(tmp_path: Path) -> None:
    machine = machines.Machine(tmp_path)
    machine.amd("pci0000:c0/0000:c0:01.1/0000:c1:00.0", node=4, name="gfx90a", memory_mib=64 << 10)
    machine.write("sys/class/kfd/kfd/topology/nodes/0/properties", "simd_count 0\nlocation_id 0")
    (gpu,) = read_topology(tmp_path, addresses={}).gpus
    assert (gpu.vendor, gpu.model, gpu.memory_bytes) == ("AMD", "AMD GPU gfx90a", 64 << 30)
    assert gpu.usable
    assert gpu.place.address == "0000:c1:00.0"


def test_an_rdma_device_in_software(tmp_path: Path) -> None:
    machine = machines.Machine(tmp_path)
    machine.interface("eth0", index=2, addresses=("192.0.2.1",))
    machine.rdma("rxe0", interface="eth0", link_layer="Ethernet", rate_gbps=2)
    (device,) = read_topology(tmp_path, addresses=machine.addresses).rdma_devices
    assert device.place is None
    assert device.interfaces == ("eth0",)
    assert [gid.kind for gid in device.ports[0].gids] == ["RoCE v2"]


def test_gids_behind_free_places_are_found_and_long_tables_not_read_to_their_end(tmp_path: Path) -> None:
    machine = machines.Machine(tmp_path)
    machine.rdma("rxe0", link_layer="Ethernet")
    gids = dict.fromkeys(range(4 * FREE_GIDS_MAX), machines.FREE_GID)
    near, far = FREE_GIDS_MAX // 2, 3 * FREE_GIDS_MAX
    gids[near] = gids[far] = "0000:0000:0000:0000:0000:ffff:c000:0201"
    for index, gid in gids.items():
        machine.write(f"sys/class/infiniband/rxe0/ports/1/gids/{index}", gid)
    (device,) = read_topology(tmp_path, addresses={}).rdma_devices
    assert [gid.index for gid in device.ports[0].gids] == [near]


def test_bonds_and_vlans_are_told_from_other_virtual_interfaces(tmp_path: Path) -> None:
    machine = machines.Machine(tmp_path)
    machine.interface("bond0", index=2)
    (tmp_path / "sys/class/net/bond0/bonding").mkdir()
    machine.interface("bond0.7", index=3, devtype="vlan")
    machine.interface("wg0", index=4, devtype="wireguard")
    machine.interface("veth12ab", index=5)
    (tmp_path / "sys/class/net/bonding_masters").write_text("bond0\n")  # a file among the interfaces
    kinds = {each.name: each.kind for each in read_topology(tmp_path, addresses={}).interfaces}
    aggregate, virtual = InterfaceKind.AGGREGATE, InterfaceKind.VIRTUAL
    containers = InterfaceKind.CONTAINERS
    assert kinds == {"bond0": aggregate, "bond0.7": aggregate, "wg0": virtual, "veth12ab": containers}


PORT = ("pci0000:10", "0000:10:01.0")
SWITCH = (*PORT, "0000:11:00.0")
DISTANCES = [
    ((*SWITCH, "0000:12:00.0", "0000:13:00.0"), (*SWITCH, "0000:12:01.0", "0000:14:00.0"), Distance.PIX),
    ((*PORT, "0000:11:00.0"), (*PORT, "0000:11:00.1"), Distance.PIX),
    (
        (*SWITCH, "0000:12:00.0", "0000:13:00.0", "0000:14:00.0", "0000:15:00.0"),
        (*SWITCH, "0000:12:01.0", "0000:18:00.0", "0000:19:00.0", "0000:1a:00.0"),
        Distance.PXB,
    ),
    ((*PORT, "0000:11:00.0"), ("pci0000:10", "0000:10:02.0", "0000:15:00.0"), Distance.PHB),
    (PORT, ("pci0000:20", "0000:20:01.0"), Distance.NODE),
    (PORT, PORT, Distance.SELF),
]


@pytest.mark.parametrize(("a", "b", "expected"), DISTANCES)
def test_distances(a: tuple[str, ...], b: tuple[str, ...], expected: Distance) -> None:
    place_a, place_b = PciLocation(path=a, numa_node=0), PciLocation(path=b, numa_node=0)
    assert distance(place_a, place_b) is distance(place_b, place_a) is expected
    if expected is Distance.NODE:
        assert distance(place_a, PciLocation(path=b, numa_node=1)) is Distance.SYS


def test_quotas_of_the_first_version_of_cgroups(tmp_path: Path) -> None:
    machine = machines.Machine(tmp_path)
    machine.cpus(sockets=1, cores=8, threads=1)
    machine.write("proc/self/cgroup", "3:cpu,cpuacct:/docker/77\n0::/")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", 300_000)
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", 100_000)
    assert cpu_quota(tmp_path) == 3.0
    assert usable_cpus(tmp_path) == 3
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", -1)
    assert cpu_quota(tmp_path) is None


def test_an_empty_tree_is_a_machine_of_which_nothing_is_known(tmp_path: Path) -> None:
    found = read_topology(tmp_path, addresses={})
    assert found.cpus.usable == 1
    assert (found.numa_nodes, found.gpus, found.interfaces, found.rdma_devices) == ((), (), (), ())
    assert found.pages.transparent_shared is None


@pytest.fixture(scope="module")
def odd_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd")
    machine = machines.Machine(root)
    machine.cpus(sockets=1, cores=1, threads=1)
    machine.numa_node(0, "0", 1, [10])
    machine.pages(shared="never")
    machine.write("sys/fs/cgroup/cpu.max", "max 1")
    machine.nvidia("pci0000:42/0000:42:00.0", model="x")
    machine.amd("pci0000:c1/0000:c1:00.0", node=1, name="x", memory_mib=1)
    machine.interface("eth0", index=1, pci="pci0000:02/0000:02:00.0")
    machine.rdma("rxe0", interface="eth0")
    return root


@settings(max_examples=12)
@given(st.binary(max_size=200))
@example(b"\x00")
@example(b"\x00\n\n\x00")
def test_no_content_of_a_file_breaks_a_reader(odd_machine: Path, content: bytes) -> None:
    files = [path for path in odd_machine.rglob("*") if path.is_file()]
    assert len(files) > 50
    for path in files:
        path.write_bytes(content)
    odd_machine.joinpath("proc/self/cgroup").write_text("0::/")
    read_topology(odd_machine, addresses={})


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cpus_read_back(numbers: set[int]) -> None:
    ordered = tuple(sorted(numbers))
    text = format_cpu_list(ordered)
    assert parse_cpu_list(text) == ordered


@given(st.text(max_size=30))
def test_any_text_is_some_list_of_cpus(text: str) -> None:
    assert all(cpu >= 0 for cpu in parse_cpu_list(text))


def test_a_list_of_too_many_cpus_is_not_expanded() -> None:
    assert parse_cpu_list("0-99999999999,3") == (3,)


def test_names_are_sorted_by_their_numbers() -> None:
    names = ["eth10", "eth2", "eth", "ens1f1", "ens1f0"]
    assert sorted(names, key=natural) == ["ens1f0", "ens1f1", "eth", "eth2", "eth10"]


@given(st.binary(max_size=300))
def test_any_answer_of_netlink_is_parsed_or_left(data: bytes) -> None:
    for index, address in parse_addresses(data):
        assert index >= 0
        ipaddress.ip_address(address)


def test_an_address_that_is_not_ready_is_left_out() -> None:
    def message(flags: int, address: str) -> bytes:
        packed = ipaddress.ip_address(address).packed
        attribute = struct.pack("=HH", 4 + len(packed), 1) + packed
        long_flags = struct.pack("=HHI", 8, 8, flags)
        body = struct.pack("=BBBBI", socket.AF_INET6, 64, 0, 0, 3) + attribute + long_flags
        return struct.pack("=IHHII", 16 + len(body), 20, 2, 1, 0) + body

    data = message(0x80, "2001:db8::1") + message(0x40 | 0x80, "2001:db8::2")
    assert list(parse_addresses(data)) == [(3, "2001:db8::1")]


def test_this_machine() -> None:
    found = read_topology()
    assert set(found.cpus.allowed) == os.sched_getaffinity(0)
    assert 1 <= found.cpus.usable <= len(found.cpus.online) == os.cpu_count()
    assert 1 <= found.cpus.sockets <= found.cpus.cores <= len(found.cpus.online)
    assert read_cpus() == found.cpus
    names = {name for _, name in socket.if_nameindex()}
    assert {each.name for each in found.interfaces} == names
    (loopback,) = (each for each in found.interfaces if each.kind is InterfaceKind.LOOPBACK)
    assert loopback.up
    assert "127.0.0.1" in loopback.addresses
    for gpu in found.gpus:
        assert gpu.place.address in os.listdir("/sys/bus/pci/devices")


def test_the_kernels_addresses_can_be_bound() -> None:
    for index, addresses in interface_addresses().items():
        for address in addresses:
            parsed = ipaddress.ip_address(address)
            family = socket.AF_INET if parsed.version == 4 else socket.AF_INET6
            where = (address, 0) if family is socket.AF_INET else (address, 0, 0, index)
            with socket.socket(family, socket.SOCK_DGRAM) as sock:
                sock.bind(where)


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_text(tmp_path) is None
    assert read_int(tmp_path / "none") is None
    (tmp_path / "odd").write_text("0x1f\n")
    assert read_int(tmp_path / "odd", 0) == 31
    assert read_int(tmp_path / "odd") is None
