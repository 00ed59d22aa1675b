"""Bytecode of zbmd and its tests, made on the host: the machine would take ten times as long for it.

Where the host has none (a fresh checkout, `PYTHONDONTWRITEBYTECODE`), each process of the machine would
compile some hundreds of modules for itself.
"""

from __future__ import annotations

import importlib.util
import os
import py_compile
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import zbmd

_BY_TIME: Final = py_compile.PycInvalidationMode.TIMESTAMP


def made(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Of zbmd and of the tests in `folder`, each with the file that it belongs in, which the host may lack.

    None if `PYTHONPYCACHEPREFIX` is set: who sets it has it there. What does not compile is left out.
    """
    if sys.pycache_prefix is not None:
        return
    package = Path(zbmd.__file__).parent
    roots = {each.resolve() for each in (package, *package.iterdir(), folder / "tests")}
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as scratch:
        new = os.path.join(scratch, "new")
        for source in sorted({source for root in roots for source in root.rglob("*.py")}):
            belongs = Path(importlib.util.cache_from_source(source))
            if _is_current(belongs, source):
                yield belongs, belongs.read_bytes()
                continue
            with suppress(py_compile.PyCompileError):
                py_compile.compile(str(source), new, doraise=True, invalidation_mode=_BY_TIME)
                yield belongs, Path(new).read_bytes()


def _is_current(bytecode: Path, source: Path) -> bool:
    """Whether Python would take it: by what is ahead of the code (PEP 552)."""
    found = source.stat()
    head = importlib.util.MAGIC_NUMBER + b"".join(
        (number & 0xFFFFFFFF).to_bytes(4, "little") for number in (0, int(found.st_mtime), found.st_size)
    )
    try:
        with bytecode.open("rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False
