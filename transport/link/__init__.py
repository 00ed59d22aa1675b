"""The package `link` of `zbmd.transport`."""
