"""Made-up machines: trees of files that look like the `proc` and `sys` of a laptop, a server, a container."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

MIB = 1 << 20
FREE_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Machine:
    """Writes one machine's files below `root`. `addresses` holds what netlink would tell of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.addresses: dict[int, tuple[str, ...]] = {}
        for folder in ("sys/bus/pci/devices", "sys/class/net", "sys/devices/system/cpu"):
            (root / folder).mkdir(parents=True)
        self.write("proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB")

    def write(self, path: str | Path, text: object) -> None:
        """Write one file, with the line end that the kernel adds."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str | Path, target: str | Path) -> None:
        """Make `path` a relative symbolic link to `target`, as sysfs does."""
        link, real = self.root / path, self.root / target
        link.parent.mkdir(parents=True, exist_ok=True)
        real.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(real, link.parent))

    # Processors and memory.

    def cpus(self, *, sockets: int, cores: int, threads: int, allowed: str | None = None) -> None:
        """`cores` a socket, `threads` a core; the second threads have the higher numbers, as on x86."""
        count = sockets * cores * threads
        self.write("sys/devices/system/cpu/online", f"0-{count - 1}")
        self.write("proc/self/status", f"Name:\tx\nCpus_allowed_list:\t{allowed or f'0-{count - 1}'}")
        self.write("proc/cpuinfo", "processor : 0\nmodel name\t: Made Up 9000\n\nprocessor : 1")
        for cpu in range(count):
            core = cpu % (sockets * cores)
            siblings = ",".join(str(core + t * sockets * cores) for t in range(threads))
            socket = core // cores
            folder = f"sys/devices/system/cpu/cpu{cpu}"
            self.write(f"{folder}/topology/physical_package_id", socket)
            self.write(f"{folder}/topology/core_id", core % cores)
            in_socket = [c for c in range(count) if c % (sockets * cores) // cores == socket]
            caches = ((1, "Data", "32K", siblings), (3, "Unified", "32768K", ",".join(map(str, in_socket))))
            for index, (level, kind, size, shared) in enumerate(caches):
                self.write(f"{folder}/cache/index{index}/level", level)
                self.write(f"{folder}/cache/index{index}/type", kind)
                self.write(f"{folder}/cache/index{index}/size", size)
                self.write(f"{folder}/cache/index{index}/shared_cpu_list", shared)

    def numa_node(self, number: int, cpus: str, memory_mib: int, distances: Sequence[int]) -> None:
        """One NUMA node."""
        folder = f"sys/devices/system/node/node{number}"
        self.write(f"{folder}/cpulist", cpus)
        self.write(f"{folder}/distance", " ".join(map(str, distances)))
        self.write(
            f"{folder}/meminfo",
            f"Node {number} MemTotal: {memory_mib << 10} kB\nNode {number} MemFree: {memory_mib << 9} kB",
        )

    def pages(self, *, shared: str, reserved_2mib: int = 0) -> None:
        """The settings of huge pages; `shared` is the chosen word for shared memory."""
        folder = "sys/kernel/mm/transparent_hugepage"
        self.write(f"{folder}/enabled", "always [madvise] never")
        words = ("always", "within_size", "advise", "never", "deny", "force")
        self.write(f"{folder}/shmem_enabled", " ".join(f"[{w}]" if w == shared else w for w in words))
        self.write("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", reserved_2mib)
        self.write("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", reserved_2mib)

    # Devices.

    def pci(
        self,
        path: str,
        *,
        vendor: int,
        device: int,
        device_class: int,
        driver: str | None,
        numa_node: int = -1,
    ) -> Path:
        """A PCI device at `path`, such as `pci0000:00/0000:00:01.0/0000:01:00.0`; returns its folder."""
        folder = Path("sys/devices") / path
        address = folder.name
        for name, number in (("vendor", vendor), ("device", device)):
            self.write(folder / name, f"0x{number:04x}")
        self.write(folder / "class", f"0x{device_class:06x}")
        self.write(folder / "numa_node", numa_node)
        self.link(f"sys/bus/pci/devices/{address}", folder)
        if driver is not None:
            self.link(folder / "driver", f"sys/bus/pci/drivers/{driver}")
        return folder

    def nvidia(self, path: str, *, model: str, numa_node: int = -1, shown: bool = True) -> None:
        """An NVIDIA GPU; `shown`: whether the driver shows it to this container."""
        folder = self.pci(
            path, vendor=0x10DE, device=0x2330, device_class=0x030200, driver="nvidia", numa_node=numa_node
        )
        if shown:
            self.write(
                f"proc/driver/nvidia/gpus/{folder.name}/information",
                f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-{folder.name}",
            )
            self.write(
                "proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
            )

    def amd(self, path: str, *, node: int, name: str, memory_mib: int) -> None:
        """An AMD GPU, in kfd's topology as node `node`."""
        folder = self.pci(path, vendor=0x1002, device=0x740C, device_class=0x038000, driver="amdgpu")
        domain, bus, rest = folder.name.split(":")
        slot, function = rest.split(".")
        location = int(bus, 16) << 8 | int(slot, 16) << 3 | int(function)
        kfd = f"sys/class/kfd/kfd/topology/nodes/{node}"
        self.write(f"{kfd}/name", name)
        self.write(
            f"{kfd}/properties",
            f"simd_count 440\nlocation_id {location}\ndomain {int(domain, 16)}\nunique_id 77{node}",
        )
        self.write(f"{kfd}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {memory_mib * MIB}")

    def interface(
        self,
        name: str,
        *,
        index: int,
        pci: str | None = None,
        driver: str = "mlx5_core",
        numa_node: int = -1,
        up: bool = True,
        speed_mbps: int | None = None,
        addresses: tuple[str, ...] = (),
        flags: int = 0x1002,
        devtype: str = "",
        infiniband: bool = False,
    ) -> None:
        """A network interface, of the PCI device at `pci` or virtual."""
        if pci is None:
            folder = Path("sys/devices/virtual/net") / name
        else:
            device = self.pci(
                pci,
                vendor=0x15B3,
                device=0x1021,
                device_class=0x020700,
                driver=driver,
                numa_node=numa_node,
            )
            folder = device / "net" / name
            self.link(folder / "device", device)
        self.link(f"sys/class/net/{name}", folder)
        self.write(folder / "flags", hex(flags | up))
        self.write(folder / "operstate", "up" if up else "down")
        self.write(folder / "mtu", 9000 if pci else 1500)
        self.write(folder / "type", 32 if infiniband else 772 if flags & 8 else 1)
        self.write(folder / "ifindex", index)
        self.write(folder / "uevent", f"DEVTYPE={devtype}\nINTERFACE={name}")
        if speed_mbps is not None:
            self.write(folder / "speed", speed_mbps)
        self.addresses[index] = addresses

    def loopback(self) -> None:
        """The interface `lo`."""
        self.interface("lo", index=1, flags=0x8, addresses=("127.0.0.1", "::1"))

    def rdma(
        self,
        name: str,
        *,
        pci: str | None = None,
        interface: str | None = None,
        state: str = "4: ACTIVE",
        rate_gbps: int = 400,
        link_layer: str = "InfiniBand",
        gid: str = "fe80:0000:0000:0000:a088:c203:0001:0203",
    ) -> None:
        """An RDMA device with one port; of the PCI device that `interface` has made, or in software."""
        folder = Path("sys/devices/virtual/infiniband") / name
        if pci is not None:
            device = Path("sys/devices") / pci
            folder = device / "infiniband" / name
            self.link(folder / "device", device)
        elif interface is not None:
            self.write(folder / "parent", interface)
        self.link(f"sys/class/infiniband/{name}", folder)
        self.write(folder / "fw_ver", "28.39.1002")
        port = folder / "ports/1"
        self.write(port / "state", state)
        self.write(port / "rate", f"{rate_gbps} Gb/sec (4X NDR)")
        self.write(port / "link_layer", link_layer)
        self.write(port / "gids/0", gid)
        self.write(port / "gids/1", FREE_GID)
        self.write(port / "gid_attrs/types/0", "IB/RoCE v1" if link_layer == "InfiniBand" else "RoCE v2")
        if interface is not None:
            self.write(port / "gid_attrs/ndevs/0", interface)


