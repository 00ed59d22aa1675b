"""The package `native` of `zbmd.transport`."""
