"""The package `scenarios` of `zbmd.transport.sim`."""
