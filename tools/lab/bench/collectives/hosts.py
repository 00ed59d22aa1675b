"""Collectives between two hosts, which are network namespaces, with gloo in the same run.

    python -m zbmd.tools.lab.bench.collectives.hosts [-n RANKS_A_HOST] [--cases CASE] [--sizes SIZES] [--vs
        gloo[=PYTHON]]

Ours are ranks that `zbmd-node run` starts on both hosts, timed through `group.blocking`; `zbmd` is with a MAC
on every record, as is the default, and `zbmd-none` without, as gloo is. Everyone is up for the whole run, and
is asked in turn. Columns: the time of an operation, the CPU that a rank takes for it, all threads, and our
time over the peer's in the same round. Wants root, and gloo `pip install 'zbmd[torch]'`, in this interpreter
or another. Everyone has the machine's congestion control unless `--congestion` names one for all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import uvloop

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.actors.rank.member import join
from zbmd.collectives.group.group import group
from zbmd.tools.bench.collective_ranks import SPARE_BYTES, Rank
from zbmd.tools.bench.peer_catalogue import ONE_THREAD, need_module
from zbmd.tools.bench.peers.control import CASES, CPU, bus_factor, serve
from zbmd.tools.bench.result import this_machine
from zbmd.tools.bench.stats import OURS, iterations_for, median, parse_sizes, ratio_of_medians, size_in_words
from zbmd.tools.bench.workers import CONTROL, Workers
from zbmd.tools.cli.options import exit_code_of, script_parser
from zbmd.tools.lab.hosts.netns import Lab, LabHost
from zbmd.tools.lab.hosts.switch import DEVICE
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import PROTECTION_VARIABLE

MODULE: Final = "zbmd.tools.lab.bench.collectives.hosts"
HOSTS: Final = 2
PORT: Final = 29400
SIZES_DEFAULT: Final = "1K,64K,1M,4M,16M,64M"
ITERATIONS_MAX: Final = 400
PEERS: Final = ("gloo",)
PROTECTIONS: Final = ("mac", "none")
CONGESTION_FILE: Final = "/proc/sys/net/ipv4/tcp_congestion_control"
CONGESTIONS: Final = "net.ipv4.tcp_available_congestion_control"


@dataclass(slots=True)
class _Found:
    """Times of a contender, one a round, ns."""

    times: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])


async def _serve(control: str, arena_bytes: int) -> None:
    async with join(arena=arena_bytes) as worker:
        members = await group(worker)
        try:
            ours = Rank(members.blocking, worker.segment.arena, place=worker.rank, size=members.size)
            await asyncio.to_thread(serve, control, worker.rank, ours.measure)
        finally:
            await members.close()


def _ours(hosts: Sequence[LabHost], ranks: int, protection: str, bytes_max: int, folder: str) -> Workers:
    arena_bytes = 3 * bytes_max + SPARE_BYTES
    commands: list[list[str]] = []
    for host in hosts:
        variables = {**host.environment(), **ONE_THREAD, PROTECTION_VARIABLE: protection}
        # A host's files are its own, but for the cookie.
        variables["ZBMD_COOKIE_FILE"] = os.path.join(folder, f"cookie-{protection}")
        variables["XDG_STATE_HOME"] = os.path.join(folder, f"state-{protection}-{host.number}")
        command = [*host.enter(), "env", *(f"{name}={value}" for name, value in variables.items())]
        command += [
            sys.executable,
            "-m",
            "zbmd.tools.node.cli",
            "run",
            "-n",
            str(ranks),
            "--nnodes",
            str(HOSTS),
        ]
        command += [
            "--node-rank",
            str(host.number),
            "--rdzv-endpoint",
            f"{hosts[0].address}:{PORT + PROTECTIONS.index(protection)}",
        ]
        command += ["--local-addr", host.address, "--max-restarts", "0", "-m", MODULE]
        commands.append([*command, "--control", CONTROL, "--arena", str(arena_bytes)])
    name = OURS if protection == "mac" else f"{OURS}-{protection}"
    return Workers(name, commands, ranks=HOSTS * ranks, folder=folder)


def _gloo(hosts: Sequence[LabHost], ranks: int, folder: str, python: str) -> Workers:
    if python == sys.executable:
        need_module("torch", "PyTorch, which has gloo,", "pip install 'zbmd[torch]'")
    commands: list[list[str]] = []
    for rank in range(HOSTS * ranks):
        one = [*hosts[rank // ranks].enter(), python, "-m", "zbmd.tools.bench.peers.collectives", "gloo"]
        one += ["--control", CONTROL, "--ranks", str(HOSTS * ranks), "--rank", str(rank)]
        commands.append([*one, "--store", os.path.join(folder, "gloo-store")])
    environment = {**ONE_THREAD, "GLOO_SOCKET_IFNAME": DEVICE}
    return Workers("gloo", commands, ranks=HOSTS * ranks, environment=environment, folder=folder)


def measure(arguments: argparse.Namespace) -> None:
    """Run everyone in turn, and print a line for each size and contender."""
    sizes, ranks = parse_sizes(arguments.sizes), arguments.n
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="zbmd-bench-"))
        hosts = stack.enter_context(Lab(HOSTS)).hosts
        if arguments.congestion:
            _set_congestion(hosts, arguments.congestion)
        everyone: dict[str, Workers] = {}
        for protection in arguments.protection.split(","):
            name = OURS if protection == "mac" else f"{OURS}-{protection}"
            everyone[name] = stack.enter_context(_ours(hosts, ranks, protection, max(sizes), folder))
        if arguments.vs:
            _, _, python = arguments.vs.partition("=")
            gloo = _gloo(hosts, ranks, folder, python or sys.executable)
            everyone["gloo"] = stack.enter_context(gloo)
        print(f"# {HOSTS} hosts of {ranks}; {this_machine()}")
        for case in arguments.cases or ["all-reduce"]:
            print(f"\n{CASES[case]}, {HOSTS * ranks} ranks")
            print(f"{'size':>6} {'':9} {'p50 us':>10} {'cpu us':>10} {'busbw GB/s':>10}  ours over theirs")
            for nbytes in sizes:
                found = _rounds(everyone, case, nbytes, arguments.rounds)
                _print(found, case, nbytes, HOSTS * ranks)


def _set_congestion(hosts: Sequence[LabHost], name: str) -> None:
    """New connections of these hosts have this congestion control."""
    for host in hosts:
        done = host.popen(["sh", "-c", f"echo {shlex.quote(name)} >{CONGESTION_FILE}"]).wait()
        if done:
            raise UserError(f"{host.name} has no congestion control {name!r}: `sysctl {CONGESTIONS}`")


def _rounds(everyone: dict[str, Workers], case: str, nbytes: int, rounds: int) -> dict[str, _Found]:
    found = {name: _Found() for name in everyone}
    iterations = min(ITERATIONS_MAX, iterations_for(nbytes))
    for number in range(rounds):
        names = list(everyone)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            workers = everyone[name]
            found[name].times.append(median(workers.ask(case, nbytes, iterations)[0]))
            cpu = workers.ask(CPU + case, nbytes, iterations)
            found[name].cpu.append(sum(ns for (ns,) in cpu) / len(cpu))
    return found


def _print(found: dict[str, _Found], case: str, nbytes: int, ranks: int) -> None:
    theirs = found.get("gloo")
    for name, ours in found.items():
        time_us, cpu_us = median(ours.times) / 1e3, median(ours.cpu) / 1e3
        bandwidth = nbytes * bus_factor(case, ranks) / time_us / 1e3
        ratios = ""
        if theirs is not None and ours is not theirs:
            time, cpu = (ratio_of_medians(ours.times, theirs.times), ratio_of_medians(ours.cpu, theirs.cpu))
            ratios = f"{time}, cpu {cpu.value:.2f}"
        line = (
            f"{size_in_words(nbytes):>6} {name:9} {time_us:10.1f} {cpu_us:10.1f} {bandwidth:10.2f}  {ratios}"
        )
        print(line.rstrip(), flush=True)


def _peer(text: str) -> str:
    if text and text.partition("=")[0] not in PEERS:
        raise argparse.ArgumentTypeError(f"{text}: of {', '.join(PEERS)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = script_parser("lab.bench.collectives.hosts", __doc__)
    parser.add_argument("-n", type=int, default=1, help="ranks of a host (default 1)")
    parser.add_argument("--sizes", default=SIZES_DEFAULT, metavar="SIZES", help="(%(default)s)")
    parser.add_argument("--cases", action="append", choices=list(CASES), help="repeatable (all-reduce)")
    parser.add_argument("--protection", default=",".join(PROTECTIONS), help="of ours (%(default)s)")
    parser.add_argument("--vs", default="", type=_peer, metavar="gloo[=PYTHON]", help="a peer to run in turn")
    parser.add_argument("--congestion", default="", metavar="NAME", help="of all TCP connections, as reno")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--control", help=argparse.SUPPRESS)
    parser.add_argument("--arena", type=int, default=0, help=argparse.SUPPRESS)
    return parser


@exit_code_of
def main() -> int:
    """Run the benchmark, or be a rank of it."""
    arguments = _parser().parse_args()
    if RankEnvironment.read(os.environ) is not None:
        uvloop.run(_serve(arguments.control, arguments.arena))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started ends with it
    measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
