"""Build the two compiled modules; everything else is in pyproject.toml."""

from Cython.Build import cythonize
from setuptools import Extension, setup


def extension(layer: str, name: str) -> Extension:
    return Extension(
        f"zbmd.{layer}.{name}",
        [f"src/zbmd/{layer}/{name}.pyx"],
        include_dirs=["src/zbmd/transport"],
        depends=["src/zbmd/transport/native.h"],
        extra_compile_args=["-O3", "-std=gnu11", "-Wall"],
    )


setup(
    ext_modules=cythonize(
        [extension("transport", "_native"), extension("collectives", "_stepper")],
        language_level=3,
    )
)
