"""The package `communicator` of `zbmd.collectives`."""
