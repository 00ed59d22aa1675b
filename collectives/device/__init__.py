"""Arrays as callers have them: numpy, DLPack, the buffer protocol, on the host or on a CUDA device.

`arrays_in` turns an argument into a flat array; `arrays` handles device arrays and streams; `host_copy`
moves them through the arena. Imports `programs` and the transport; cupy is imported lazily. Begin
with `arrays_in`.
"""
