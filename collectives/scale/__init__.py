"""Collectives of thousands of ranks, simulated on a model of a network.

`bounds` has the network, the placement of ranks and the lower bounds, `roles` the programs of all ranks;
`scaling` simulates one operation, undisturbed or with deaths. Imports `algorithms` and `programs`.
Begin with `scaling`; `zbmd sim` runs it.
"""
