"""The package `data` of `zbmd.training`."""
