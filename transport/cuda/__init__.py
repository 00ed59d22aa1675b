"""The package `cuda` of `zbmd.transport`."""
