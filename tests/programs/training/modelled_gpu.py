"""A rank of `zbmd train` on modelled GPUs, whose kernels numpy computes: ARGV is the recipe as JSON."""

from __future__ import annotations

import os
import sys

from support.devices.cuda_model import ModelHost
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.training.sharded import devices
from zbmd.training.sharded.__main__ import main

GPUS = 2
MEMORY_VARIABLE = "MODELLED_GPU_BYTES"


def model_gpus() -> ModelHost:
    """Make this process find modelled GPUs from now on."""
    host = ModelHost(
        devices=GPUS,
        seed=os.getpid(),
        run_kernel=by_numpy,
        memory_bytes=int(os.environ.get(MEMORY_VARIABLE, 1 << 30)),
    )
    devices.FOUND[0] = devices.Devices(lambda: GPUS, host.process, nothing_compiled)
    return host


if __name__ == "__main__":
    model_gpus()
    raise SystemExit(main(sys.argv[1:]))
