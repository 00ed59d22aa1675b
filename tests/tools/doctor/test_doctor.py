"""`zbmd-node doctor`: the real command, its JSON, its exit code, narrow terminals, peers that fail."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import importlib.metadata
import importlib.util
import io
import json
import os
import pty
import re
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from support.machines import machines

from zbmd.tools.doctor import command as doctor
from zbmd.tools.doctor.checks import (
    accelerator_findings,
    extra_findings,
    find_extras,
    limit_findings,
    link_findings,
    local_link,
    machine_findings,
    network_findings,
)
from zbmd.tools.doctor.peers import Reachability, Way, attempt, examine, find_ways, parse_peer
from zbmd.tools.doctor.rdma import rdma_findings
from zbmd.tools.doctor.report import Finding, FindingState, Section
from zbmd.tools.node import cli as node_cli
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import Capabilities, InterfaceFilter, Transport, parse_interface_filter
from zbmd.transport.host.topology import (
    HostFacts,
    Interface,
    InterfaceKind,
    Topology,
    affinities,
    read_host_facts,
    read_topology,
)

COMMAND = [sys.executable, "-m", "zbmd.tools.node.cli", "doctor"]
TIMEOUT_S = 180.0
SECTIONS = ["MACHINE", "ACCELERATORS", "NETWORK", "RDMA", "LINKS", "DEADLINES", "LIMITS", "OPTIONAL PARTS"]


def run(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ZBMD_")}
    environment = {**clean, "XDG_CONFIG_HOME": str(tmp_path), **variables}
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
        check=False,
    )


def as_json(tmp_path: Path, *arguments: str, **variables: str) -> tuple[dict[str, Any], int]:
    ended = run(tmp_path, "--json", *arguments, **variables)
    return json.loads(ended.stdout), ended.returncode


def bad_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("NOT OK ")]


# The real command.


def test_the_report_has_every_section_and_the_exit_code_its_verdict(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.stderr == ""
    assert ended.returncode == (1 if bad_lines(ended.stdout) else 0)
    lines = ended.stdout.splitlines()
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    assert any(re.match(r"ok +cores +\d+ usable", line) for line in lines)
    assert any(re.match(r"ok +any rank here - any other +shm: one host, one user", line) for line in lines)
    assert any(re.match(r"ok +a link made now .*us a frame's round trip", line) for line in lines)
    assert any(re.match(r"ok +recovery_budget +1s \(default\)", line) for line in lines)
    assert any(re.match(r"- +suspicion +400ms = 2 x budget / 5 \(share\): ", line) for line in lines)
    assert any(re.match(r"- +template +5min, fixed: ", line) for line in lines)
    assert "\x1b" not in ended.stdout, "no colours into a pipe"


def test_the_json_has_the_documented_fields(tmp_path: Path) -> None:
    report, code = as_json(tmp_path)
    assert list(report) == [
        "schema", "version", "host", "ok", "findings", "usable_cpus", "topology", "affinities", "links",
        "deadlines", "extras",
    ]  # fmt: skip
    assert report["schema"] == 1
    assert report["ok"] is (code == 0)
    assert report["ok"] is not any(finding["state"] == "not ok" for finding in report["findings"])
    for finding in report["findings"]:
        assert list(finding) == ["section", "name", "state", "detail", "advice"]
    assert list(report["topology"]) == ["cpus", "numa_nodes", "pages", "gpus", "interfaces", "rdma_devices"]
    assert set(report["topology"]["cpus"]["allowed"]) == os.sched_getaffinity(0)
    (link,) = report["links"]
    assert list(link) == ["between", "choice", "error"]
    assert list(link["choice"]) == ["transport", "reason", "device", "peer_device", "better", "no_rdma"]
    assert link["choice"]["transport"] == "shm"
    deadlines = report["deadlines"]
    assert deadlines["same_host_path_ns"] <= deadlines["recovery_budget_ns"] == 10**9
    assert list(deadlines["derived"][0]) == ["name", "value_ns", "kind", "rule", "reason"]
    assert list(deadlines["fixed"][0]) == ["name", "value_ns", "reason"]
    assert {extra["name"] for extra in report["extras"]} >= {"cupy", "pyverbs", "torch", "iperf3"}
    assert list(report["extras"][0]) == ["name", "purpose", "install", "version", "needed"]


@pytest.mark.parametrize(
    ("arguments", "variables", "source"),
    [
        (("--recovery-budget", "5s"), {"ZBMD_RECOVERY_BUDGET": "9s"}, "--recovery-budget"),
        ((), {"ZBMD_RECOVERY_BUDGET": "5s"}, "ZBMD_RECOVERY_BUDGET"),
        (("--config", "job.toml"), {}, "job.toml"),
    ],
)
def test_the_budget_is_taken_as_a_job_takes_it(
    tmp_path: Path,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text('recovery_budget = "5s"\n')
    report, _ = as_json(tmp_path, *arguments, **variables)
    assert report["deadlines"]["recovery_budget_ns"] == 5 * 10**9
    assert report["deadlines"]["source"] == source
    derived = {each["name"]: each["value_ns"] for each in report["deadlines"]["derived"]}
    assert (derived["suspicion"], derived["tcp_user_timeout"]) == (2 * 10**9, 5 * 10**9)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"ZBMD_RECOVERY_BUDGET": "1ms", "ZBMD_SOCKET_IFNAME": "nosuch"},
            ["ZBMD_RECOVERY_BUDGET: a recovery budget of 1ms is out of range", "=nosuch admits no interface"],
        ),
        (
            {"ZBMD_ARENA": "much", "ZBMD_SOCKET_IFNAME": "^"},
            ["ZBMD_ARENA: 'much' is not a size", "ZBMD_SOCKET_IFNAME='^' names no interface"],
        ),
    ],
)
def test_a_wrong_environment_is_loud(tmp_path: Path, variables: dict[str, str], expected: list[str]) -> None:
    ended = run(tmp_path, **variables)
    assert ended.returncode == 1
    for words in expected:
        bad = [line for line in bad_lines(ended.stdout) if words in line]
        assert len(bad) == 2, "in its section, and again at the end"


def test_a_wrong_command_line_is_told_in_one_paragraph(tmp_path: Path) -> None:
    ended = run(tmp_path, "--recovery-budget", "1ms")
    assert ended.returncode == 2
    assert "Give 100ms to 10min" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--recovery_budget", "soon"), "'soon' is not a duration"),
        (("--peer", "node:99999"), "is no host and port"),
        (("--config", "missing.toml"), "missing.toml: the settings file cannot be read"),
        (("--fast",), "unrecognized arguments: --fast"),
        (("--peer", "x") * 65, "65 peers are too many"),
    ],
)
def test_whatever_is_wrong_with_it(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert node_cli.main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_help_has_examples(tmp_path: Path) -> None:
    ended = run(tmp_path, "--help")
    assert ended.returncode == 0
    assert "zbmd-node doctor --peer node2 " in ended.stdout
    assert "exit code" in ended.stdout


def test_a_peer_that_is_this_host_and_one_that_is_nowhere(tmp_path: Path) -> None:
    ended = run(tmp_path, "--peer", "127.0.0.1", "--peer", "no..such")
    assert ended.returncode == 1
    assert re.search(r"^ok +\S+ - 127\.0\.0\.1 +shm", ended.stdout, re.MULTILINE)
    (bad, *_) = bad_lines(ended.stdout)
    assert re.match(r"NOT OK +\S+ - no\.\.such +the name 'no\.\.such' cannot be resolved", bad)


def in_terminal(tmp_path: Path, columns: int, **variables: str) -> str:
    """Return what the command writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
        clean = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith("ZBMD_") and k not in ("COLUMNS", "NO_COLOR")
        }
        environment = {**clean, "XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm", **variables}
        process = subprocess.Popen(COMMAND, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        theirs = -1
        written = b""
        try:
            while chunk := os.read(ours, 1 << 16):
                written += chunk
        except OSError:  # EIO: the other side is closed
            pass
        process.wait(TIMEOUT_S)
    finally:
        for fd in (ours, theirs):
            if fd >= 0:
                os.close(fd)
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [40, 72])
def test_lines_fit_a_narrow_terminal(tmp_path: Path, columns: int) -> None:
    text = in_terminal(tmp_path, columns, ZBMD_SOCKET_IFNAME="nosuch")
    assert "\x1b[1;31mNOT OK" in text, "loud"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for line in plain.splitlines():
        last = line.rpartition(" ")[2]
        assert len(line) <= columns or len(last) > columns // 2, f"{line!r} could have been broken"
    assert "SOCKET_IFNAME=nosuch" in plain


