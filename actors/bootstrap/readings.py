"""Sans-I/O: what one source says about the cluster to be, and the numbers and addresses that it uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress, parse_address

NODES_MAX = 1 << 16
PROCESSES_MAX = 1 << 12
DIGITS_MAX = 18
TEXT_CHARACTERS_MAX = 256
"""Of a name, a job's or a node's, that is shown and handed on."""

STATIC_PORT = 29_500
"""torchrun's `--master-port`."""
ENDPOINT_PORT = 29_400
"""torchrun's `--rdzv-endpoint` without a port."""

T = TypeVar("T")

_HOST = re.compile(r"[A-Za-z0-9._:%\-]+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated(Generic[T]):
    """One fact, and the flag or variable that states it."""

    value: T
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRange:
    """The number of nodes that the job may have."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}:{self.most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlacement:
    """This process among those that a launcher has started on this host: `index` of `count`."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherFacts:
    """The facts that one source states. None: it does not state it.

    nodes: how many; node: this one's number; founds: whether it is the one to found the cluster, which else
    follows from its number, 0; processes: ranks on this node; processes_hint: the same where nobody says it;
    place: see `ProcessPlacement`; join_addresses: where to ask to be let in, the founder's first;
    every_node_is_joinable: all nodes listen at the join addresses' port; port: that port, where it is not the
    join addresses' own; holder_founds: whoever has the first join address founds, whatever its number; job:
    tells jobs apart; name: what people call this node; local: the address of this node; store: see `store`;
    notes: what else its reader should know.
    """

    launcher: str
    nodes: Stated[NodeRange] | None = None
    node: Stated[int] | None = None
    founds: Stated[bool] | None = None
    processes: Stated[int] | None = None
    processes_hint: Stated[int] | None = None
    place: Stated[ProcessPlacement] | None = None
    join_addresses: Stated[tuple[TcpAddress, ...]] | None = None
    every_node_is_joinable: bool = False
    port: Stated[int] | None = None
    holder_founds: bool = False
    job: Stated[str] | None = None
    name: Stated[str] | None = None
    local: Stated[str] | None = None
    store: Stated[str] | None = None
    notes: tuple[str, ...] = ()


def number(environment: Mapping[str, str], name: str, *, least: int = 0, most: int) -> int | None:
    """The number that a variable holds; None if it is not set. Raises `UserError` on anything else."""
    text = environment.get(name)
    if text is None or text == "":
        return None
    return as_number(text, name, least=least, most=most)


def as_number(text: str, source: str, *, least: int = 0, most: int) -> int:
    """A number in decimal digits. Raises `UserError`, which names the source."""
    if not (text.isascii() and text.isdecimal()) or len(text) > DIGITS_MAX or not least <= int(text) <= most:
        raise UserError(f"{source} is {text[:64]!r}, which is no number from {least} to {most}.")
    return int(text)


def stated_number(
    environment: Mapping[str, str], name: str, *, least: int = 0, most: int
) -> Stated[int] | None:
    """`number` with its source."""
    value = number(environment, name, least=least, most=most)
    return None if value is None else Stated(value=value, source=name)


def stated_text(environment: Mapping[str, str], name: str) -> Stated[str] | None:
    """A name that is printable and not too long; None if it is not set. Raises `UserError`."""
    text = environment.get(name, "")
    if not text:
        return None
    if len(text) > TEXT_CHARACTERS_MAX or not text.isprintable():
        raise UserError(
            f"{name} is {text[:64]!r}: it must be printable, and of at most {TEXT_CHARACTERS_MAX} characters."
        )
    return Stated(value=text, source=name)


def parse_node_range(text: str, source: str) -> NodeRange:
    """`4` or `2:4`. Raises `UserError`."""
    if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})?", text, re.ASCII) is None:
        raise UserError(f"{source} is {text[:64]!r}. Give a number of nodes, or a range such as 2:4.")
    first, _, last = text.partition(":")
    least = as_number(first, source, least=1, most=NODES_MAX)
    most = as_number(last or first, source, least=1, most=NODES_MAX)
    if least > most:
        raise UserError(f"{source} is {text}: at least {least} nodes and at most {most}. Swap the two.")
    return NodeRange(least=least, most=most)


def parse_join_address(text: str, source: str, *, port: int | None = None) -> TcpAddress:
    """An address to ask at: `host:port`, or a host alone where there is a default `port`.

    An IPv6 address may stand without brackets where it has no port. Raises `UserError`.
    """
    given, text = text, text.strip()
    if port is not None:
        if text.count(":") > 1 and "[" not in text:
            text = f"[{text}]"
        if ":" not in text or text.endswith("]"):
            text = f"{text}:{port}"
    try:
        join_address = parse_address(text)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if _HOST.fullmatch(join_address.host) is None:
        raise UserError(
            f"{source} is {given[:64]!r}, which is no address to ask at. Give the first host's name and its "
            "port, such as node1:29400."
        )
    return join_address
