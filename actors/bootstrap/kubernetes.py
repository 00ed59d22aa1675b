"""Sans-I/O: a pod of a StatefulSet or of an indexed Job, whose pods find each other by a headless service.

The service's name is told by `--service` or ZBMD_SERVICE, as the manifests in deploy/kubernetes do; its DNS
record lists every pod (with `publishNotReadyAddresses` from the start). The pod's number is its completion
index or the ordinal at the end of its name; pod 0 founds the cluster. How many pods there are is not in a
pod's environment: `--nnodes`, ZBMD_NNODES or PET_NNODES says it.

Sources: Kubernetes' documentation on "DNS for Services and Pods", "StatefulSets" and "Indexed Job".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zbmd.actors.bootstrap.readings import (
    LauncherFacts,
    Stated,
    parse_join_address,
    stated_number,
    stated_text,
)
from zbmd.transport.errors import UserError
from zbmd.transport.tcp.address import TcpAddress

POD_PORT = 29_400
"""Of a pod, which has its own address: all pods may have the same."""
COMPLETIONS_MAX = 10**9
NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_ORDINAL = re.compile(r"(?P<set>[a-z0-9][a-z0-9.-]*)-(?P<ordinal>[0-9]{1,9})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What a pod knows of itself beside its environment. namespace: from `NAMESPACE_FILE`; host: its name."""

    host: str = ""
    namespace: str = ""


def read_kubernetes(
    environment: Mapping[str, str], pod: Pod, service: Stated[str] | None = None
) -> LauncherFacts | None:
    """What the pod's environment says; None outside of one. Raises `UserError`.

    service: from a flag; else ZBMD_SERVICE is read.
    """
    index = stated_number(environment, "JOB_COMPLETION_INDEX", most=COMPLETIONS_MAX)
    service = service or stated_text(environment, "ZBMD_SERVICE")
    if index is None and service is None:
        return None
    # The host name of an indexed Job's pod ends in its index; the pod's own name goes on at random.
    host = pod.host.partition(".")[0] or environment.get("POD_NAME", "")
    ordinal = _ORDINAL.fullmatch(host)
    if index is None and ordinal is not None:
        index = Stated(value=int(ordinal["ordinal"]), source="the pod's name")
    elif index is not None and ordinal is not None and int(ordinal["ordinal"]) != index.value:
        ordinal = None
    notes: tuple[str, ...] = ()
    if index is None:
        notes = (f"the pod {host!r} has no number: it is in no StatefulSet, and in no indexed Job",)
    return LauncherFacts(
        launcher="Kubernetes",
        node=index,
        join_addresses=None if service is None else _join_addresses(environment, pod, service, ordinal),
        every_node_is_joinable=service is not None,
        job=_job(environment, pod, ordinal),
        name=Stated(value=host, source="the pod's name") if host else None,
        local=stated_text(environment, "POD_IP"),
        notes=notes,
    )


def _join_addresses(
    environment: Mapping[str, str], pod: Pod, service: Stated[str], ordinal: re.Match[str] | None
) -> Stated[tuple[TcpAddress, ...]]:
    """Pod 0 by its own name, then all pods by the service's."""
    labels = service.value.split(".")
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise UserError(f"{service.source} is {service.value!r}, which is no name of a Kubernetes service.")
    namespace = environment.get("POD_NAMESPACE") or pod.namespace
    domain = service.value
    if len(labels) == 1 and _LABEL.fullmatch(namespace):
        domain = f"{service.value}.{namespace}.svc"
    names = [domain] if ordinal is None else [f"{ordinal['set']}-0.{domain}", domain]
    return Stated(
        value=tuple(parse_join_address(name, service.source, port=POD_PORT) for name in names),
        source=service.source,
    )


def _job(environment: Mapping[str, str], pod: Pod, ordinal: re.Match[str] | None) -> Stated[str] | None:
    if ordinal is None:
        return None
    namespace = environment.get("POD_NAMESPACE") or pod.namespace or "default"
    return Stated(value=f"kubernetes-{namespace[:63]}-{ordinal['set']}", source="the pod's name")
