"""The package `replicated` of `zbmd.training`."""
