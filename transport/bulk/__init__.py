"""The package `bulk` of `zbmd.transport`."""
