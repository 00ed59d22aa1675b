"""The package `tcp` of `zbmd.transport`."""
