"""The package `repair` of `zbmd.collectives`."""
