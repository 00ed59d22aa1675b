"""The package `host` of `zbmd.transport`."""
