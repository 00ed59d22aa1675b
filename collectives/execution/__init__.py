"""The package `execution` of `zbmd.collectives`."""
