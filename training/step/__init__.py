"""The package `step` of `zbmd.training`."""
