"""Compiled code that the whole layer shares: mappings, rings, waits, and process deaths.

`segment.h` is the layout of shared memory and `ring.h` that of rings. Imports nothing.
"""
