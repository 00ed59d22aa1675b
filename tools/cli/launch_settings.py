"""Settings that say how several nodes find each other, in torchrun's names, and what follows from them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from zbmd.actors.bootstrap.environments import (
    ENDPOINT_PORT,
    NODES_MAX,
    STATIC_PORT,
    TEXT_CHARACTERS_MAX,
    LauncherFacts,
    Stated,
    as_number,
    parse_join_address,
    parse_node_range,
)
from zbmd.actors.cluster.contracts import is_name
from zbmd.actors.hangs.verdict import OnHang
from zbmd.actors.rank.environment import OFF
from zbmd.actors.view import OnLoss
from zbmd.transport.capture import Detail
from zbmd.transport.clock.deadlines import parse_duration
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import PORT_MAX, TcpAddress

# ---- a setting of a run: its spellings and parser; and the merged settings, each with its source


ON: Final = "on"
"""The value of a switch that is given; `OFF` is the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: its name (TOML key; `--name` and ZBMD_NAME alike), parser and what it means.

    torchrun: torchrun has it too, under the same name, and so PET_NAME is read where ZBMD_NAME is not set.
    switch: the option takes no value, and means `on`. listed: it takes several with commas between them, and
    may be given several times.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    metavar: str
    help: str
    torchrun: bool = False
    switch: bool = False
    listed: bool = False

    @property
    def option(self) -> str:
        """The command-line spelling."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return "ZBMD_" + self.name.upper()

    @property
    def variables(self) -> tuple[str, ...]:
        """All environment variables that are read, the first one first."""
        return (self.variable, "PET_" + self.name.upper()) if self.torchrun else (self.variable,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A setting's value and where it came from."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The merged settings of a run."""

    chosen: Mapping[str, Chosen]

    def __getitem__(self, name: str) -> Any:
        """The value of a setting."""
        return self.chosen[name].value

    def source(self, name: str) -> str:
        """Return the source of a setting's value."""
        return self.chosen[name].source

    def with_value(self, name: str, value: Any, source: str) -> Settings:
        """The same with another value of one setting."""
        return Settings(chosen={**self.chosen, name: Chosen(value=value, source=source)})

    def lines(self) -> list[str]:
        """The settings as TOML, each with its source."""
        return [_toml_line(name, c) for name, c in self.chosen.items()]


def _toml_line(name: str, chosen: Chosen) -> str:
    match chosen.value:
        case None:
            return f"# {name} is not set"
        case bool() as is_on:
            value = f'"{ON if is_on else OFF}"'
        case 0.0 if name in ("progress_deadline", "snapshots"):
            value = f'"{OFF}"'
        case OnLoss() | OnHang() | Detail() as choice:
            value = f'"{choice.value}"'
        case tuple() as names:
            value = f'"{",".join(names)}"'
        case float() as seconds:
            value = f'"{seconds:g}s"'
        case int() as number:
            value = str(number)
        case other:
            escaped = str(other).replace("\\", "\\\\").replace('"', '\\"')
            value = f'"{escaped}"'
    return f"{name} = {value}  # {chosen.source}"


JOIN_S_DEFAULT: Final = 600.0
"""torchrun's `join_timeout`."""
STATIC, C10D = "static", "c10d"
ETCD: Final = ("etcd", "etcd-v2")
BACKENDS: Final = (STATIC, C10D, *ETCD)

IGNORED: Final[dict[str, str]] = {
    "rdzv_conf": "deadlines follow from --recovery-budget; --join-timeout says how long to wait for nodes",
    "monitor_interval": "the kernel reports a rank's end at once",
    "start_method": "ranks are forked from a template",
    "event_log_handler": "see --capture and --log-dir",
    "redirects": "see --log-dir",
    "tee": "see --log-dir",
    "local_ranks_filter": "every line bears its rank",
    "logs_specs": "see --log-dir",
    "numa_binding": "see zbmd-node doctor",
}
"""Options of torchrun that are taken and have no effect here, and why."""


def _number(what: str, *, least: int, most: int) -> Callable[[str], int]:
    return lambda text: as_number(text, what, least=least, most=most)


def parse_backend(text: str) -> str:
    """A backend of torchrun's. Raises `UserError`."""
    if text not in BACKENDS:
        raise UserError(f"expected one of {', '.join(BACKENDS)}, got {text[:64]!r}")
    return text


NOT_TO_HANDLE: Final = frozenset({"SIGKILL", "SIGSTOP", "SIGCHLD"})
"""The first two cannot be handled, and the third is the launcher's own."""


def parse_signals(text: str) -> tuple[str, ...]:
    """Names of signals with commas between them. Raises `UserError`."""
    names = [word.strip().upper() for word in text.split(",") if word.strip()]
    found = tuple(name if name.startswith("SIG") else f"SIG{name}" for name in names)
    known = {number.name for number in signal.Signals} - NOT_TO_HANDLE
    wrong = [name for name in found if name not in known]
    if wrong or not found:
        raise UserError(
            f"expected names of signals with commas between them, such as SIGUSR1,SIGQUIT, got {text[:64]!r}"
        )
    return found


def parse_name(text: str) -> str:
    """A name to show and to hand on. Raises `UserError`."""
    if not text or len(text) > TEXT_CHARACTERS_MAX or not text.isprintable():
        raise UserError(f"expected 1 to {TEXT_CHARACTERS_MAX} printable characters, got {text[:64]!r}")
    return text


def parse_node_name(text: str) -> str:
    """Return the name of a node or of a failure domain. Raises `UserError`."""
    if not is_name(text):
        raise UserError(
            f"expected 1 to 64 letters, digits or _.@-, a letter or digit first, got {text[:64]!r}"
        )
    return text