def laptop(root: Path) -> Machine:
    """4 cores with SMT, one NUMA node, Wi-Fi up and Ethernet unplugged, an integrated GPU, docker."""
    machine = Machine(root)
    machine.cpus(sockets=1, cores=4, threads=2)
    machine.numa_node(0, "0-7", 16_000, [10])
    machine.pages(shared="advise")
    machine.pci("pci0000:00/0000:00:02.0", vendor=0x8086, device=0x46A6, device_class=0x030000, driver="i915")
    machine.loopback()
    machine.interface(
        "wlp1s0",
        index=2,
        pci="pci0000:00/0000:00:1c.0/0000:01:00.0",
        driver="iwlwifi",
        devtype="wlan",
        addresses=("192.0.2.17", "2001:db8::17"),
    )
    machine.interface(
        "enp2s0",
        index=3,
        pci="pci0000:00/0000:00:1d.0/0000:02:00.0",
        driver="e1000e",
        up=False,
        speed_mbps=-1,
    )
    machine.interface("docker0", index=4, devtype="bridge", speed_mbps=10_000, addresses=("172.17.0.1",))
    return machine


def server(root: Path) -> Machine:
    """2 sockets of 16 cores with SMT, 8 H100s and 8 InfiniBand ports, each pair behind a switch; Ethernet."""
    machine = Machine(root)
    machine.cpus(sockets=2, cores=16, threads=2)
    machine.numa_node(0, "0-15,32-47", 1_000_000, [10, 21])
    machine.numa_node(1, "16-31,48-63", 1_000_000, [21, 10])
    machine.pages(shared="never", reserved_2mib=1024)
    machine.loopback()
    for number in range(8):
        node = number // 4
        top = 0x10 * (number + 1)
        port = f"pci0000:{top:02x}/0000:{top:02x}:01.0/0000:{top + 1:02x}:00.0"
        gpu = f"{port}/0000:{top + 2:02x}:00.0/0000:{top + 3:02x}:00.0"
        nic = f"{port}/0000:{top + 2:02x}:01.0/0000:{top + 4:02x}:00.0"
        machine.nvidia(gpu, model="NVIDIA H100 80GB HBM3", numa_node=node)
        machine.interface(
            f"ib{number}",
            index=10 + number,
            pci=nic,
            numa_node=node,
            infiniband=True,
            speed_mbps=400_000,
            addresses=(f"10.1.0.{number + 1}",),
        )
        machine.rdma(f"mlx5_{number}", pci=nic, state="1: DOWN" if number == 7 else "4: ACTIVE")
    machine.interface(
        "eno1",
        index=30,
        pci="pci0000:00/0000:00:1d.0/0000:02:00.0",
        driver="ice",
        numa_node=0,
        speed_mbps=25_000,
        addresses=("198.51.100.8", "2001:db8:1::8"),
    )
    machine.interface(
        "eno2",
        index=31,
        pci="pci0000:90/0000:90:03.0/0000:a5:00.0",
        driver="ice",
        numa_node=1,
        speed_mbps=25_000,
        addresses=("198.51.100.9",),
    )
    return machine


def container(root: Path) -> Machine:
    """A container on a 16-cpu host: 8 cpus allowed, a quota of 2.5, one of two GPUs, a virtual interface."""
    machine = Machine(root)
    machine.cpus(sockets=1, cores=8, threads=2, allowed="4-7,12-15")
    machine.numa_node(0, "0-15", 256_000, [10])
    machine.pages(shared="never")
    machine.write("proc/self/cgroup", "0::/kubepods.slice/pod1.scope")
    machine.write("sys/fs/cgroup/kubepods.slice/pod1.scope/cpu.max", "250000 100000")
    machine.write("sys/fs/cgroup/kubepods.slice/cpu.max", "max 100000")
    machine.nvidia("pci0000:40/0000:40:01.0/0000:41:00.0", model="NVIDIA A100-SXM4-40GB", shown=False)
    machine.nvidia("pci0000:40/0000:40:02.0/0000:42:00.0", model="NVIDIA A100-SXM4-40GB")
    machine.loopback()
    machine.interface("eth0", index=7, speed_mbps=10_000, addresses=("10.244.0.9",))
    return machine
