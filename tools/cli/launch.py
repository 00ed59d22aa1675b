"""How `zbmd-node run` learns where it stands: torchrun's flags, and what the launcher's environment says."""

from __future__ import annotations

import argparse
import errno
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zbmd.actors.bootstrap.environments import NAMESPACE_FILE, Pod
from zbmd.actors.bootstrap.merge import Bootstrap, Role, bootstrap_of
from zbmd.tools.cli.launch_settings import IGNORED, ON, Setting, Settings, ignored, service, stated
from zbmd.tools.cli.settings import DEFAULT, parse_ranks
from zbmd.transport.errors import UserError
from zbmd.transport.host.threads import thread_share
from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.tcp.sockets import PortInUse, free_port

NAMESPACE_BYTES_MAX = 256
SWITCHES = {
    "standalone": "run on this host only, whatever the environment says",
    "explain": "print how the nodes would find each other, and why, and exit",
    "run_path": argparse.SUPPRESS,
    "no_python": argparse.SUPPRESS,
}
SHORT = {"redirects": "-r", "tee": "-t"}
TRUE = frozenset({"1", "true", "yes"})


def spellings(name: str) -> list[str]:
    """`--some-name` and `--some_name`."""
    return sorted({f"--{name.replace('_', '-')}", f"--{name}"})


class _Joined(argparse.Action):
    """An option that is given several times means all of its values, with commas between them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if before is None else f"{before},{values}")


def add_setting(parser: argparse.ArgumentParser, setting: Setting) -> None:
    """Add the option of a setting, in both spellings."""
    names = [*(["-n"] if setting.name == "nproc_per_node" else []), *spellings(setting.name)]
    if setting.switch:
        parser.add_argument(*names, dest=setting.name, action="store_const", const=ON, help=setting.help)
        return
    action: Any = _Joined if setting.listed else "store"
    parser.add_argument(*names, dest=setting.name, action=action, metavar=setting.metavar, help=setting.help)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what torchrun has and is no setting: switches, and options that are taken and have no effect."""
    for name, text in SWITCHES.items():
        parser.add_argument(*spellings(name), dest=name, action="store_true", help=text)
    for name in IGNORED:
        short = [SHORT[name]] if name in SHORT else []
        parser.add_argument(*short, *spellings(name), dest=name, metavar="X", help=argparse.SUPPRESS)


def read(arguments: argparse.Namespace, settings: Settings, environment: Mapping[str, str]) -> Bootstrap:
    """Return how this process finds its cluster. Raises `UserError`."""
    if arguments.no_python:
        raise UserError(
            "--no-python: ranks are forked from a Python process, so they cannot be another program. Give a "
            "Python script that starts it."
        )
    standalone = arguments.standalone or environment.get("PET_STANDALONE", "").lower() in TRUE
    return bootstrap_of(
        environment,
        stated(settings),
        pod=Pod(host=socket.gethostname(), namespace=_namespace()),
        service=service(settings),
        standalone=standalone,
    )


def with_processes(settings: Settings, bootstrap: Bootstrap) -> Settings:
    """The settings with the number of ranks that the launcher says, where the user has not."""
    if (
        bootstrap.processes is None
        or settings.source("nproc_per_node") != DEFAULT
        or bootstrap.role is Role.EXTRA
    ):
        return settings
    source = next(fact.source for fact in bootstrap.facts if fact.name == "processes")
    try:
        count = parse_ranks(str(bootstrap.processes))
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return settings.with_value("nproc_per_node", count, source)


def notes(arguments: argparse.Namespace, settings: Settings, bootstrap: Bootstrap) -> list[str]:
    """Return notes for the user, to be printed before the run begins."""
    said = ignored([name for name in IGNORED if getattr(arguments, name) is not None])
    said += bootstrap.notes
    ranks, cpus = settings["nproc_per_node"], usable_cpus()
    if (
        bootstrap.role is not Role.EXTRA
        and bootstrap.processes == ranks > cpus
        and bootstrap.launcher != "nobody"
    ):
        said.append(
            f"this process may use {cpus} of the host's CPUs, and so may its {ranks} ranks: if "
            f"{bootstrap.launcher} has bound it, lift that (srun --cpu-bind=none, mpirun --bind-to none)"
        )
    return said


def threads_in_words(ranks: int, environment: Mapping[str, str]) -> str:
    """Return how many threads each rank of this host computes with, and why."""
    share = thread_share(environment, ranks=ranks, cores=usable_cpus())
    threads = f"{share.threads} thread{'s' * (share.threads > 1)}"
    who = f"{ranks} ranks with {threads} each" if ranks > 1 else f"1 rank with {threads}"
    return f"{who}: {share.why}"


def rank_variables(settings: Settings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that scripts for torchrun read and that all ranks of a run share."""
    return {
        "MASTER_PORT": environment.get("MASTER_PORT") or str(settings["master_port"] or free_port()),
        "ROLE_NAME": settings["role"] or "default",
        "TORCHELASTIC_MAX_RESTARTS": str(settings["max_restarts"]),
        "TORCHELASTIC_RUN_ID": settings["rdzv_id"] or "none",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def check_master_port(settings: Settings, environment: Mapping[str, str]) -> None:
    """Raise `UserError` if rank 0 on this host is to listen on a port that is taken.

    The ranks of a second run would talk to the first one's rank 0, which listens there.
    """
    if settings["master_port"]:
        port, source = settings["master_port"], "--master-port"
    elif "RANK" not in environment and environment.get("MASTER_PORT", "").isdecimal():
        port, source = int(environment["MASTER_PORT"]), "MASTER_PORT"
    else:
        return
    try:
        with socket.create_server(("", port)):
            return
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return  # rank 0 says so, if it listens at all
    raise PortInUse(
        f"{source} {port}: the port is in use on this host, perhaps by another run. Leave {source} away, and "
        "a free one is chosen, or give another port."
    )


def _namespace() -> str:
    try:
        with Path(NAMESPACE_FILE).open("rb") as file:
            return file.read(NAMESPACE_BYTES_MAX).decode(errors="replace").strip()
    except OSError:
        return ""  # in no pod, or in one without a service account's token