def spares_of(settings: Settings) -> int:
    """Return the number of spare ranks of each host. Raises `UserError` if none could replace a lost rank."""
    spares: int = settings["spare_ranks"]
    if spares and settings["on_loss"] is not OnLoss.REPLACE:
        raise UserError(
            f"--spare-ranks {spares} with --on-loss {settings['on_loss'].value}: a spare rank replaces a "
            "lost one. Give --on-loss replace, or leave --spare-ranks out."
        )
    return spares


def _setting(
    name: str, parse: Callable[[str], Any], metavar: str, help_text: str, *, torchrun: bool = True
) -> Setting:
    return Setting(name=name, parse=parse, default=None, metavar=metavar, help=help_text, torchrun=torchrun)


LAUNCH_SETTINGS: Final = (
    _setting(
        "nnodes",
        lambda text: parse_node_range(text, "the number of nodes"),
        "MIN:MAX",
        "nodes of the job, a number or a range; default: what the launcher says, or 1",
    ),
    _setting(
        "node_rank",
        _number("the node's number", least=0, most=NODES_MAX - 1),
        "N",
        "this node's number; 0 founds",
    ),
    _setting(
        "rdzv_endpoint", parse_name, "HOST[:PORT]", f"the first node's address; default port: {ENDPOINT_PORT}"
    ),
    _setting("rdzv_backend", parse_backend, "NAME", "static, c10d, or etcd, whose address is the endpoint"),
    _setting("rdzv_id", parse_name, "NAME", "tells jobs apart"),
    _setting("master_addr", parse_name, "HOST", "the first node, if there is no --rdzv-endpoint"),
    _setting(
        "master_port",
        _number("the port", least=1, most=PORT_MAX),
        "PORT",
        f"its port; default: {STATIC_PORT}",
    ),
    _setting("local_addr", parse_name, "HOST", "the address under which the others reach this node"),
    _setting(
        "signals_to_handle",
        parse_signals,
        "NAMES",
        "signals for ranks that handle them, beside SIGUSR1, SIGUSR2; SIGINT, SIGTERM, SIGHUP end the run",
    ),
    _setting("role", parse_name, "NAME", "the script finds it in ROLE_NAME"),
    _setting(
        "domain",
        parse_node_name,
        "NAME",
        "this host's failure domain, such as a rack: shards and copies are kept in different ones",
        torchrun=False,
    ),
    _setting(
        "service", parse_name, "NAME", "the headless service of these pods (Kubernetes)", torchrun=False
    ),
    _setting(
        "store", parse_name, "URL", "etcd://HOST:PORT[,…]/NAME: keeps the join addresses", torchrun=False
    ),
    _setting(
        "port",
        _number("the port", least=1, most=PORT_MAX),
        "PORT",
        "what nodes listen on; default: the join address's port",
        torchrun=False,
    ),
    Setting(
        name="join_timeout",
        parse=parse_duration,
        default=JOIN_S_DEFAULT,
        metavar="TIME",
        help="how long to wait for nodes that are missing; default: 10min",
    ),
)


def stated(settings: Settings) -> LauncherFacts:
    """Return what the user set. Raises `UserError`."""
    backend = settings["rdzv_backend"]
    store = _stated(settings, "store")
    notes: list[str] = []
    if backend in ETCD and store is None:
        store = _torchruns_etcd(settings)
    node = _stated(settings, "node_rank")
    if node is not None and backend not in (None, STATIC):
        notes.append(f"{node.source} is not used with --rdzv-backend {backend}, as in torchrun")
        node = None
    processes = _stated(settings, "nproc_per_node")
    return LauncherFacts(
        launcher="zbmd-node run",
        nodes=_stated(settings, "nnodes"),
        node=node,
        processes=None if processes is None or processes.source == "default" else processes,
        join_addresses=None if backend in ETCD else _join_addresses(settings),
        port=_stated(settings, "port"),
        holder_founds=backend == C10D,
        job=_stated(settings, "rdzv_id"),
        local=_stated(settings, "local_addr"),
        store=store,
        notes=tuple(notes),
    )


def service(settings: Settings) -> Stated[str] | None:
    """The headless service that the user set."""
    return _stated(settings, "service")


def ignored(given: Sequence[str]) -> list[str]:
    """A note for each option of torchrun that is taken and does nothing. given: their names."""
    return [f"--{name.replace('_', '-')} has no effect: {IGNORED[name]}" for name in given]


def _stated(settings: Settings, name: str) -> Stated[Any] | None:
    value = settings[name]
    return None if value is None else Stated(value=value, source=settings.source(name))


def _join_addresses(settings: Settings) -> Stated[tuple[TcpAddress, ...]] | None:
    endpoint, master = _stated(settings, "rdzv_endpoint"), _stated(settings, "master_addr")
    if endpoint is not None:
        join_address = parse_join_address(endpoint.value, endpoint.source, port=ENDPOINT_PORT)
        return Stated(value=(join_address,), source=endpoint.source)
    if master is None:
        return None
    join_address = parse_join_address(
        master.value, master.source, port=settings["master_port"] or STATIC_PORT
    )
    return Stated(value=(join_address,), source=master.source)


def _torchruns_etcd(settings: Settings) -> Stated[str]:
    """The store that `--rdzv-backend etcd --rdzv-endpoint HOST:PORT --rdzv-id NAME` means."""
    endpoint, job = _stated(settings, "rdzv_endpoint"), _stated(settings, "rdzv_id")
    if endpoint is None or job is None:
        raise UserError(
            "--rdzv-backend etcd needs etcd's address, --rdzv-endpoint HOST:PORT, and --rdzv-id NAME, which "
            "tells jobs apart."
        )
    return Stated(value=f"etcd://{endpoint.value}/{job.value}", source=endpoint.source)
