"""The package `device` of `zbmd.collectives`."""
