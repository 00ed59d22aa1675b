"""The package `torch` of `zbmd.collectives`."""
