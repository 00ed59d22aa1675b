"""Erasure coding of what each rank alone holds: k data and m parity shards, of which any m may be lost.

`field` has the code (XOR, and Cauchy's matrix over GF(2^8)), `placement` the groups of ranks and their
shards, `machine` what they go on from after a loss; `driver` encodes and rebuilds, with `training.native`.
Imports what `redundancy` may, and `buddy`. Begin with `placement`.
"""
