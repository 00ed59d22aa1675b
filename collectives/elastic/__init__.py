"""The package `elastic` of `zbmd.collectives`."""
