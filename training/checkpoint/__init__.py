"""The package `checkpoint` of `zbmd.training`."""
