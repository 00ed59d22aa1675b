"""Collectives of thousands of ranks, simulated on a model of a network.

`fabric` is the network and the placement of ranks, `roles` the programs of all ranks, `bounds` the lower
bounds, `scaling` simulates one operation, undisturbed or with deaths. Imports `algorithms` and `programs`.
Begin with `scaling`; `zbmd sim` runs it.
"""
