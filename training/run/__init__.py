"""The package `run` of `zbmd.training`."""
