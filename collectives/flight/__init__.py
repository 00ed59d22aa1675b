"""The package `flight` of `zbmd.collectives`."""
