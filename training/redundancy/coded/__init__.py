"""Erasure coding of what each rank alone holds: k data and m parity shards, of which any m may be lost.

`field` has the code (XOR, and Cauchy's matrix over GF(2^8)), `placement` the groups of ranks and which rank
has which shard; the kernel is `training.native`'s `code`. Imports nothing else. Begin with `placement`.
"""
