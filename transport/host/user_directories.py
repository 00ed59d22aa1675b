"""Find the directories of a user: by the XDG specification, and none without a home directory.

A user of a container may have a number and neither a name nor a home: then nothing says where.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

from zbmd.transport.errors import UserError


class UserFiles(Enum):
    """A kind of files: the variable that says where they are, and where they are below a home otherwise."""

    CONFIG = "XDG_CONFIG_HOME", ".config"
    STATE = "XDG_STATE_HOME", ".local/state"
    CACHE = "XDG_CACHE_HOME", ".cache"


def user_directory(kind: UserFiles, environ: Mapping[str, str] | None = None) -> Path | None:
    """Return our directory of a kind, which need not exist; None if the user has no home to put it in."""
    variable, below_home = kind.value
    given = (os.environ if environ is None else environ).get(variable, "")
    if os.path.isabs(given):  # the specification: ignore a relative one
        return Path(given) / "zbmd"
    home = os.path.expanduser("~")
    return Path(home) / below_home / "zbmd" if os.path.isabs(home) else None


def need_directory(
    kind: UserFiles,
    environ: Mapping[str, str],
    *,
    what: str,
    variable: str,
    error: type[UserError] = UserError,
) -> Path:
    """Return our directory of a kind. Raises `error`, which names the variable to set for `what`."""
    found = user_directory(kind, environ)
    if found is None:
        raise error(f"there is no home directory to keep {what} in: set {variable} to a path")
    return found
