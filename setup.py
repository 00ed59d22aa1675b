"""Build the compiled modules; everything else is in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from Cython.Build import cythonize
from setuptools import Extension, setup

ROOT = "src/zbmd"
LAYERS = ("transport", "actors", "collectives", "training")


def headers(layer: str) -> list[str]:
    """Those of a layer and of the layers below it, which are all that it includes."""
    own = LAYERS[: LAYERS.index(layer) + 1]
    return [str(header) for folder in own for header in sorted(Path(ROOT, folder).rglob("*.h"))]


def optimized() -> list[str]:
    """As far as the compiler goes, unless whoever builds it says something else in CFLAGS."""
    return [] if "-O" in os.environ.get("CFLAGS", "") else ["-O3"]


def extension(layer: str, name: str, *more_flags: str, libraries: tuple[str, ...] = ()) -> Extension:
    """Describe `zbmd.<layer>.<name>`, built from the Cython source of that name."""
    return Extension(
        f"zbmd.{layer}.{name}",
        [f"{ROOT}/{layer}/{name.replace('.', '/')}.pyx"],
        include_dirs=[ROOT, np.get_include()],
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
    names = ("rdma.native._rdma", "rdma.native._rdma_beat", "rdma.native._rdma_device")
    return [extension("transport", name, libraries=("ibverbs",)) for name in names]


def extensions() -> list[Extension]:
    """All of them; none where the Makefile compiles them itself, once and in place."""
    if os.environ.get("ZBMD_COMPILE") == "later":
        return []
    return cythonize(
        [
            extension("transport", "native._native"),
            extension("transport", "memory._region"),
            extension("transport", "bulk._fast_path"),
            extension("transport", "capture.native._recording"),
            extension("transport", "clock._hlc"),
            extension("transport", "link._link"),
            extension("transport", "link._spin"),
            extension("transport", "shm._shm_link"),
            *rdma_extensions(),
            extension("actors", "cluster.heartbeats._heartbeat"),
            extension("actors", "core.native._mailbox"),
            extension("actors", "core.native._serving"),
            extension("actors", "core.native._asking"),
            extension("actors", "replay._turns"),
            extension("collectives", "native._program"),
            extension("collectives", "native._stepper"),
            extension("collectives", "native._remote_stepper"),
            extension("collectives", "flight._flight"),
            extension("collectives", "native._fast_path"),
            extension("collectives", "native._messages"),
            extension("collectives", "scale._timeline"),
            extension("training", "autograd._spans"),
            # So that square roots and choices become vectors too; neither changes a result.
            extension("training", "native._kernels", "-fno-math-errno", "-fno-trapping-math"),
        ],
        language_level=3,
        include_path=["src"],
    )


setup(ext_modules=extensions(), options={"build_ext": {"parallel": len(os.sched_getaffinity(0))}})
