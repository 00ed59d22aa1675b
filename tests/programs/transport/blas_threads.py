"""Set the threads of numpy's BLAS after it was loaded: another number adds up in another order."""

from __future__ import annotations

import os

import numpy as np

from zbmd.transport.host.threads import VARIABLES, apply_threads, computing_with

generator = np.random.default_rng(1)
A = generator.standard_normal((256, 4096), dtype=np.float32)
B = generator.standard_normal((4096, 256), dtype=np.float32)
C, D = generator.standard_normal((2, 1 << 20))


def product() -> bytes:
    """A product of matrices and one of vectors: by processor, BLAS divides the sums of one or of both."""
    return (A @ B).tobytes() + np.dot(C, D).tobytes()


def differs() -> bool:
    """Whether a product differs from that of one thread; on a busy machine one may do all of it."""
    return any(product() != alone for _ in range(50))


with computing_with(1):
    alone = product()
with computing_with(2):
    assert {os.environ[name] for name in VARIABLES} == {"2"}
    assert differs()
    with computing_with(1):
        assert product() == alone
    assert differs()
assert {os.environ[name] for name in VARIABLES} == {"1"}
assert product() == alone
apply_threads({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "1"})
assert differs()
