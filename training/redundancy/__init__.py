"""The package `redundancy` of `zbmd.training`."""
