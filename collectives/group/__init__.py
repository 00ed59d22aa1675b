"""The package `group` of `zbmd.collectives`."""
