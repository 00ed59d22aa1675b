"""The package `parts` of `zbmd.transport.sim`."""
