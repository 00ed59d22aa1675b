"""The package `commit` of `zbmd.collectives`."""