# What is found on machines that are not this one.


def texts(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Topology:
    root = tmp_path_factory.mktemp("server")
    return read_topology(root, addresses=machines.server(root).addresses)


def test_a_server_is_shown_with_what_is_near_to_each_gpu(server: Topology) -> None:
    machine = texts(machine_findings(server))
    assert machine["processor"].detail == "Made Up 9000: 2 sockets, 32 cores, 64 cpus"
    assert machine["cores"].detail == "64 usable; 64 is the default for -n"
    assert machine["caches"].detail == "L1 data 32 x 32 KiB, L3 2 x 32 MiB"
    assert "distances 21 10" in machine["NUMA node 1"].detail
    assert machine["huge pages"].detail.startswith("1024 of 1024 pages of 2.0 MiB free")
    gpus = texts(accelerator_findings(server, affinities(server)))
    assert gpus["gpu5"].state is FindingState.OK
    assert gpus["gpu5"].detail == (
        "NVIDIA H100 80GB HBM3 at 0000:63:00.0, NUMA node 1; to the network: PIX mlx5_5; "
        "NODE mlx5_4 mlx5_6 mlx5_7 eno2; SYS mlx5_0 mlx5_1 mlx5_2 mlx5_3 eno1"
    )
    limits = texts(limit_findings(server))
    assert limits["TCP buffers"].section is Section.LIMITS


def rdma_texts(
    topology: Topology,
    wanted: str = "",
    *,
    verbs_missing: str | None = None,
    locked_bytes_max: int | None = None,
) -> dict[str, Finding]:
    host = HostFacts(
        name="a",
        boot_id="1",
        namespaces=(),
        uid=0,
        rdma_devices=topology.rdma_devices,
        verbs_missing=verbs_missing,
        locked_bytes_max=locked_bytes_max,
    )
    return texts(rdma_findings(topology, host, {"ZBMD_RDMA_DEVICES": wanted}))


def test_rdma_ports_are_shown_and_what_they_lack(server: Topology) -> None:
    found = rdma_texts(server, verbs_missing="pyverbs is missing")
    assert found["mlx5_0 port 1"].state is FindingState.OK
    assert found["mlx5_0 port 1"].detail.startswith("ACTIVE, InfiniBand, 400 Gbit/s, ib0")
    assert found["mlx5_0"].detail == "0000:14:00.0, firmware 28.39.1002"
    assert found["mlx5_7 port 1"].state is FindingState.NOTE
    assert "subnet manager" in found["mlx5_7 port 1"].advice
    assert "apt install python3-pyverbs" in found["libraries"].advice
    assert found["to other hosts"].detail == "TCP: a has an RDMA device, but pyverbs is missing"
    found = rdma_texts(server, locked_bytes_max=8 << 20)
    assert found["libraries"].state is FindingState.OK
    assert "8192 KiB may be locked" in found["locked memory"].detail
    assert "LimitMEMLOCK=infinity" in found["locked memory"].advice
    assert found["to other hosts"].detail.startswith("TCP: a process of a may lock 8192 KiB")
    assert rdma_texts(server)["to other hosts"].state is FindingState.OK
    assert rdma_texts(server, "mlx5_9")["to other hosts"].detail.startswith("TCP: ZBMD_RDMA_DEVICES admits")
    assert rdma_texts(server, "mlx5_0@x")["to other hosts"].state is FindingState.NOT_OK
    (none,) = texts(rdma_findings(dataclasses.replace(server, rdma_devices=()), read_host_facts())).values()
    assert none.detail == "none; links to other hosts are TCP"


def test_what_roce_needs_of_its_network_is_told(tmp_path: Path) -> None:
    machine = machines.Machine(tmp_path)
    machine.interface("eth0", index=2, pci="pci0000:00/0000:14:00.0", addresses=("192.0.2.1",))
    machine.rdma("mlx5_0", pci="pci0000:00/0000:14:00.0", link_layer="Ethernet")
    port = "sys/class/infiniband/mlx5_0/ports/1"

    def look() -> dict[str, Finding]:
        return rdma_texts(read_topology(tmp_path, addresses=machine.addresses))

    machine.write(f"{port}/gid_attrs/types/0", "IB/RoCE v1")
    found = look()
    assert "no RoCE v2 address" in found["mlx5_0 port 1"].detail
    assert "ip address add" in found["mlx5_0 port 1"].advice
    assert "has no RoCE v2 address (it has: IB/RoCE v1)" in found["to other hosts"].detail
    assert found["mlx5_0 flow control"].detail == "the driver does not tell of PFC and ECN"

    machine.write(f"{port}/gid_attrs/types/0", "RoCE v2")
    machine.write("sys/class/net/eth0/mtu", 1500)
    for priority in range(8):
        machine.write(f"sys/class/net/eth0/ecn/roce_np/enable/{priority}", int(priority == 3))
    machine.write(f"{port}/hw_counters/packet_seq_err", 7)
    machine.write(f"{port}/hw_counters/out_of_buffer", 2)
    machine.write(f"{port}/counters/link_downed", 1)
    machine.write("sys/class/infiniband/mlx5_0/board_id", "MT_0000000838")
    found = look()
    assert found["mlx5_0"].detail == "0000:14:00.0, MT_0000000838, firmware 28.39.1002"
    assert found["mlx5_0 MTU"].detail == "1024 of 4096 bytes a packet (eth0 mtu 1500)"
    assert "ip link set eth0 mtu 9000" in found["mlx5_0 MTU"].advice
    assert found["mlx5_0 flow control"].detail == "ECN in priorities 3"
    assert found["mlx5_0 port 1 losses"].detail.endswith("packet_seq_err 7")
    assert "dcb pfc show dev eth0" in found["mlx5_0 port 1 losses"].advice
    assert found["mlx5_0 port 1 buffers"].detail.endswith("out_of_buffer 2")
    assert found["mlx5_0 port 1 cable"].detail == "times it has gone down: 1"
    assert found["to other hosts"].detail.endswith("by mlx5_0 (Ethernet, 400 Gbit/s)")
    machine.write("sys/class/net/eth0/mtu", 4200)
    assert look()["mlx5_0 MTU"].state is FindingState.OK


def test_the_interface_to_other_hosts_is_named(server: Topology) -> None:
    found = texts(network_findings(server, InterfaceFilter()))
    assert found["to other hosts"].detail == "ib0 (400 Gbit/s, 10.1.0.1) is the first choice"
    chosen = texts(network_findings(server, parse_interface_filter("eno2")))
    assert chosen["to other hosts"].detail.startswith("eno2 (25 Gbit/s, 198.51.100.9)")
    alone = dataclasses.replace(server, interfaces=())
    assert texts(network_findings(alone, InterfaceFilter()))["to other hosts"].state is FindingState.NOTE


def test_gpus_that_cannot_be_used_say_why(tmp_path: Path) -> None:
    machine = machines.container(tmp_path)
    machine.pci("pci0000:50/0000:50:01.0", vendor=0x10DE, device=0x20B0, device_class=0x030200, driver=None)
    topology = read_topology(tmp_path, addresses=machine.addresses)
    gpus = texts(accelerator_findings(topology, affinities(topology)))
    assert [gpus[f"gpu{n}"].state for n in range(3)] == [
        FindingState.NOTE,
        FindingState.OK,
        FindingState.NOTE,
    ]
    assert "this container was not given it" in gpus["gpu0"].advice
    assert "no driver is bound" in gpus["gpu2"].advice
    cores = texts(machine_findings(topology))["cores"].detail
    assert (
        cores
        == "3 usable; the affinity allows cpus 4-7,12-15, a cgroup grants 2.5 cpus; 3 is the default for -n"
    )


def test_what_a_machine_has_use_for_is_told_from_what_it_lacks(tmp_path: Path, server: Topology) -> None:
    plain = read_topology(tmp_path, addresses={})
    needed = {extra.name: extra.needed for extra in find_extras(server)}
    assert needed == {
        "cupy": True, "pyverbs": True, "nvidia-smi": True, "torch": False, "matplotlib": False,
        "iperf3": False, "mpirun": False,
    }  # fmt: skip
    assert not any(extra.needed for extra in find_extras(plain))
    lacking = tuple(dataclasses.replace(extra, version=None) for extra in find_extras(server))
    found = texts(extra_findings(lacking, server))
    assert found["cupy"].detail.startswith("missing, and this machine has use for it")
    assert found["cupy"].advice == "pip install 'zbmd[gpu]'"
    assert found["iperf3"].detail.startswith("not installed")
    assert found["iperf3"].advice == "apt install iperf3"


@pytest.mark.parametrize("name", ["cupy-cuda13x", "cupy-cuda12x", "cupy"])
def test_the_version_of_every_cupy_is_told(
    name: str, server: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its distributions are named after the versions of CUDA."""

    def version(distribution: str) -> str:
        if distribution != name:
            raise importlib.metadata.PackageNotFoundError(distribution)
        return "14.2.0"

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert {extra.name: extra.version for extra in find_extras(server)}["cupy"] == "14.2.0"


def test_one_finding_is_one_line_in_a_pipe() -> None:
    finding = Finding(section=Section.LINKS, name="a", state=FindingState.NOT_OK, detail="x\ny.", advice="z")
    assert doctor.lines_of(finding, 3, None) == "NOT OK  a    x y. To do: z"


# Peers, over real sockets.


def lo(*addresses: str) -> Interface:
    """The loopback interface, as if it led to other hosts."""
    return Interface(
        name="lo",
        kind=InterfaceKind.HARDWARE,
        up=True,
        speed_mbps=None,
        mtu=65536,
        driver=None,
        place=None,
        addresses=addresses,
    )


def facts(*interfaces: Interface) -> HostFacts:
    return HostFacts(name="here", boot_id="1", namespaces=("n",), uid=1, interfaces=interfaces)


def way(address: str = "127.0.0.2") -> Way:
    (found,) = find_ways([address], 80, facts(lo("127.0.0.1")), Capabilities())
    return found


async def test_one_who_listens_is_connected_to() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        tried = await attempt(way(), port, TIMEOUT_S)
    assert tried.answer is Reachability.CONNECTED
    assert tried.words.startswith(f"port {port} accepts, in ")
    assert str(tried.way) == "lo to 127.0.0.2"


async def test_where_nobody_listens_the_host_is_there_all_the_same() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.2", 0))  # and does not listen
        tried = await attempt(way(), held.getsockname()[1], TIMEOUT_S)
    assert tried.answer is Reachability.REFUSED
    assert tried.reached
    assert "nobody listens" in tried.words


async def test_one_who_does_not_answer_is_told_from_one_who_refuses() -> None:
    with socket.create_server(("127.0.0.2", 0), backlog=0) as listener:
        where = listener.getsockname()
        fillers = [socket.socket() for _ in range(2)]
        try:
            for filler in fillers:  # a full backlog drops what comes after
                filler.setblocking(False)
                filler.connect_ex(where)
            tried = await attempt(way(), where[1], 0.05)
        finally:
            for filler in fillers:
                filler.close()
    assert tried.answer is Reachability.SILENT
    assert "a firewall drops it" in tried.words


async def test_an_address_that_cannot_be_had_fails_with_its_reason() -> None:
    tried = await attempt(dataclasses.replace(way(), source="192.0.2.99"), 80, TIMEOUT_S)
    assert (tried.answer, tried.words) == (Reachability.FAILED, "the interface has lost its address")


def test_named_interfaces_are_the_only_ways() -> None:
    host = facts(lo("127.0.0.1", "fe80::1"), dataclasses.replace(lo("192.0.2.1"), name="eth0"))
    can = Capabilities(interfaces=parse_interface_filter("eth"))
    assert [(str(each), each.source) for each in find_ways(["192.0.2.7"], 80, host, can)] == [
        ("eth0 to 192.0.2.7", "192.0.2.1")
    ]
    assert find_ways(["2001:db8::1"], 80, host, can) == []
    (local,) = find_ways(["fe80::7%lo"], 80, host, Capabilities(interfaces=parse_interface_filter("lo")))
    assert local.source == "fe80::1%lo"


async def test_the_verdicts_on_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(tmp_path / "cookie"))
    # 127.0.0.2 stands for another host: what is loopback would be taken for this one.
    monkeypatch.setattr("zbmd.tools.doctor.peers._is_own", lambda *_: False)
    here, can = facts(lo("127.0.0.1")), Capabilities()
    named = Capabilities(interfaces=parse_interface_filter("lo"))
    with socket.create_server(("127.0.0.2", 0)) as listener:
        port = listener.getsockname()[1]
        for each in (can, named):
            link, findings = await examine(parse_peer(f"127.0.0.2:{port}"), here, each, TIMEOUT_S)
            assert link.choice is not None
            assert (link.choice.transport, link.choice.device) == (Transport.TCP, "lo")
            assert "leads to 127.0.0.2" in link.choice.reason
            assert [finding.state for finding in findings] == [FindingState.OK, FindingState.NOTE]
    assert "no cookie here" in findings[1].detail, "a clock is asked for with one"
    link, _ = await examine(parse_peer(f"127.0.0.2:{port}"), here, can, TIMEOUT_S)
    assert link.choice is None
    assert link.error.startswith("127.0.0.2 answers, but nobody listens at port")
    (finding,) = link_findings((link,))
    assert finding.state is FindingState.NOT_OK
    nowhere, _ = await examine(parse_peer("127.0.0.2"), facts(), named, TIMEOUT_S)
    assert nowhere.error.startswith("no interface that ZBMD_SOCKET_IFNAME=lo admits leads to 127.0.0.2")


async def test_without_a_port_it_is_enough_that_the_host_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbmd.tools.doctor.peers._is_own", lambda *_: False)
    with socket.socket() as held:
        held.bind(("127.0.0.2", 0))
        peer = dataclasses.replace(parse_peer("127.0.0.2"), port=held.getsockname()[1])
        link, _ = await examine(peer, facts(lo("127.0.0.1")), Capabilities(), TIMEOUT_S)
    assert link.choice is not None
    assert "nobody listens" in link.choice.reason


async def test_a_peer_that_is_this_host_shares_memory() -> None:
    link, findings = await examine(parse_peer("127.0.0.1"), facts(), Capabilities(), TIMEOUT_S)
    assert link.choice is not None
    assert (link.choice.transport, findings) == (Transport.SHM, [])
    assert local_link(facts(), Capabilities()).choice == link.choice


@pytest.mark.parametrize(
    ("text", "host", "port", "given"),
    [
        ("node2", "node2", 29400, False),
        ("node2:80", "node2", 80, True),
        ("192.0.2.1:29400", "192.0.2.1", 29400, True),
        ("2001:db8::1", "2001:db8::1", 29400, False),
        ("[2001:db8::1]:7", "2001:db8::1", 7, True),
        ("[2001:db8::1]", "2001:db8::1", 29400, False),
    ],
)
def test_peers_as_they_are_written(text: str, host: str, port: int, given: bool) -> None:
    peer = parse_peer(text)
    assert (peer.host, peer.port, peer.given_port) == (host, port, given)


@pytest.mark.parametrize(
    "text", ["", ":80", "node:", "node:0", "node:65536", "node:http", "[::1", "[::1]80", "[::1]:"]
)
def test_what_is_no_peer(text: str) -> None:
    with pytest.raises(UserError, match="is no host and port"):
        parse_peer(text)


@pytest.mark.parametrize("budget_ns", [10**8, 10**9, 6 * 10**11])
def test_the_report_of_any_budget_prints(budget_ns: int) -> None:
    report = doctor.deadline_report(derive(budget_ns), "here")
    findings = list(doctor.deadline_findings(report))
    assert findings[0].state is FindingState.OK
    assert len(findings) == 1 + len(report.derived) + len(report.fixed)


def test_asyncio_and_output_are_left_as_they_were() -> None:
    out = io.StringIO()
    finding = Finding(section=Section.MACHINE, name="settings", state=FindingState.NOT_OK, detail="bad")
    report = asyncio.run(doctor.examine_host([], derive(), "default", finding, {}))
    doctor.show(report, out)
    assert not report.ok
    assert out.getvalue().count("NOT OK  settings") == 2
