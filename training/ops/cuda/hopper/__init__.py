"""Kernels for Hopper GPUs (sm_90a): `wgmma`, FP8, and tiles that the tensor memory accelerator brings.

`wgmma.cuh` has the instructions. Sources are in the table of the parent folder as "hopper/…".
"""
