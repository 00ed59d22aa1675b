"""The number of threads of the numeric libraries in a process: BLAS, OpenMP, MKL, numexpr, PyTorch.

Ranks of a host share its cores. A library reads its variable when it is loaded, and most start their threads
then or at their first use, so a process that forks others loads them with one thread; each fork then sets the
number that it may use.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
"""Variables of the libraries. Of several that a user has set, the first one counts for those that are not."""
ONE_THREAD: Final = dict.fromkeys(VARIABLES, "1")
THREADS_MAX: Final = 1 << 16

_SETTERS: Final = {
    "openblas": (
        "scipy_openblas_set_num_threads64_",
        "scipy_openblas_set_num_threads",
        "openblas_set_num_threads64_",
        "openblas_set_num_threads",
    ),
    "libmkl_rt": ("MKL_Set_Num_Threads",),
    "libblis": ("bli_thread_set_num_threads",),
    "libgomp": ("omp_set_num_threads",),
    "libiomp": ("omp_set_num_threads",),
    "libomp": ("omp_set_num_threads",),
}
"""By a part of a library's file name, its functions that set the number; the first one counts."""

_defaulted: set[str] = set()
"""Variables of this process that are ours and not its user's."""


def default_to_one_thread() -> None:
    """Set the variables that are not set, in this process. Has no effect on what is loaded already."""
    for name in VARIABLES:
        if name not in os.environ:
            os.environ[name] = "1"
            _defaulted.add(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadShare:
    """The threads of one rank. variables: for its environment; why: where the number comes from."""

    threads: int
    variables: Mapping[str, str]
    why: str


def thread_share(environment: Mapping[str, str], *, ranks: int, cores: int) -> ThreadShare:
    """Return how many threads each of `ranks` ranks computes with, on `cores` cores that they may use.

    environment: of the ranks, or of this process if nothing is added to it. What its user has set for any
    library counts for all of them.
    """
    users = {name: environment[name] for name in VARIABLES if _is_users(name, environment)}
    for name, text in users.items():
        threads = _first_number(text)
        if threads is not None:
            variables = {**dict.fromkeys(VARIABLES, str(threads)), **users}
            return ThreadShare(threads=threads, variables=variables, why=f"{name} is {text}")
    threads = max(1, cores // ranks)
    variables = {**dict.fromkeys(VARIABLES, str(threads)), **users}
    have = "they share" if ranks > 1 else "it has"
    why = f"{have} {cores} core{'s' * (cores > 1)}; OMP_NUM_THREADS sets another number"
    return ThreadShare(threads=threads, variables=variables, why=why)


def _is_users(name: str, environment: Mapping[str, str]) -> bool:
    return name in environment and not (name in _defaulted and environment[name] == "1")


def _first_number(text: str) -> int | None:
    """Return the number that a variable gives; OpenMP takes a list, one for each level of nesting."""
    first = text.partition(",")[0].strip()
    number = int(first) if first.isdecimal() and len(first) < 8 else 0
    return number if 0 < number <= THREADS_MAX else None


def apply_threads(environment: Mapping[str, str]) -> None:
    """Have the libraries that are loaded already compute with what the variables give."""
    threads = _first_number(environment.get("OMP_NUM_THREADS", ""))
    blas = _first_number(environment.get("OPENBLAS_NUM_THREADS", "")) or threads
    if threads is None or blas is None:
        return
    _set_loaded(lambda library: blas if library == "openblas" else threads)


@contextmanager
def computing_with(threads: int) -> Generator[None]:
    """Have all libraries of this process compute with so many threads meanwhile.

    The order in which BLAS adds up depends on their number, and so do the bits: where they are promised, the
    environment must not decide.
    """
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, str(threads)))
    _set_loaded(lambda _: threads)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text
        apply_threads(os.environ)


def _set_loaded(number: Callable[[str], int]) -> None:
    for path in _loaded_libraries():
        for part, names in _SETTERS.items():
            if part in path.name:
                _call(path, names, number(part))
                break
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):  # else it is being imported
        torch.set_num_threads(number("torch"))


def _loaded_libraries() -> set[Path]:
    """Return the files of this process's shared libraries."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {Path(words[5]) for words in (line.split(maxsplit=5) for line in lines) if ".so" in words[-1]}


def _call(path: Path, names: tuple[str, ...], threads: int) -> None:
    try:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return  # it is gone from its place, and cannot be named
    for name in names:
        setter = getattr(library, name, None)
        if setter is not None:
            setter(ctypes.c_int(threads))
            return
