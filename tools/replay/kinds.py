"""Every kind of machine of every layer, registered by being imported here, and what their secrets are."""

from __future__ import annotations

from pathlib import Path

from zbmd.actors.cluster.heartbeats.detector import DETECTOR
from zbmd.actors.cluster.jobs.node_machine import LOCAL_JOBS
from zbmd.actors.cluster.jobs.single_job import ONE_JOB
from zbmd.actors.cluster.membership.capture_kind import CLUSTER
from zbmd.actors.directory.machine import DIRECTORY
from zbmd.actors.host.membership import MEMBERSHIP
from zbmd.actors.replay.recording import ACTOR
from zbmd.actors.supervision.machine import SUPERVISION
from zbmd.actors.upgrade.agent import UPGRADE_AGENT
from zbmd.actors.upgrade.coordinator import UPGRADE
from zbmd.actors.upgrade.ledger import UPGRADE_LEDGER
from zbmd.collectives.commit.machine import STEP_COMMIT
from zbmd.collectives.elastic.views_machine import VIEWS
from zbmd.collectives.group.operation_log import OPERATIONS
from zbmd.collectives.p2p.elastic_machine import ELASTIC_TAGS
from zbmd.collectives.repair.machine import REPAIR
from zbmd.training.pipeline.stage import STAGE
from zbmd.training.redundancy.machine import MIRROR
from zbmd.training.zero.machine import ZERO_STEP
from zbmd.transport.handshake.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.handshake.driver import HELLO

__all__ = [
    "ACTOR",
    "CLUSTER",
    "DETECTOR",
    "DIRECTORY",
    "ELASTIC_TAGS",
    "HELLO",
    "LOCAL_JOBS",
    "MEMBERSHIP",
    "MIRROR",
    "ONE_JOB",
    "OPERATIONS",
    "REPAIR",
    "STAGE",
    "STEP_COMMIT",
    "SUPERVISION",
    "UPGRADE",
    "UPGRADE_AGENT",
    "UPGRADE_LEDGER",
    "VIEWS",
    "ZERO_STEP",
    "secrets_for",
]


def secrets_for(cookie: Path | None) -> dict[str, bytes]:
    """What a replay needs and no log holds: the cookie in this file, or in its usual place if it is there.

    Raises `CookieError` if a file that was named cannot be used.
    """
    path = cookie_path() if cookie is None else cookie
    return {"cookie": load_or_create_cookie(path)} if cookie is not None or path.exists() else {}
