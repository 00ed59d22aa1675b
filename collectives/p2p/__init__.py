"""The package `p2p` of `zbmd.collectives`."""
