"""Build the compiled modules; everything else is in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

LAYERS = [f"src/zbmd/{layer}" for layer in ("transport", "actors", "collectives", "training")]


def headers(layer: str) -> list[str]:
    """Those of a layer and of the layers below it, which are all that it includes."""
    own = LAYERS[: LAYERS.index(f"src/zbmd/{layer}") + 1]
    return [str(header) for folder in own for header in sorted(Path(folder).glob("*.h"))]


def optimized() -> list[str]:
    """As far as the compiler goes, unless whoever builds it says something else in CFLAGS."""
    return [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]


def extension(layer: str, name: str, *more_flags: str, libraries: tuple[str, ...] = ()) -> Extension:
    """Describe `zbmd.<layer>.<name>`, built from the Cython source of that name."""
    return Extension(
        f"zbmd.{layer}.{name}",
        [f"src/zbmd/{layer}/{name}.pyx"],
        include_dirs=[*LAYERS, np.get_include()],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
        depends=headers(layer),
        libraries=list(libraries),
        # No fused multiply-add: the bits of a reduction must not depend on the machine.
        extra_compile_args=[*optimized(), "-std=gnu11", "-Wall", "-ffp-contract=off", *more_flags],
    )


def rdma_extensions() -> list[Extension]:
    """Those that need libibverbs, where its headers are: without them all works but memory over RDMA."""
    if not Path("/usr/include/infiniband/verbs.h").exists():
        return []
    names = ("_rdma", "_rdma_beat", "_rdma_device")
    return [extension("transport", name, libraries=("ibverbs",)) for name in names]


def extensions() -> list[Extension]:
    """All of them; none where the Makefile compiles them itself, once and in place."""
    if os.environ.get("ZBMD_COMPILE") == "later":
        return []
    return cythonize(
        [
            extension("transport", "_native"),
            extension("transport", "_region"),
            extension("transport", "_quick"),
            extension("transport", "_recording"),
            extension("transport", "_hlc"),
            extension("transport", "_link"),
            extension("transport", "_spin"),
            extension("transport", "_shm_link"),
            *rdma_extensions(),
            extension("actors", "_heartbeat"),
            extension("actors", "_mailbox"),
            extension("actors", "_serving"),
            extension("actors", "_asking"),
            extension("actors", "_turns"),
            extension("collectives", "_program"),
            extension("collectives", "_stepper"),
            extension("collectives", "_remote"),
            extension("collectives", "_flight"),
            extension("collectives", "_lane"),
            extension("collectives", "_timeline"),
            extension("training", "_spans"),
            # So that square roots and choices become vectors too; neither changes a result.
            extension("training", "_kernels", "-fno-math-errno", "-fno-trapping-math"),
        ],
        language_level=3,
        include_path=["src"],
    )


setup(ext_modules=extensions(), options={"build_ext": {"parallel": len(os.sched_getaffinity(0))}})
