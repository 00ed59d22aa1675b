"""Compiled kernels of the engine for numpy arrays: attention, rows, AdamW, random numbers.

`_kernels` is the module; headers hold the loops. Imports nothing of zbmd. Begin with `_kernels.pyi`; ops
choose between kernels and the general formula by `has_kernels`.
"""
