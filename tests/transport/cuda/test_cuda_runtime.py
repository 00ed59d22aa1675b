"""What `CudaRuntime` calls of cupy is what cupy has: names and numbers of arguments, by a recorded list."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from zbmd.transport.cuda import api as cuda_api
from zbmd.transport.cuda import runtime as cuda_runtime

RECORDED = Path(__file__).with_name("cupy_calls.txt")
CONSTANTS = {
    "CUDARuntimeError",
    "cudaIpcMemLazyEnablePeerAccess",
    "eventDisableTiming",
    "eventInterprocess",
    "hostAllocPortable",
    "memcpyDefault",
    "streamCaptureModeThreadLocal",
    "streamNonBlocking",
}


def recorded() -> dict[str, tuple[int, int]]:
    """Fewest and most arguments of each function."""
    found: dict[str, tuple[int, int]] = {}
    for line in RECORDED.read_text().splitlines():
        if line.startswith("#"):
            continue
        name, _, rest = line.rstrip(")").partition("(")
        arguments = [each for each in rest.split(", ") if each]
        found[name] = sum("=" not in each for each in arguments), len(arguments)
    return found


def calls() -> list[tuple[str, int]]:
    """Each call of the runtime's in the module, and how many arguments it is given."""
    tree = ast.parse(Path(cuda_runtime.__file__).read_text())
    found: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = ast.unparse(node.func.value)
        first = node.args[0] if node.args else None
        if node.func.attr == "_call" and isinstance(first, ast.Constant):
            found.append((str(first.value), len(node.args) - 1))
        elif owner in ("runtime", "self._runtime"):
            found.append((node.func.attr, len(node.args)))
    return found


def test_every_call_is_one_that_cupy_has() -> None:
    known = recorded()
    made = calls()
    assert {name for name, _ in made} == set(known), "the list is of what is called"
    for name, count in made:
        fewest, most = known[name]
        assert fewest <= count <= most, f"{name} takes {fewest} to {most} arguments, not {count}"


def test_it_has_every_call_that_is_asked_of_cuda() -> None:
    for name, asked in inspect.getmembers(cuda_api.CudaApi, inspect.isfunction):
        if not name.startswith("_"):
            given = inspect.signature(getattr(cuda_runtime.CudaRuntime, name))
            assert list(given.parameters) == list(inspect.signature(asked).parameters), name


@pytest.mark.optional
def test_the_list_is_what_the_installed_cupy_has() -> None:
    """No GPU is needed for this."""
    runtime = pytest.importorskip("cupy_backends.cuda.api.runtime", reason="could not import 'cupy'")
    lines = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    for line in lines:
        said = getattr(runtime, line.partition("(")[0]).__doc__
        assert said.splitlines()[0].partition(" ->")[0] == line
    assert all(hasattr(runtime, name) for name in CONSTANTS)


def test_device_memory_is_imported_without_cupy() -> None:
    names = [
        f"zbmd.transport.cuda.{path.stem}" for path in Path(cuda_runtime.__file__).parent.glob("[a-z]*.py")
    ]
    program = (
        f"import importlib, sys; [importlib.import_module(name) for name in {names}]\n"
        "assert not [name for name in sys.modules if name.startswith('cupy')]"
    )
    assert len(names) > 8
    subprocess.run([sys.executable, "-c", program], check=True)
