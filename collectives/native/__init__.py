"""The package `native` of `zbmd.collectives`."""
