"""The public API of the layer: every name is there, and importing the layer loads no extra."""

from __future__ import annotations

import subprocess
import sys

import pytest

from zbmd import transport


@pytest.mark.parametrize("name", vars(transport)["__all__"])
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(transport, name) is not None
    assert name in dir(transport)


def test_importing_the_layer_loads_neither_numpy_nor_any_extra() -> None:
    extras = ("numpy", "cupy", "pyverbs", "torch")
    code = f"import sys, zbmd.transport; print([m for m in {extras} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_using_every_name_imports_no_cupy() -> None:
    code = (
        "import sys\nfrom zbmd import transport\nfor name in transport.__all__: getattr(transport, name)\n"
        "print([m for m in ('cupy', 'pyverbs', 'torch') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    unknown = "nothing"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(transport, unknown)
