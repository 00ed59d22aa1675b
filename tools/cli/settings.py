"""Settings of a run: command line over ZBMD_* environment over a TOML file over the default."""

from __future__ import annotations

import os
import re
import reprlib
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

from zbmd.actors.cluster.state.job_table import START_TIMEOUT_NS_DEFAULT, STOP_GRACE_NS_DEFAULT
from zbmd.actors.hangs.progress import PROGRESS_DEADLINE_NS_DEFAULT
from zbmd.actors.hangs.verdict import OnHang
from zbmd.actors.rank.environment import (
    ARENA_BYTES_DEFAULT,
    OFF,
    parse_arena,
    parse_progress_deadline,
    parse_spare_ranks,
)
from zbmd.actors.replay.process_capture import parse_bulk
from zbmd.actors.view import RANKS_MAX, OnLoss
from zbmd.tools.cli.launch_settings import LAUNCH_SETTINGS, ON, Chosen, Setting, Settings
from zbmd.transport.capture import Detail
from zbmd.transport.clock.deadlines import RECOVERY_BUDGET_NS_DEFAULT, parse_duration, parse_recovery_budget
from zbmd.transport.errors import UserError
from zbmd.transport.host.topology.cpus import usable_cpus
from zbmd.transport.host.topology.devices import read_gpus
from zbmd.transport.tcp.address import TcpAddress, parse_address

RESTARTS_MAX = 10_000
DIGITS_MAX = 18
CONFIG_BYTES_MAX = 1 << 20
"""Of a settings file; a larger one is something else."""
SNAPSHOTS_S_DEFAULT = 600.0
DEFAULT = "default"
"""The source of what nobody has set."""


def parse_budget(text: str) -> float:
    """Seconds of a recovery budget. Raises `UserError`."""
    return parse_recovery_budget(text) / 1e9


def parse_ranks(text: str) -> int:
    """Parse a number of processes: a number, `cpu`, `gpu`, or `auto` for one of these. Raises `UserError`."""
    if text in ("auto", "gpu"):
        count = min(gpus(os.environ), RANKS_MAX)
        if count or text == "auto":
            return count or cores()
        raise UserError("gpu: no GPU on this machine can be used. Give a number, or cpu.")
    if text == "cpu":
        return cores()
    if not _is_number(text) or not 1 <= int(text) <= RANKS_MAX:
        raise UserError(
            f"expected 1 to {RANKS_MAX} processes, auto, gpu or cpu, got {text!r}. "
            f"Leave it out to start one process a core ({cores()} here)."
        )
    return int(text)


def parse_restarts(text: str) -> int:
    """Parse the number of restarts to allow. Raises `UserError`."""
    if not _is_number(text) or int(text) > RESTARTS_MAX:
        raise UserError(f"expected 0 to {RESTARTS_MAX} restarts, got {text!r}")
    return int(text)


