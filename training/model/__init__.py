"""The package `model` of `zbmd.training`."""
