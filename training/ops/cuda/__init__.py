"""CUDA kernels of the training ops: sources in CUDA C++, compiled at run time, with no header of NVIDIA's.

`compiler` turns a source into PTX and a cubin by NVRTC, without a driver; `table` lists every kernel with its
architectures and its budget of registers and shared memory. The tests compile each kernel and run its PTX in
the interpreter of `zbmd.tools.lab.ptx`. May import transport. Begin with `table`.
"""
