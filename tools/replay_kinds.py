"""Every kind of machine of every layer, registered by being imported here, and what their secrets are."""

from __future__ import annotations

from pathlib import Path

from zbmd.actors.actor_capture import ACTOR
from zbmd.actors.capture_kinds import (
    DIRECTORY,
    MEMBERSHIP,
    SUPERVISION,
    UPGRADE,
    UPGRADE_AGENT,
    UPGRADE_LEDGER,
)
from zbmd.actors.cluster.cluster_kinds import CLUSTER, DETECTOR, LOCAL_JOBS, ONE_JOB
from zbmd.collectives.capture_kinds import ELASTIC_TAGS, OPERATIONS, REPAIR, STEP_COMMIT, VIEWS
from zbmd.training.capture_kinds import MIRROR, STAGE, ZERO_STEP
from zbmd.transport.cookie import cookie_path, load_or_create_cookie
from zbmd.transport.hello_kind import HELLO

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
