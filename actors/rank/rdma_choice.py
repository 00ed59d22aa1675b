"""Whether a process of this host uses RDMA to other hosts: for ranks and nodes alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zbmd.actors.rank_env import LINKS_VARIABLE, links_wanted
from zbmd.transport.host.facts import HostFacts
from zbmd.transport.host.rdma_device_choice import (
    DEVICES_VARIABLE,
    WantedDevice,
    parse_wanted_devices,
    why_no_rdma,
)
from zbmd.transport.secure.session_keys import Protection
from zbmd.transport.tcp.address import PROTECTION_VARIABLE


def wanted_devices(environment: Mapping[str, str]) -> tuple[WantedDevice, ...]:
    """Those that the user admits; none for all. Raises `UserError`."""
    return parse_wanted_devices(environment.get(DEVICES_VARIABLE, ""))


def why_not_rdma(
    facts: HostFacts,
    environment: Mapping[str, str],
    wanted: Sequence[WantedDevice],
    protection: Protection,
    *,
    locked_bytes: int,
) -> str | None:
    """Why not, in a line that makes sense on both hosts; None if so. locked_bytes: what the process locks."""
    links = links_wanted(environment)
    if links == "tcp":
        return f"{LINKS_VARIABLE}=tcp on {facts.name}"
    if links != "rdma" and protection is Protection.TLS:
        return f"{PROTECTION_VARIABLE}=tls on {facts.name}, and RDMA encrypts nothing"
    return why_no_rdma(facts, wanted, locked_bytes=locked_bytes)
