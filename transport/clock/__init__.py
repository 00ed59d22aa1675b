"""The package `clock` of `zbmd.transport`."""
