"""Directories of a user with a home and of one without."""

from __future__ import annotations

from pathlib import Path

import pytest

from zbmd.transport.errors import UserError
from zbmd.transport.host import files
from zbmd.transport.host.files import UserFiles, need_directory, user_directory


@pytest.mark.parametrize("kind", UserFiles)
def test_the_variable_counts_and_then_the_home(kind: UserFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    variable, below = kind.value
    monkeypatch.setenv("HOME", "/of/somebody")
    assert user_directory(kind, {variable: "/given"}) == Path("/given/zbmd")
    assert user_directory(kind, {variable: "relative"}) == Path("/of/somebody", below, "zbmd")
    monkeypatch.setenv(variable, "/from/environ")
    assert user_directory(kind) == Path("/from/environ/zbmd")


def test_without_a_home_the_error_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user that has a number only, of whom no database knows."""
    monkeypatch.setattr(files.os.path, "expanduser", lambda path: path)
    assert user_directory(UserFiles.STATE, {}) is None
    with pytest.raises(UserError, match="no home directory to keep notes in: set ZBMD_NOTES to a path"):
        need_directory(UserFiles.STATE, {}, what="notes", variable="ZBMD_NOTES")
