"""Lazy imports: every public name of a package is there, and nothing is imported before it is used."""

from __future__ import annotations

import builtins
import importlib
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from zbmd.lazy_imports import lazy_imports

PACKAGES = ("zbmd", "zbmd.transport", "zbmd.actors", "zbmd.collectives", "zbmd.training")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    names: list[str] = vars(module)["__all__"]
    assert names == sorted(names) == dir(module)
    assert all(getattr(module, name) is not None for name in names)


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_imports_no_module_of_it(package: str) -> None:
    code = f"import sys, {package}; print(sorted(m for m in sys.modules if m.startswith('zbmd')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(sorted({"zbmd", "zbmd.lazy_imports", package}))


def package_of(block: str, *more: str) -> ModuleType:
    """Return a package whose `with lazy_imports(…):` has these statements."""
    made = ModuleType("made")
    namespace: dict[str, Any] = vars(made)
    namespace.update(lazy_imports=lazy_imports, more=more)
    exec(f"with lazy_imports(globals(), *more):\n    {block}\n", namespace)
    return made


def test_names_are_imported_when_they_are_used() -> None:
    made = package_of("from fractions import Fraction as Ratio; from importlib import metadata", "run")
    assert vars(made)["__all__"] == ["Ratio", "metadata", "run"]
    assert "Ratio" not in vars(made)
    assert made.Ratio(1, 2) * 2 == 1
    assert "Ratio" in vars(made)
    assert made.metadata is importlib.import_module("importlib.metadata")
    with pytest.raises(AttributeError, match="module 'made' has no attribute 'nothing'"):
        made.nothing  # noqa: B018


def test_imports_of_others_pass_and_the_block_restores() -> None:
    before = builtins.__import__
    found: list[object] = []
    with lazy_imports({"__name__": "made"}):
        thread = threading.Thread(target=lambda: found.append(__import__("fractions").Fraction))
        thread.start()
        thread.join()
    assert builtins.__import__ is before
    assert found == [importlib.import_module("fractions").Fraction]
