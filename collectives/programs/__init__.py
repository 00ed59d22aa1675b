"""The package `programs` of `zbmd.collectives`."""
