"""The other process of `lab.gpu`: it owns device memory, and says what it sees there.

    python -m zbmd.tools.lab.gpu.owner DEVICE NBYTES SLOT

It writes the handle of its memory as a line of hexadecimal digits; for each line that it then reads it
writes the CRC-32 of the memory's bytes, and it ends with its input.
"""

from __future__ import annotations

import sys
import zlib

from zbmd.transport.cuda.array import DeviceSpan, encode_handle
from zbmd.transport.cuda.region import DeviceExports
from zbmd.transport.cuda.runtime import CudaRuntime
from zbmd.transport.native._native import address_of

INCARNATION = 1


def main(device: int, nbytes: int, slot: int) -> None:
    """Serve until the input ends."""
    runtime = CudaRuntime(device)
    base = runtime.malloc(nbytes)
    exports = DeviceExports(runtime, slot=slot, incarnation=INCARNATION)
    handle = exports.register(DeviceSpan(address=base, shape=(nbytes,), typestr="|u1"))
    print(encode_handle(handle).hex(), flush=True)
    stream = runtime.stream_create()
    seen = bytearray(nbytes)
    for _ in sys.stdin:
        runtime.memcpy_async(address_of(seen), base, nbytes, stream)
        runtime.stream_synchronize(stream)
        print(zlib.crc32(seen), flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