def parse_rank(text: str) -> int:
    """Parse a rank's number. Raises `UserError`."""
    if not _is_number(text) or int(text) >= RANKS_MAX:
        raise UserError(f"expected a rank, 0 to {RANKS_MAX - 1}, got {text!r}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= DIGITS_MAX


PolicyT = TypeVar("PolicyT", OnLoss, OnHang)


def parse_on_loss(text: str) -> OnLoss:
    """The policy's name. Raises `UserError`."""
    return _policy(OnLoss, text, "a lost rank")


def parse_on_hang(text: str) -> OnHang:
    """The policy's name. Raises `UserError`."""
    return _policy(OnHang, text, "a hang")


def _policy(kind: type[PolicyT], text: str, what: str) -> PolicyT:
    try:
        return kind(text)
    except ValueError:
        choices = ", ".join(str(policy.value) for policy in kind)
        raise UserError(f"expected a policy for {what}, one of {choices}, got {text!r}") from None


def parse_progress(text: str) -> float:
    """Seconds of a progress deadline, 0 for `off`. Raises `UserError`."""
    return parse_progress_deadline(text) / 1e9


def parse_grace(text: str) -> float:
    """Seconds from SIGTERM to SIGKILL, also 0. Raises `UserError`."""
    return 0.0 if text.strip() in ("0", "0s") else parse_duration(text)


def parse_snapshots(text: str) -> float:
    """Seconds that snapshots outlive their launcher, 0 for `off`. Raises `UserError`."""
    return 0.0 if text.strip() == OFF else parse_duration(text)


def parse_dashboard(text: str) -> TcpAddress | None:
    """The address of a dashboard, None for `off`. Raises `UserError`."""
    return None if text.strip() == OFF else parse_address(text)


def parse_preflight(text: str) -> bool:
    """Whether the host is measured before a run: `on` or `off`. Raises `UserError`."""
    if text.strip() not in (ON, OFF):
        raise UserError(f"expected on or off, got {text[:64]!r}")
    return text.strip() == ON


def parse_preload(text: str) -> tuple[str, ...]:
    """The modules of a list with commas. Raises `UserError`."""
    found = tuple(filter(None, (word.strip() for word in text.split(","))))
    wrong = [word for word in found if not all(part.isidentifier() for part in word.split("."))]
    if wrong:
        raise UserError(f"expected names of modules with commas between them, got {wrong[0]!r}")
    return found


def cores() -> int:
    """The cores that affinity and cgroups leave to this process, at most as many as one host has slots."""
    return min(usable_cpus(), RANKS_MAX)


SETTINGS = (
    Setting(
        name="nproc_per_node",
        parse=parse_ranks,
        default=cores(),
        metavar="N",
        help="processes to start here: a number, auto, gpu or cpu; default: the launcher's, or one per core",
        torchrun=True,
    ),
    Setting(
        name="on_loss",
        parse=parse_on_loss,
        default=OnLoss.REPLACE,
        metavar="POLICY",
        help="replace a lost rank (default), shrink to those left, or stop",
    ),
    Setting(
        name="max_restarts",
        parse=parse_restarts,
        default=3,
        metavar="K",
        help="restarts allowed within --restart-window; one more ends the run; default: 3",
        torchrun=True,
    ),
    Setting(
        name="restart_window",
        parse=parse_duration,
        default=60.0,
        metavar="TIME",
        help="the window that --max-restarts counts in; default: 60s",
    ),
    Setting(
        name="spare_ranks",
        parse=parse_spare_ranks,
        default=0,
        metavar="N",
        help="processes of each host that have begun the script and wait to replace a lost rank; default: 0",
    ),
    Setting(
        name="preload",
        parse=parse_preload,
        default=(),
        listed=True,
        metavar="MODULES",
        help="modules to import once before ranks are forked, so that replacements start sooner; torch: "
        "also what resilient loops import",
    ),
    Setting(
        name="recovery_budget",
        parse=parse_budget,
        default=RECOVERY_BUDGET_NS_DEFAULT / 1e9,
        metavar="TIME",
        help="time from a death to the repeated step; all deadlines follow from it; default: 1s",
    ),
    Setting(
        name="stop_grace",
        parse=parse_grace,
        default=STOP_GRACE_NS_DEFAULT / 1e9,
        metavar="TIME",
        help="time for ranks to save and end after Ctrl-C, SIGTERM or a stop, before SIGKILL; default: 30s",
    ),
    Setting(
        name="start_timeout",
        parse=parse_duration,
        default=START_TIMEOUT_NS_DEFAULT / 1e9,
        metavar="TIME",
        help="time for a replacement to import and join, while the others wait for it; default: 10min",
    ),
    Setting(
        name="progress_deadline",
        parse=parse_progress,
        default=PROGRESS_DEADLINE_NS_DEFAULT / 1e9,
        metavar="TIME",
        help="report a rank that makes no progress for this long, and where it stands; or off; default: 60s",
    ),
    Setting(
        name="on_hang",
        parse=parse_on_hang,
        default=OnHang.REPORT,
        metavar="POLICY",
        help="report a hang (default), replace the ranks that hang, or stop",
    ),
    Setting(
        name="snapshots",
        parse=parse_snapshots,
        default=SNAPSHOTS_S_DEFAULT,
        metavar="TIME",
        help="time for which the state of a run that is killed or fails waits for the same command again; "
        "or off; default: 10min",
    ),
    Setting(
        name="arena",
        parse=parse_arena,
        default=ARENA_BYTES_DEFAULT,
        metavar="SIZE",
        help="shared memory of each rank; default: 64MiB",
    ),
    Setting(
        name="data",
        parse=str,
        default=None,
        metavar="PATH",
        help="training data, a path or a glob; the script reads it from ZBMD_DATA",
    ),
    Setting(
        name="stdin",
        parse=parse_rank,
        default=None,
        metavar="RANK",
        help="rank that has the launcher's standard input; default: none has",
    ),
    Setting(
        name="dashboard",
        parse=parse_dashboard,
        default=None,
        metavar="HOST:PORT",
        help="serve pages on the runs of these ranks there, and /metrics; port 0 takes a free one",
    ),
    Setting(
        name="log_dir",
        parse=Path,
        default=None,
        metavar="DIR",
        help="write one file of JSON lines per rank to DIR",
        torchrun=True,
    ),
    Setting(
        name="capture",
        parse=Path,
        default=None,
        metavar="DIR",
        help="record every input of every process in DIR, for zbmd replay",
    ),
    Setting(
        name="capture_bulk",
        parse=parse_bulk,
        default=Detail.DIGEST,
        metavar="HOW",
        help="with --capture: record the digest (default) of the data of collectives, or the whole",
    ),
    Setting(
        name="preflight",
        parse=parse_preflight,
        default=False,
        metavar="on|off",
        help="measure hosts first, and again before ranks start again together or on a host that has come; "
        "one that is not fit gets no ranks and exits with code 75",
        switch=True,
    ),
    *LAUNCH_SETTINGS,
)


def gpus(environment: Mapping[str, str]) -> int:
    """The GPUs that a driver offers here, and of these only as many as CUDA_VISIBLE_DEVICES lists."""
    usable = sum(gpu.usable for gpu in read_gpus())
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    return usable if listed is None else min(usable, sum(bool(name.strip()) for name in listed.split(",")))


def merge(
    command_line: Mapping[str, str | None], environment: Mapping[str, str], config: Path | None
) -> Settings:
    """Merge all sources. Raises `UserError`, which names the source of the value it does not like."""
    switches = [setting.name for setting in SETTINGS if setting.switch]
    file_values = {} if config is None else read_config(config, switches=switches)
    chosen: dict[str, Chosen] = {}
    for setting in SETTINGS:
        on_line = command_line.get(setting.name)
        variable = next((name for name in setting.variables if name in environment), None)
        if on_line is not None:
            chosen[setting.name] = _parse(setting, on_line, setting.option)
        elif variable is not None:
            chosen[setting.name] = _parse(setting, environment[variable], variable)
        elif setting.name in file_values:
            chosen[setting.name] = _parse(setting, file_values[setting.name], str(config))
        else:
            chosen[setting.name] = Chosen(value=setting.default, source=DEFAULT)
    return Settings(chosen=chosen)


KNOWN = frozenset(setting.name for setting in SETTINGS)


def read_config(path: Path, known: Collection[str] = KNOWN, switches: Collection[str] = ()) -> dict[str, str]:
    """The settings in a TOML file, as text; `switches` may be true and false, which is on and off.

    Raises `UserError` with the file, and the line if it has one.
    """
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_BYTES_MAX + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(
            f"{path}: the settings file cannot be read: {why}. Give a readable TOML file to --config, "
            "or leave it out."
        ) from error
    if len(data) > CONFIG_BYTES_MAX:
        raise UserError(f"{path}: more than {CONFIG_BYTES_MAX} bytes: expected the settings of a run.")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers, and nesting, beyond Python's own bounds
        raise UserError(f"{path}: not valid TOML: {error}. Correct that place and try again.") from error
    values: dict[str, str] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        where = f"{path}:{_line_of(text, key)}"
        if name not in known:
            raise UserError(f"{where}: unknown setting {key!r}. Known are: {', '.join(sorted(known))}.")
        if isinstance(value, bool) and name in switches:
            values[name] = "on" if value else "off"
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise UserError(f"{where}: {key} must be a text or a number, not {reprlib.repr(value)}.")
        if isinstance(value, int) and abs(value) >= 10**DIGITS_MAX:
            raise UserError(f"{where}: {key} is a number of more than {DIGITS_MAX} digits.")
        values[name] = str(value)
    return values


def _line_of(text: str, key: str) -> int:
    wanted = re.compile(rf"""\s*\[*\s*["']?{re.escape(key)}["']?\s*[\]=.]""")
    return next((n for n, line in enumerate(text.splitlines(), 1) if wanted.match(line)), 1)


def _parse(setting: Setting, text: str, source: str) -> Chosen:
    try:
        return Chosen(value=setting.parse(text), source=source)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
