"""The digest of a job's code, so that every host can be checked to have the same files.

For a script: it and the Python files of its directory; for a module: those of its package. Files beyond
`FILES_MAX` count in one common digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from zbmd.actors.cluster.state.job_table import JobSpec
from zbmd.transport.errors import UserError

FILES_MAX: Final = 256
"""Files listed one by one; the others count together, as `REST`."""
FILES_READ_MAX: Final = 20_000
CODE_BYTES_MAX: Final = 256 << 20
DEPTH_MAX: Final = 12
DIGEST_BYTES: Final = 8
NAMED_MAX: Final = 8
REST: Final = "*"
_SKIPPED: Final = frozenset({"__pycache__", "site-packages", "node_modules"})
_ENVIRONMENT: Final = "pyvenv.cfg"

Code = tuple[tuple[str, str], ...]


class CodeDiffers(UserError):
    """A host's code for a job differs from its submitter's; the message names the files."""


def code_of(target: str, *, is_module: bool) -> Code:
    """The files, by their path from the directory that holds the script or package, and their digests.

    Raises `UserError` if there is no such script or module, or if it is too much.
    """
    root, files = _module(target) if is_module else _script(target)
    listed, rest = files[:FILES_MAX], files[FILES_MAX:]
    code = [(str(file.relative_to(root)), _digest(file)) for file in listed]
    if rest:
        whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for file in rest:
            whole.update(f"{file.relative_to(root)}\0{_digest(file)}\0".encode())
        code.append((REST, whole.hexdigest()))
    return tuple(code)


def check_code(spec: JobSpec) -> None:
    """Raise `CodeDiffers`, naming the differences, if the code here is not what was submitted."""
    try:
        here = dict(code_of(spec.target, is_module=spec.is_module))
    except UserError as error:
        raise CodeDiffers(f"this host does not have the code of job {spec.job:x}: {error}") from None
    there = dict(spec.code)
    if here == there:
        return
    others = [name for name in sorted(there.keys() & here.keys()) if there[name] != here[name]]
    parts = (
        ("these files differ", others),
        ("missing here", sorted(there.keys() - here.keys())),
        ("only here", sorted(here.keys() - there.keys())),
    )
    told = "; ".join(f"{what}: {_named(names)}" for what, names in parts if names)
    raise CodeDiffers(
        f"this host's code for {spec.target} differs from that of the host that submitted job {spec.job:x}: "
        f"{told}. Copy the same files to every host, to the same place, and submit the job again"
    )


def _named(names: list[str]) -> str:
    shown = ["some of the other files" if name == REST else name for name in names[:NAMED_MAX]]
    more = len(names) - NAMED_MAX
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _script(target: str) -> tuple[Path, list[Path]]:
    script = Path(target).absolute()
    if script.is_dir():
        script = script / "__main__.py"
    if not script.is_file():
        raise UserError(f"there is no script {script}")
    root = script.parent
    others = sorted(file for file in _python_files(root) if file != script)
    return root, [script, *_nearest_first(root, others)]


def _module(target: str) -> tuple[Path, list[Path]]:
    top = target.partition(".")[0]
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        found = None
    finally:
        del sys.path[0]
    if found is None or (found.origin is None and not found.submodule_search_locations):
        raise UserError(f"there is no module {top} (looked in {Path.cwd()} and the installed packages)")
    if not found.submodule_search_locations:
        file = Path(str(found.origin))
        return file.parent, [file]
    package = Path(next(iter(found.submodule_search_locations))).absolute()
    return package.parent, _nearest_first(package.parent, sorted(_python_files(package)))


def _nearest_first(root: Path, files: list[Path]) -> list[Path]:
    return sorted(files, key=lambda file: (len(file.relative_to(root).parts), file))


def _python_files(root: Path) -> Iterator[Path]:
    """Yield all Python files below a directory, except in hidden folders and virtual environments."""
    found = 0
    for folder, folders, names in os.walk(root, followlinks=True):
        here = Path(folder)
        deep = len(here.relative_to(root).parts) >= DEPTH_MAX
        folders[:] = [] if deep else sorted(name for name in folders if _is_code(here / name))
        for name in sorted(names):
            if name.endswith(".py"):
                found += 1
                if found > FILES_READ_MAX:
                    raise UserError(
                        f"there are more than {FILES_READ_MAX} Python files below {root}: put the script "
                        "into a directory of its own, with the code that belongs to it"
                    )
                yield here / name


def _is_code(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _SKIPPED
    return not hidden and not (folder / _ENVIRONMENT).exists()


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_size > CODE_BYTES_MAX:
                raise UserError(f"{file} is larger than {CODE_BYTES_MAX} bytes")
            return hashlib.blake2b(opened.read(), digest_size=DIGEST_BYTES).hexdigest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
