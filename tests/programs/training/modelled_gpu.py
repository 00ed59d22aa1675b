"""A rank of `zbmd train` on modelled GPUs, whose kernels numpy computes: ARGV is the recipe as JSON."""

from __future__ import annotations

import itertools
import os
import sys

from support.devices.cuda_model import ModelHost
from support.devices.cuda_model_launches import ModelLaunch
from support.devices.device_worlds import load_kernel
from support.devices.kernel_numbers import by_numpy, nothing_compiled

from zbmd.actors.rank.environment import RankEnvironment
from zbmd.collectives.device.arrays import CUDA
from zbmd.training.sharded import devices
from zbmd.training.sharded.__main__ import main
from zbmd.transport.cuda.api import DeviceLost

GPUS = 2
MEMORY_VARIABLE = "MODELLED_GPU_BYTES"
SHARES_VARIABLE = "MODELLED_GPU_SHARES"
"""If set, modelled GPUs of other processes open each other's memory."""
FAIL_VARIABLE = "MODELLED_GPU_FAILS_AT"
"""A launch of rank 1, which fails in its first process."""


def model_gpus() -> ModelHost:
    """Make this process find modelled GPUs from now on."""
    launched, left = RankEnvironment.read(os.environ), itertools.count()
    fails_at = int(os.environ.get(FAIL_VARIABLE, -1))
    is_hit = launched is not None and launched.rank == 1 and not launched.is_again

    def run(launch: ModelLaunch) -> None:
        if next(left) == fails_at and is_hit:
            raise DeviceLost("uncorrectable ECC error encountered")
        by_numpy(launch)

    host = ModelHost(
        devices=GPUS,
        seed=os.getpid(),
        run_kernel=run,
        load_kernel=load_kernel,
        shares=SHARES_VARIABLE in os.environ,
        memory_bytes=int(os.environ.get(MEMORY_VARIABLE, 1 << 30)),
    )
    CUDA.find = host.owner_of
    devices.FOUND[0] = devices.Devices(lambda: GPUS, host.process, nothing_compiled)
    return host


if __name__ == "__main__":
    model_gpus()
    raise SystemExit(main(sys.argv[1:]))
