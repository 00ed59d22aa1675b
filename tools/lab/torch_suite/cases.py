"""The tests of `torch.testing._internal.distributed.distributed_test`, with the gates for gloo open.

The module asks at its import which backend it is for, and skips what that backend does not have. Backends
that it has never heard of would skip nearly everything: zbmd is given to it under a name that equals gloo's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any, Final

from zbmd.transport.errors import UserError

MODULE: Final = "torch.testing._internal.distributed.distributed_test"
GATE: Final = 'BACKEND = os.environ["BACKEND"]'
"""The line of the module that names its backend."""

RANKS: Final = 4


class AsGloo(str):
    """A backend's name which equals gloo's, too: the gates of the tests let it in."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def load(backend: str) -> ModuleType:
    """Return the module of the tests, for this backend. One backend a process.

    Raises `UserError` if it cannot be imported, or if this version of torch names the backend differently.
    """
    os.environ["BACKEND"] = backend
    os.environ.setdefault("WORLD_SIZE", str(RANKS))  # which the module reads at its import
    for needed in ("torch", "expecttest"):
        if importlib.util.find_spec(needed) is None:
            raise UserError(f"torch's tests need {needed}: pip install {needed}")
    if backend == "gloo":
        return importlib.import_module(MODULE)
    spec = importlib.util.find_spec(MODULE)
    source = "" if spec is None else spec.loader.get_source(MODULE)  # type: ignore[union-attr]
    if spec is None or not source or GATE not in source:
        raise UserError(f"{MODULE} has no line {GATE!r}: this version of torch is not known to the suite")
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    common.DistTestCases.backend_feature["plugin"].add(backend)
    made = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = made
    made.__dict__["_as_gloo"] = AsGloo
    opened = source.replace(GATE, 'BACKEND = _as_gloo(os.environ["BACKEND"])')
    exec(compile(opened, str(spec.origin), "exec", dont_inherit=True), made.__dict__)
    return made


def test_class(module: Any) -> type[Any]:
    """Return the class whose methods are the tests."""
    return type("Cases", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def names_of(module: Any) -> list[str]:
    """Return the names of all tests, in alphabetical order."""
    return sorted(name for name in dir(test_class(module)) if name.startswith("test_"))
