"""The number of threads that the libraries of a rank compute with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import PROGRAMS

from zbmd.transport.host.threads import ONE_THREAD, VARIABLES, ThreadShare, thread_share


def share(ranks: int, cores: int, **environment: str) -> ThreadShare:
    return thread_share(environment, ranks=ranks, cores=cores)


@pytest.mark.parametrize(
    ("ranks", "cores", "threads"), [(1, 8, 8), (2, 8, 4), (3, 8, 2), (8, 8, 1), (9, 8, 1)]
)
def test_ranks_share_the_cores_of_their_host(ranks: int, cores: int, threads: int) -> None:
    found = share(ranks, cores)
    assert found.threads == threads
    assert found.variables == dict.fromkeys(VARIABLES, str(threads))
    assert f"{cores} cores; OMP_NUM_THREADS sets another number" in found.why


@pytest.mark.parametrize("name", VARIABLES)
def test_what_a_user_sets_for_one_library_counts_for_all(name: str) -> None:
    found = share(2, 8, **{name: "3"})
    assert (found.threads, found.why) == (3, f"{name} is 3")
    assert found.variables == dict.fromkeys(VARIABLES, "3")


def test_what_a_user_sets_for_several_libraries_stays_as_it_is() -> None:
    found = share(1, 8, OPENBLAS_NUM_THREADS="2", MKL_NUM_THREADS="5")
    assert found.variables["OPENBLAS_NUM_THREADS"] == "2" and found.variables["MKL_NUM_THREADS"] == "5"
    assert found.variables["OMP_NUM_THREADS"] == "5", "the first one that is set, in the order of the list"


@pytest.mark.parametrize(
    ("text", "threads"), [("4,2", 4), (" 3 ", 3), ("many", 8), ("0", 8), ("-1", 8), ("", 8)]
)
def test_what_openmp_takes_is_read_and_what_is_no_number_is_left(text: str, threads: int) -> None:
    found = share(1, 8, OMP_NUM_THREADS=text)
    assert found.threads == threads
    assert found.variables["OMP_NUM_THREADS"] == text
    assert found.variables["MKL_NUM_THREADS"] == str(threads)


@given(
    st.integers(1, 1024),
    st.integers(1, 1024),
    st.dictionaries(st.sampled_from(VARIABLES), st.text(max_size=9)),
)
def test_any_environment_gives_each_rank_a_thread(
    ranks: int, cores: int, environment: dict[str, str]
) -> None:
    found = share(ranks, cores, **environment)
    assert found.threads >= 1 and set(found.variables) == set(VARIABLES)
    assert environment.items() <= found.variables.items()


def test_what_is_loaded_already_computes_with_them_and_bits_depend_on_it() -> None:
    """In a process of its own: the threads stay."""
    program = PROGRAMS / "transport" / "blas_threads.py"
    subprocess.run([sys.executable, program], env={**os.environ, **ONE_THREAD}, check=True, timeout=180)
