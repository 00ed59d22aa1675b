"""The package `sharded` of `zbmd.training`."""
