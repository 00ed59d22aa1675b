"""The package `native` of `zbmd.training`."""
