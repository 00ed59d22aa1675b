"""The package `connect` of `zbmd.transport`."""
